"""The page of the runs: a table of all, or with `?tag=TAG` of some, and with `?run=NAME` one of them."""

import json
from collections.abc import Callable
from html import escape
from typing import Any

import gradio as gr
from gradio.components.plot import PlotData

from webui import devices_view, run_view
from webui.listing import listing_of
from webui.looks import kept_looks
from webui.parallel import plot_of
from webui.run_parts import SYMBOLS
from webui.runs_chosen import ChosenRuns
from webui.runs_table import (
    COLUMNS,
    DEFAULT_COLUMNS,
    ORDERS,
    PAGE_RUNS,
    column_title,
    columns_in,
    found,
    kept_columns,
    ordered,
    table_of,
)
from webui.site import Site
from webui.words import Words

CHOOSING = """
// Which runs are chosen stays with the browser while the table is written anew below it.
const chosen = new Set();
let focused = null, sent = "[]";
function paint() {
  const boxes = [...element.querySelectorAll("input[name=run]")];
  for (const box of boxes) box.checked = chosen.has(box.value);
  const button = element.querySelector(".runs-compare-line button");
  const few = boxes.filter((box) => box.checked).length < 2;
  if (button) {
    button.disabled = few;
    element.querySelector("#runs-why").hidden = !few;
  }
  // Only what is seen: what a search hides is not to be deleted.
  const seen = JSON.stringify(boxes.filter((box) => box.checked).map((box) => box.value));
  if (seen !== sent) trigger("input", { runs: JSON.parse(sent = seen) });
  if (focused && document.activeElement === document.body) document.getElementById(focused)?.focus();
}
element.addEventListener("change", (event) => {
  if (event.target.name !== "run") return;
  if (event.target.checked) chosen.add(event.target.value);
  else chosen.delete(event.target.value);
  paint();
});
element.addEventListener("click", (event) => {
  const tag = event.target.closest(".runs-tag");
  if (tag) trigger("select", { value: tag.dataset.tag });
  if (event.target.closest(".runs-more")) trigger("expand");
});
document.addEventListener("focusin", (event) => { focused = element.contains(event.target) ? event.target.id : null; });
new MutationObserver(paint).observe(element, { childList: true, subtree: true });
paint();
"""


NAMING = """
const run = new URLSearchParams(location.search).get("run");
if (run) {
  element.querySelector("h1").textContent = run;
  document.documentElement.classList.add("runs-one");
}
"""
"""Until the server answers, the page of a run has the run's name, and nothing of the table."""


def build(page: gr.Blocks, site: Site, words: Words) -> None:
    """The page."""
    run_name = gr.Textbox("", visible=False)
    tick = gr.Timer(site.tick_seconds, active=False)
    # Inside a column that is not shown, nothing would be read from the browser.
    stored, columns = kept_looks(), kept_columns()
    with gr.Column() as all_runs:
        listen = _build_table(site, words, columns)
    with gr.Column(visible=False) as one_run:
        looks = run_view.build(page, site, words, run_name, tick, stored)
    table_tick, tags, shown_columns, update = listen

    def opened(kept: Any, kept_columns: Any, request: gr.Request) -> list[Any]:
        name = request.query_params.get("run", "")
        is_one = bool(name)
        return [
            gr.Column(visible=not is_one), gr.Column(visible=is_one), gr.Timer(active=is_one),
            gr.Timer(active=not is_one), name, gr.update(value=request.query_params.getlist("tag")),
            gr.update(value=columns_in(kept_columns)),
            *run_view.opened_looks(site, name, request.query_params.getlist("with"), kept),
        ]  # fmt: skip

    outputs = [all_runs, one_run, tick, table_tick, run_name, tags, shown_columns, *looks]
    page.load(opened, [stored, columns], outputs, show_progress="hidden").then(**update)


