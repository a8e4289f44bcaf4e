"""The page of the runs: a table of all, and with `?run=NAME` one of them."""

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

import tunekit
from webui import run_view
from webui.listing import Line, listing_of
from webui.looks import kept_looks
from webui.run_parts import SYMBOLS, duration, empty, moment, state_words
from webui.site import Site
from webui.words import Words, next_step

ORDERS = ("started", "name", "measure", "held_out", "tokens_per_second")
"""Columns that the table is sorted by."""

CHOOSING = """
// Which runs are chosen stays with the browser while the table is written anew below it.
const chosen = new Set();
let focused = null;
function paint() {
  const boxes = [...element.querySelectorAll("input[name=run]")];
  for (const box of boxes) box.checked = chosen.has(box.value);
  const button = element.querySelector("button");
  const few = boxes.filter((box) => box.checked).length < 2;
  if (button) {
    button.disabled = few;
    element.querySelector("#runs-why").hidden = !few;
  }
  if (focused && document.activeElement === document.body) document.getElementById(focused)?.focus();
}
element.addEventListener("change", (event) => {
  if (event.target.name !== "run") return;
  if (event.target.checked) chosen.add(event.target.value);
  else chosen.delete(event.target.value);
  paint();
});
document.addEventListener("focusin", (event) => { focused = element.contains(event.target) ? event.target.id : null; });
new MutationObserver(paint).observe(element, { childList: true, subtree: true });
paint();
"""


def build(page: gr.Blocks, site: Site, words: Words) -> None:
    """The page."""
    run_name = gr.Textbox("", visible=False)
    tick = gr.Timer(site.tick_seconds, active=False)
    # Inside a column that is not shown, nothing would be read from the browser.
    stored = kept_looks()
    with gr.Column() as all_runs:
        listen = _build_table(site, words)
    with gr.Column(visible=False) as one_run:
        looks = run_view.build(page, site, words, run_name, tick, stored)
    table_tick, update = listen

    def opened(kept: Any, request: gr.Request) -> list[Any]:
        name = request.query_params.get("run", "")
        is_one = bool(name)
        return [
            gr.Column(visible=not is_one), gr.Column(visible=is_one), gr.Timer(active=is_one),
            gr.Timer(active=not is_one), name,
            *run_view.opened_looks(site, name, request.query_params.getlist("with"), kept),
        ]  # fmt: skip

    outputs = [all_runs, one_run, tick, table_tick, run_name, *looks]
    page.load(opened, stored, outputs, show_progress="hidden").then(**update)


def _build_table(site: Site, words: Words) -> tuple[gr.Timer, dict[str, Any]]:
    """The table with what finds runs in it; its timer, and how it is filled."""
    gr.Markdown(f"# {words('runs.title')}")
    with gr.Row(elem_id="runs-find"):
        search = gr.Textbox(
            "", label=words("runs.search"), placeholder=words("runs.search_help"), elem_id="runs-search", min_width=200
        )
        states = gr.Dropdown(
            [(words(f"runs.state_{state}"), state) for state in SYMBOLS],
            multiselect=True, label=words("runs.state"), elem_id="runs-states", min_width=200,
        )  # fmt: skip
        tags = gr.Dropdown([], multiselect=True, label=words("runs.tags"), elem_id="runs-tags", min_width=200)
        orders = [(words(f"runs.{key}"), key) for key in ORDERS]
        order = gr.Dropdown(orders, value="started", label=words("runs.sort"), elem_id="runs-sort", min_width=160)
    output = gr.HTML(elem_id="runs-list", js_on_load=CHOOSING)
    seen_state = gr.Textbox("", visible=False)
    tick = gr.Timer(site.tick_seconds, active=False)

    def fill(search: str, states: list[str], tags: list[str], order: Any, seen: str) -> list[Any]:
        lines = listing_of(site.root).lines()
        all_tags = sorted({tag for line in lines for tag in line.tags})
        page = table_of(ordered(lines, order), site, words, search=search, states=states or (), tags=tags or ())
        mark = repr((hash(page), all_tags))
        if mark == seen:
            return [gr.skip(), gr.skip(), gr.skip()]
        return [page, gr.Dropdown(choices=all_tags), mark]

    update = {"fn": fill, "inputs": [search, states, tags, order, seen_state], "outputs": [output, tags, seen_state]}
    update |= {"show_progress": "hidden", "trigger_mode": "always_last"}
    for listen in (tick.tick, search.input, states.input, tags.input, order.input):
        listen(**update)
    return tick, update


