"""The page that compares runs: their curves in one chart, how their recipes differ, what came out, and answers."""

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr
from gradio.components.plot import PlotData

import tunekit
from webui import charts
from webui.history import history_of, share_read
from webui.listing import listing_of
from webui.looks import MAX_SMOOTHING, keep, kept_looks, looks_in
from webui.run_parts import empty, pictured, reading, result_rows, table
from webui.run_view import axis_radio
from webui.site import Site
from webui.words import Words, next_step, told

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
            kind = gr.Dropdown([], label=words("compare.measure"), elem_id="compare-measure", min_width=160)
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
        plot = gr.Plot(show_label=False, container=False, elem_id="compare-plot", elem_classes="runs-chart")
        parts = [_part(words, key) for key in ("recipes", "results", "samples")]
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
        names: list[str], kind: str | None, by: Any, smoothing: float, is_log: bool, clip: bool, seen: str
    ) -> list[Any]:
        view = charts.View(smoothing, is_log, by if by in charts.AXES else "step", clip)
        return look(site, words, names or [], kind, view, seen)

    update: dict[str, Any] = {
        "fn": refresh,
        "inputs": [runs, kind, by, smoothing, is_log, clip, seen_state],
        "outputs": [message, several, kind, plot, *parts, seen_state],
        "show_progress": "hidden",
        "trigger_mode": "always_last",
    }
    page.load(opened, stored, [runs, by, smoothing, is_log, clip], show_progress="hidden").then(**update)
    for listen in (tick.tick, runs.input, kind.input, by.input, smoothing.input, is_log.input, clip.input):
        listen(**update)
    runs.input(None, runs, None, js=ADDRESS)


def _part(words: Words, key: str) -> gr.HTML:
    gr.Markdown(f"## {words(f'compare.{key}')}")
    return gr.HTML(elem_id=f"compare-{key}", elem_classes="compare-wide")


def asked_for(request: gr.Request, names: Sequence[str]) -> list[str]:
    """The runs that an address names, as many as there are; a name that is none is left out."""
    run_names = [name for key, name in request.query_params.multi_items() if key == "run" and name in names]
    return list(dict.fromkeys(run_names))[:MAX_RUNS]


def look(site: Site, words: Words, names: Sequence[str], kind: str | None, view: charts.View, seen: str) -> list[Any]:
    """Return the changes of a comparison since a browser's last request."""
    unchanged: list[Any] = [gr.skip()] * 8
    if len(names) < 2:
        few = _too_few(site, words)
        return [few, gr.Column(visible=False), *[gr.skip()] * 5, ""]
    runs, faults = _readable(site, names[:MAX_RUNS])
    if len(runs) < 2:
        return [faults, gr.Column(visible=False), *[gr.skip()] * 5, ""]
    try:
        marks, logged = [], dict[str, None]()
        for run in runs:
            with history_of(run, patient=True) as reader:
                if reader.is_behind:
                    return [reading(share_read(reader), words), *[gr.skip()] * 6, ""]
                marks.append((run.name, reader.read_bytes, reader.num_events))
                logged |= dict.fromkeys(reader.series)
        now = repr((marks, kind, view, faults))
        if now == seen:
            return unchanged
        kinds = charts.kinds_of(logged)
        chosen = next((chart_kind for chart_kind in kinds if chart_kind.key == kind), kinds[0] if kinds else None)
        choices = [(chart_kind.title(words), chart_kind.key) for chart_kind in kinds]
        drawing = None if chosen is None else drawn(runs, chosen, view, words)
        parts = [differences(runs, words), results(runs, words), answers(runs, words)]
        choice = gr.Dropdown(choices=choices, value=chosen and chosen.key)
        state = repr((marks, chosen and chosen.key, view, faults))
        return [faults, gr.Column(visible=True), choice, drawing, *parts, state]
    except tunekit.TunekitError as error:
        return [told(error), gr.Column(visible=False), *[gr.skip()] * 5, ""]


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


def drawn(runs: Sequence[tunekit.Run], kind: charts.Kind, view: charts.View, words: Words) -> PlotData:
    """One chart with the curves of all runs."""
    curves = []
    for run in runs:
        with history_of(run) as reader:
            curves += charts.curves_of(run.name, reader, kind, view)
    return PlotData(type="altair", plot=charts.to_text(charts.spec_of(kind, curves, view, words)))


def differences(runs: Sequence[tunekit.Run], words: Words) -> str:
    """In what the recipes differ, as a table."""
    try:
        differing = tunekit.recipe_diff(*(run.recipe for run in runs))
    except OSError as error:
        return empty(words("compare.unreadable", file=error.filename))
    if not differing:
        return empty(words("compare.same_recipe"))
    rows = [
        [f"<code>{escape(key)}</code>", *("–" if value is None else escape(value) for value in values)]
        for key, values in differing.items()
    ]
    return table([words("compare.field"), *(run.name for run in runs)], rows, kind="runs-texts runs-sides")


def results(runs: Sequence[tunekit.Run], words: Words) -> str:
    """Render the results of runs side by side."""
    table_rows = []
    for run in runs:
        with history_of(run) as reader:
            result = reader.newest("result")
        table_rows.append(dict(result_rows(result, words)) if result is not None else {})
    names = list(dict.fromkeys(name for rows in table_rows for name in rows))
    if not names:
        return empty(words("compare.no_results"))
    rows = [[escape(name), *(escape(row.get(name, "–")) for row in table_rows)] for name in names]
    return table([words("compare.what"), *(run.name for run in runs)], rows, kind="runs-texts runs-sides")


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