def _build_table(
    site: Site, words: Words, kept: gr.BrowserState
) -> tuple[gr.Timer, gr.Dropdown, gr.Dropdown, dict[str, Any]]:
    """The table with what finds runs in it; its timer, the fields of tags and columns, and how it is filled."""
    gr.HTML(f"<h1>{escape(words('runs.title'))}</h1>", padding=False, js_on_load=NAMING)
    with gr.Row(elem_id="runs-find"):
        search = gr.Textbox(
            "", label=words("runs.search"), placeholder=words("runs.search_help"), elem_id="runs-search", min_width=200
        )
        states = gr.Dropdown(
            [(words(f"runs.state_{state}"), state) for state in SYMBOLS],
            multiselect=True, label=words("runs.state"), elem_id="runs-states", min_width=200,
        )  # fmt: skip
        # An address may name a tag that no run has yet.
        tags = gr.Dropdown(
            [], multiselect=True, allow_custom_value=True, label=words("runs.tags"), elem_id="runs-tags", min_width=200
        )
        # Fields of recipes are offered once the runs are read.
        order = gr.Dropdown(
            _choices(ORDERS, words), value="started", allow_custom_value=True, label=words("runs.sort"),
            elem_id="runs-sort", min_width=160,
        )  # fmt: skip
    with gr.Accordion(words("runs.columns"), open=False, elem_id="runs-columns-fold"):
        columns = gr.Dropdown(
            _choices(COLUMNS, words), value=list(DEFAULT_COLUMNS), multiselect=True, allow_custom_value=True,
            label=words("runs.columns"), info=words("runs.columns_help"), elem_id="runs-columns",
        )  # fmt: skip
    output = gr.HTML(elem_id="runs-list", js_on_load=CHOOSING)
    plot = gr.Plot(visible=False, show_label=False, container=False, elem_id="runs-parallel", elem_classes="runs-chart")
    devices = devices_view.build(words)
    seen_state, limit = gr.Textbox("{}", visible=False), gr.Number(PAGE_RUNS, precision=0, visible=False)
    tick = gr.Timer(site.tick_seconds, active=False)

    def fill(
        search: str, states: list[str], tags: list[str], order: Any, shown: list[str], limit: int, seen: str
    ) -> list[Any]:
        lines = listing_of(site.root).lines()
        fields = listing_of(site.root).fields(lines)
        all_tags = sorted({tag for line in lines for tag in line.tags})
        keys = list(dict.fromkeys(key for values in fields.values() for key in values))
        sorted_lines = ordered(lines, order, fields)
        looked_for: dict[str, Any] = {"search": search, "states": states or (), "tags": tags or ()}
        keys_shown = columns_in(shown)
        page = table_of(sorted_lines, site, words, columns=keys_shown, fields=fields, limit=limit, **looked_for)
        drawing = plot_of(found(lines, **looked_for), [key for key in keys_shown if "." in key], fields, words)
        orders = (*ORDERS, *(key for key in keys_shown if "." in key))
        devices_now = devices_view.devices_html(site, words)
        # What each output shows, and its update. Gradio builds a component anew for each browser to which it is sent as
        # one, so they are sent where they change.
        parts: dict[str, tuple[object, Callable[[], Any]]] = {
            "page": (page, lambda: page),
            "tags": (all_tags, lambda: gr.update(choices=all_tags)),
            "order": (orders, lambda: gr.update(choices=_choices(orders, words))),
            "columns": (keys, lambda: gr.update(choices=_choices((*COLUMNS, *keys), words))),
            "plot": (drawing, lambda: _plot(drawing)),
            "devices": (devices_now, lambda: devices_now),
        }
        now = {name: hash(repr(content)) for name, (content, _) in parts.items()}
        before = json.loads(seen)
        updates = [update() if before.get(name) != now[name] else gr.skip() for name, (_, update) in parts.items()]
        return [*updates, json.dumps(now)]

    update: dict[str, Any] = {
        "fn": fill,
        "inputs": [search, states, tags, order, columns, limit, seen_state],
        "outputs": [output, tags, order, columns, plot, devices, seen_state],
        "show_progress": "hidden",
        "trigger_mode": "always_last",
    }
    for listen in (tick.tick, search.input, states.input, tags.input, order.input, columns.input):
        listen(**update)
    columns.input(None, columns, kept, js="(columns) => [columns]")

    def only(chosen: list[str] | None, event: gr.EventData) -> Any:
        return gr.update(value=list(dict.fromkeys([*(chosen or []), str(event.value)])))

    output.expand(lambda num: num + PAGE_RUNS, limit, limit, show_progress="hidden").then(**update)
    output.select(only, tags, tags, show_progress="hidden").then(**update)
    if not site.read_only:
        ChosenRuns(site, words).attach(output, update)
    return tick, tags, columns, update


def _plot(drawing: str | None) -> gr.Plot:
    if drawing is None:
        return gr.Plot(visible=False)
    return gr.Plot(value=PlotData(type="altair", plot=drawing), visible=True)


def _choices(keys: tuple[str, ...], words: Words) -> list[tuple[str, str]]:
    return [(column_title(key, words), key) for key in keys]
