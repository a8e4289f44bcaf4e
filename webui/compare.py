"""The page that compares runs: their curves in the same charts, how their recipes differ, results, and answers."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

import tunekit
from tunekit import frontend
from webui import charts
from webui.history import history_of, share_read
from webui.listing import listing_of
from webui.looks import MAX_SMOOTHING, keep, kept_looks, looks_in, shown_charts, with_charts
from webui.run_parts import ResultRow, empty, pictured, reading, result_rows, table
from webui.run_view import NUM_CHARTS, axis_radio, charts_mark, drawings
from webui.site import Site
from webui.words import Words, next_step, told

NUM_OTHERS = 8
"""Number of values in each response besides charts."""

MAX_RUNS = 8
"""Runs that are compared at once; there are as many colours."""

ADDRESS = """(runs) => {
  const query = new URLSearchParams(location.search);
  query.delete("run");
  for (const run of runs) query.append("run", run);
  history.replaceState(null, "", location.pathname + "?" + query);
}"""
"""The address says what is compared, so that it can be kept and sent."""


def build(page: gr.Blocks, site: Site, words: Words) -> None:
    """The page."""
    gr.Markdown(f"# {words('compare.title')}")
    runs = gr.Dropdown(
        [], multiselect=True, max_choices=MAX_RUNS, label=words("compare.runs"), elem_id="compare-runs"
    )  # fmt: skip
    message = gr.HTML(elem_id="compare-message")
    with gr.Column(visible=False) as several:
        with gr.Row():
            by = axis_radio(words, elem_id="compare-by")
            smoothing = gr.Slider(
                0,
                MAX_SMOOTHING,
                0,
                step=0.01,
                label=words("runs.smoothing"),
                elem_id="compare-smoothing",
                min_width=160,
            )
            is_log = gr.Checkbox(label=words("runs.log_scale"), elem_id="compare-log-scale", min_width=120)
            clip = gr.Checkbox(label=words("runs.clip"), elem_id="compare-clip", min_width=120)
        selection = gr.Dropdown(
            [], multiselect=True, max_choices=NUM_CHARTS, label=words("runs.shown_charts"),
            info=words("runs.shown_charts_help"), elem_id="compare-shown",
        )  # fmt: skip
        with gr.Row(elem_id="compare-charts", elem_classes="runs-charts"):
            plots = [
                gr.Plot(visible=False, show_label=False, container=False, elem_classes="runs-chart", min_width=300)
                for _ in range(NUM_CHARTS)
            ]
        recipes = _part(words, "recipes")
        # The runs to choose from come with those that are compared.
        base = gr.Dropdown(
            [], label=words("compare.base"), info=words("compare.base_help"), allow_custom_value=True,
            elem_id="compare-base", render=False,
        )  # fmt: skip
        parts = [recipes, _part(words, "results", base), _part(words, "samples")]
    seen_state = gr.Textbox("", visible=False)
    tick = gr.Timer(site.tick_seconds)
    stored = kept_looks()

    keep(stored, smoothing=smoothing, is_log=is_log, by=by, clip=clip)

    def opened(kept: Any, request: gr.Request) -> list[Any]:
        names = [line.name for line in listing_of(site.root).lines()]
        looks = looks_in(kept)
        return [
            gr.Dropdown(choices=names, value=asked_for(request, names)),
            *(looks[key] for key in ("by", "smoothing", "is_log", "clip")),
        ]

    def refresh(
        names: list[str], by: Any, smoothing: float, is_log: bool, clip: bool, base: Any, seen: str, kept: Any
    ) -> list[Any]:
        view = charts.View(smoothing, is_log, by if by in charts.AXES else "step", clip)
        return look(site, words, names or [], view, seen, kept, base=base)

    update: dict[str, Any] = {
        "fn": refresh,
        "inputs": [runs, by, smoothing, is_log, clip, base, seen_state, stored],
        "outputs": [message, several, selection, base, *plots, *parts, seen_state],
        "show_progress": "hidden",
        "trigger_mode": "always_last",
    }
    page.load(opened, stored, [runs, by, smoothing, is_log, clip], show_progress="hidden").then(**update)

    def choose(names: list[str], chosen: list[str], kept: Any) -> Any:
        runs, _ = _readable(site, (names or [])[:MAX_RUNS])
        return with_charts(kept, chosen, _kinds(runs))

    choosing = selection.input(choose, [runs, selection, stored], stored, show_progress="hidden")
    for listen in (
        tick.tick,
        runs.input,
        by.input,
        smoothing.input,
        is_log.input,
        clip.input,
        base.input,
        choosing.then,
    ):
        listen(**update)
    runs.input(None, runs, None, js=ADDRESS)


def _part(words: Words, key: str, field: gr.Dropdown | None = None) -> gr.HTML:
    gr.Markdown(f"## {words(f'compare.{key}')}")
    if field is not None:
        field.render()
    return gr.HTML(elem_id=f"compare-{key}", elem_classes="compare-wide")


def asked_for(request: gr.Request, names: Sequence[str]) -> list[str]:
    """The runs that an address names, as many as there are; a name that is none is left out."""
    run_names = [name for key, name in request.query_params.multi_items() if key == "run" and name in names]
    return list(dict.fromkeys(run_names))[:MAX_RUNS]


def look(
    site: Site,
    words: Words,
    names: Sequence[str],
    view: charts.View,
    seen: str,
    kept: Any = None,
    *,
    base: str | None = None,
) -> list[Any]:
    """Return the changes of a comparison since a browser's last request."""
    if len(names) < 2:
        return _nothing(_too_few(site, words))
    runs, faults = _readable(site, names[:MAX_RUNS])
    if len(runs) < 2:
        return _nothing(faults)
    try:
        marks, read = [], []
        for run in runs:
            with history_of(run, patient=True) as reader:
                if reader.is_behind:
                    return [reading(share_read(reader), words), *[gr.skip()] * (NUM_OTHERS - 2 + NUM_CHARTS), ""]
                marks.append((run.name, charts_mark(reader, is_over=reader.newest("result") is not None)))
                read.append((run.name, reader.read_bytes))
        return _changed(runs, faults, marks, read, view, json.loads(seen or "{}"), kept, base, words)
    except tunekit.TunekitError as error:
        return _nothing(told(error))