def ordered(lines: Sequence[Line], by: Any) -> list[Line]:
    """Return runs in the order of a column, the best first; those without a value last, and otherwise the newest first.

    Args:
        lines: The runs, the newest first.
        by: One of `ORDERS`; anything else: the newest first.
    """
    if by == "name":
        return sorted(lines, key=lambda line: line.name)
    if by not in ("measure", "held_out", "tokens_per_second"):
        return list(lines)

    def place(line: Line) -> tuple[bool, str, float]:
        value = {"measure": line.value, "held_out": line.held_out}.get(by, line.tokens_per_second)
        if value is None:
            return True, "", 0.0
        if by == "tokens_per_second":
            return False, "", -value
        # Losses and rewards are not compared with each other.
        return False, line.measure, value if tunekit.direction_of(line.measure, ()) == "less" else -value

    return sorted(lines, key=place)


def found(lines: Sequence[Line], search: str, states: Sequence[str], tags: Sequence[str]) -> list[Line]:
    """The runs that have every word that is looked for, one of the states, and all tags."""
    words_searched = search.lower().split()
    return [
        line
        for line in lines
        if all(
            any(word in text.lower() for text in (line.name, line.method, line.model, *line.tags))
            for word in words_searched
        )
        and (not states or line.state in states)
        and set(tags) <= set(line.tags)
    ]


def table_of(
    lines: Sequence[Line],
    site: Site,
    words: Words,
    *,
    search: str = "",
    states: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> str:
    """The table as HTML: a form that leads to the comparison of the runs that are ticked."""
    if not lines:
        return _no_runs(site, words)
    some = found(lines, search, states, tags)
    if not some:
        return empty(words("runs.none_found", num=len(lines)))
    keys = (
        "compare",
        "name",
        "state",
        "method",
        "model",
        "step",
        "measure",
        "held_out",
        "tokens_per_second",
        "left",
        "started",
    )
    heads = "".join(f"<th scope='col' class='runs-{key}'>{escape(words(f'runs.{key}'))}</th>" for key in keys)
    rows = "".join(_row(line, site, words) for line in some)
    return (
        f"<form action='{escape(site.link(words.language, 'compare'))}' method='get'>"
        f"<table class='runs-table runs-all'><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        f"<p class='runs-compare-line'><button class='shell-button' disabled>{escape(words('runs.compare_chosen'))}"
        f"</button> <span id='runs-why'>{escape(words('runs.choose_two'))}</span></p></form>"
    )


def _row(line: Line, site: Site, words: Words) -> str:
    name = escape(line.name)
    link = escape(site.link(words.language, "runs", run=line.name))
    tags = "".join(f" <span class='runs-tag'>{escape(tag)}</span>" for tag in line.tags)
    pick = (
        f"<input type='checkbox' name='run' value='{name}' id='pick-{name}' "
        f"aria-label='{escape(words('runs.pick', name=line.name))}'>"
    )
    steps = f"{line.step:,}" if line.num_steps is None else f"{line.step:,} / {line.num_steps:,}"
    remaining = "–" if line.seconds_left is None else duration(line.seconds_left, words)
    cells = {
        "compare": pick,
        "name": f"<a id='run-{name}' href='{link}'>{name}</a>{tags}",
        "state": state_words(line.state, words),
        "method": escape(line.method),
        "model": escape(line.model),
        "step": steps,
        "measure": _measure(line, words),
        "held_out": "–" if line.held_out is None else f"{line.held_out:.4g}",
        "tokens_per_second": "–" if line.tokens_per_second is None else f"{line.tokens_per_second:,.0f}",
        "left": escape(remaining),
        "started": moment(line.started) if line.started else "–",
    }
    return "<tr>" + "".join(
        f"<td class='runs-{key}{' runs-unknown' if cell == '–' else ''}' data-label='{escape(words(f'runs.{key}'))}'>"
        f"{cell}</td>"
        for key, cell in cells.items()
    ) + "</tr>"  # fmt: skip


def _measure(line: Line, words: Words) -> str:
    """Return the metric that best tells whether a run learns."""
    if line.value is None:
        return "–"
    kind = {"reward": "reward", "rewards/margins": "margins", "margin": "margins"}.get(line.measure, "loss")
    return f"{escape(words(f'charts.{kind}'))} {line.value:.4g}"


def _no_runs(site: Site, words: Words) -> str:
    new = site.link(words.language, "new", from_="recipe:sft/quickstart")
    link = "" if site.read_only else next_step(new, words("runs.start"))
    return (
        f"<div class='runs-empty'><p>{escape(words('runs.none'))}</p>{link}"
        f"<p>{escape(words('runs.in_terminal'))} <code>tunekit train sft/quickstart</code></p></div>"
    )