def _changed(
    runs: Sequence[tunekit.Run],
    faults: str,
    marks: Sequence[object],
    read: Sequence[object],
    view: charts.View,
    before: dict[str, str],
    kept: Any,
    base: str | None,
    words: Words,
) -> list[Any]:
    """Return plain values of what has changed: for a component, gradio builds it anew."""
    now: dict[str, str] = {}

    def is_new(part: str, *made_from: object) -> bool:
        now[part] = repr(made_from)
        return now[part] != before.get(part)

    kinds = _kinds(runs)
    keys = shown_charts(kept, kinds)[:NUM_CHARTS]
    run_names = [run.name for run in runs]
    message = faults if is_new("faults", faults) else gr.skip()
    column = gr.skip() if before else gr.Column(visible=True)
    selection, base_choice = gr.skip(), gr.skip()
    if is_new("selection", kinds, keys):
        selection = gr.update(choices=[(kind.title(words), kind.key) for kind in kinds], value=keys)
    base = base if base in run_names else run_names[0]
    if is_new("runs", run_names):
        base_choice = gr.update(choices=run_names, value=base)
    plots: list[Any] = [gr.skip()] * NUM_CHARTS
    is_moved = is_new("places", len(keys))
    if is_new("charts", marks, view, keys) or is_moved:
        drawn = drawings(runs, view, words, [kind for key in keys for kind in kinds if kind.key == key])
        plots[: len(drawn)] = [gr.Plot(value=drawing, visible=True) for drawing in drawn] if is_moved else drawn
        if is_moved:
            plots[len(drawn) :] = [gr.Plot(visible=False)] * (NUM_CHARTS - len(drawn))
    parts: list[Any] = [gr.skip()] * 3
    if is_new("parts", read, base):
        parts = [differences(runs, words), results(runs, base, words), answers(runs, words)]
    return [message, column, selection, base_choice, *plots, *parts, json.dumps(now)]


def _nothing(message: str) -> list[Any]:
    return [message, gr.Column(visible=False), *[gr.skip()] * (NUM_OTHERS - 3 + NUM_CHARTS), ""]


def _kinds(runs: Sequence[tunekit.Run]) -> list[charts.Kind]:
    """Return the kinds of charts of runs, of the default ones those first that the most runs have."""
    logged = []
    for run in runs:
        with history_of(run) as reader:
            logged.append(list(reader.series))

    def rank(kind: charts.Kind) -> tuple[bool, int]:
        return not kind.is_default, -sum(bool(charts.kind_names(kind, names)) for names in logged)

    return sorted(charts.kinds_of(dict.fromkeys(name for names in logged for name in names)), key=rank)


def _readable(site: Site, names: Sequence[str]) -> tuple[list[tunekit.Run], str]:
    """Return the runs that can be read, and what is wrong with the others: one keeps nobody from the rest."""
    runs, faults = [], ""
    for name in names:
        try:
            run = site.run(name)
            _ = run.recipe
            runs.append(run)
        except tunekit.TunekitError as error:
            faults += told(error)
    return runs, faults


def _too_few(site: Site, words: Words) -> str:
    """Return advice where there is nothing to compare."""
    if len(listing_of(site.root).lines()) > 1:
        return empty(words("compare.too_few"))
    if site.read_only:
        return empty(words("compare.no_runs"))
    return empty(words("compare.no_runs")) + next_step(site.link(words.language, "new"), words("shell.page_new"))


def differences(runs: Sequence[tunekit.Run], words: Words) -> str:
    """In what the recipes differ, as a table."""
    try:
        differing = frontend.recipe_diff(*(run.recipe for run in runs))
    except OSError as error:
        return empty(words("compare.unreadable", file=error.filename))
    if not differing:
        return empty(words("compare.same_recipe"))
    rows = [
        [f"<code>{escape(key)}</code>", *("–" if value is None else escape(value) for value in values)]
        for key, values in differing.items()
    ]
    return table([words("compare.field"), *(run.name for run in runs)], rows, kind="runs-texts runs-sides")


def results(runs: Sequence[tunekit.Run], base: str | None, words: Words) -> str:
    """Render the results of runs side by side, with differences from a run, the best ones marked.

    Args:
        runs: The runs.
        base: Name of the run that the others are compared with; the first one if it is none of them.
        words: The texts.
    """
    columns: list[dict[str, ResultRow]] = []
    for run in runs:
        with history_of(run) as reader:
            result = reader.newest("result")
        columns.append({row.label: row for row in result_rows(result, words)} if result is not None else {})
    labels = list(dict.fromkeys(label for column in columns for label in column))
    if not labels:
        return empty(words("compare.no_results"))
    names = [run.name for run in runs]
    base_place = names.index(base) if base in names else 0
    # One method's loss is not on the scale of another one's, nor one kind of loss on that of another.
    is_one_loss = len({(run.recipe.method.type, str(dict(run.recipe.method).get("loss_type"))) for run in runs}) == 1
    table_rows = []
    for label in labels:
        rows = [column.get(label) for column in columns]
        numbers = [row.value if row is not None and (is_one_loss or not row.is_learned) else None for row in rows]
        best = _best(numbers, next((row.better for row in rows if row is not None), None))
        cells = [_result(row, number, numbers[base_place], best) for row, number in zip(rows, numbers, strict=True)]
        table_rows.append([escape(label), *cells])
    return table([words("compare.what"), *names], table_rows, kind="runs-texts runs-sides")


def _best(numbers: Sequence[float | None], better: str | None) -> float | None:
    """Return the best of several numbers; None where all are the same or no direction is better."""
    present = {number for number in numbers if number is not None}
    if len(present) < 2 or better is None:
        return None
    return min(present) if better == "less" else max(present)


def _result(row: ResultRow | None, number: float | None, base: float | None, best: float | None) -> str:
    """Render a result with its difference from another one, in the metric's own unit or in percent."""
    if row is None:
        return "–"
    text = escape(row.text)
    if number is not None and number == best:
        text = f"<strong class='compare-best'>{text} ★</strong>"
    if number is None or base is None or number == base or not (row.is_learned or base):
        return text
    difference = f"{number - base:+.4g}" if row.is_learned else f"{number / base - 1:+.1%}"
    return f"{text} <span class='compare-difference'>{difference.replace('-', '−')}</span>"


def answers(runs: Sequence[tunekit.Run], words: Words) -> str:
    """Render the answers of runs to the same prompts after training; before it where they have not got that far."""
    answer_rows, urls = [], dict[str, list[str]]()
    for run in runs:
        with history_of(run) as reader:
            answer_rows.append({prompt: dict(by_when) for prompt, by_when in reader.answers.items()})
            digests = {prompt: shown for prompt, shown in reader.pictures.items() if prompt not in urls}
        thumbnails = run.thumbnails(digest for of_prompt in digests.values() for digest in of_prompt)
        for prompt, of_prompt in digests.items():
            urls[prompt] = [thumbnails[digest] for digest in of_prompt if digest in thumbnails]
    prompts = list(dict.fromkeys(prompt for answers in answer_rows for prompt in answers))
    if not prompts:
        return empty(words("runs.no_samples"))
    # Those that all were asked come first.
    prompts.sort(key=lambda prompt: sum(prompt not in answers for answers in answer_rows))
    rows = [
        [pictured(prompt, urls.get(prompt, ())), *(_answer(answers.get(prompt), words) for answers in answer_rows)]
        for prompt in prompts
    ]
    return table([words("runs.prompt"), *(run.name for run in runs)], rows, kind="runs-texts runs-sides")


def _answer(by_when: dict[str, str] | None, words: Words) -> str:
    if not by_when:
        return "–"
    after = by_when.get("after")
    if after is None:
        early = next(iter(by_when.values()))
        return f"<em>{escape(words('compare.untrained'))}</em> {escape(early)}"
    return f"<div class='runs-answer'>{escape(after)}</div>"
