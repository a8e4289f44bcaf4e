"""One run: how it goes, its curves, answers, log, recipe and plan, checkpoints, and what came out.

One handler looks for what is new and answers only with what has changed; what that is, the browser says.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import yaml
from gradio.components.plot import PlotData

import tunekit
from tunekit import frontend
from webui import charts, controls, evaluate_view, export_view, log_view, run_notice, run_parts
from webui.history import history_of, share_read
from webui.listing import Line, listing_of
from webui.looks import MAX_SMOOTHING, keep, looks_in, shown_charts, with_charts
from webui.plan_view import plan_html
from webui.site import Site
from webui.words import Words, told

MANY_EVENTS = 500
"""Events of a run by whose share its charts are drawn anew, where it has more than twice as many."""

REDRAW_SECONDS = 10
"""Seconds after which they are drawn anew in any case."""

NUM_CHARTS = 24
"""Charts that there is room for."""

NUM_OTHERS = 12
"""Number of other values in each response."""

MAX_OVERLAID = 4
"""Other runs in the same charts."""

MAX_DRAWINGS = 24
"""Runs' charts that are kept for the next browser that asks for the same; each takes about a quarter of a megabyte."""

NUM_AT_ONCE = 8
"""Browsers that are answered at once: some wait for the end of a file."""

_drawings: OrderedDict[tuple[object, ...], list[PlotData]] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class Parts:
    """Parts of a run's page that change during the run, each with its source."""

    seen: gr.Textbox
    head: gr.HTML
    warnings: gr.HTML
    selection: gr.Dropdown
    plots: list[gr.Plot]
    no_curves: gr.HTML
    samples: gr.HTML
    completions: gr.HTML
    order: gr.Radio
    checkpoints: gr.HTML
    result: gr.HTML
    recipe: gr.Code
    plan: gr.HTML

    @property
    def outputs(self) -> list[Any]:
        """In the order of what `look` answers."""
        return [
            self.seen, self.head, self.warnings, self.no_curves, *self.plots, self.selection, self.order,
            self.completions, self.samples, self.checkpoints, self.result, self.recipe, self.plan,
        ]  # fmt: skip


ADDRESS = """(runs) => {
  const query = new URLSearchParams(location.search);
  query.delete("with");
  for (const run of runs) query.append("with", run);
  history.replaceState(null, "", location.pathname + "?" + query);
}"""
"""The address says which other runs are in the charts."""


def build(
    page: gr.Blocks, site: Site, words: Words, run_name: gr.Textbox, tick: gr.Timer, kept: gr.BrowserState
) -> list[Any]:
    """The view. `run_name` says of which run, and is asked again at every tick; `kept` how charts are looked at.

    Returns:
        The fields that are to show what the browser keeps: `opened_looks` tells.
    """
    seen_state = gr.Textbox("", visible=False)
    back = site.link(words.language, "runs")
    gr.HTML(f"<a href='{escape(back)}'>← {escape(words('runs.all'))}</a>", elem_id="runs-back")
    head = gr.HTML(elem_id="runs-head")
    run_notice.build(words)
    warnings = gr.HTML(elem_id="runs-warnings", visible=False)
    controls.build(page, site, words, run_name, tick)
    with gr.Tabs(elem_id="runs-tabs"):
        with gr.Tab(words("runs.tab_charts"), id="charts"):
            looks, selection = _looks(words)
            no_curves = gr.HTML(elem_id="runs-no-curves", visible=False)
            with gr.Row(elem_id="runs-charts", elem_classes="runs-charts"):
                plots = [
                    gr.Plot(visible=False, show_label=False, container=False, elem_classes="runs-chart", min_width=300)
                    for _ in range(NUM_CHARTS)
                ]
        with gr.Tab(words("runs.tab_samples"), id="samples"):
            samples = gr.HTML(elem_id="runs-samples")
            orders = [(words(f"runs.order_{key}"), key) for key in ("newest", "best", "worst")]
            order = gr.Radio(
                orders, value="newest", label=words("runs.completions"), visible=False, elem_id="runs-order"
            )
            completions = gr.HTML(elem_id="runs-completions")
        with gr.Tab(words("runs.tab_log"), id="log"):
            log_view.build(site, words, run_name, tick)
        with gr.Tab(words("runs.tab_recipe"), id="recipe"):
            plan = gr.HTML(elem_id="runs-plan")
            recipe = gr.Code(
                language="yaml", interactive=False, label=words("runs.recipe"), max_lines=24, elem_id="runs-recipe"
            )
        with gr.Tab(words("runs.tab_checkpoints"), id="checkpoints"):
            checkpoints = gr.HTML(elem_id="runs-checkpoints")
        with gr.Tab(words("runs.tab_result"), id="result"):
            result = gr.HTML(elem_id="runs-result")
        with gr.Tab(words("evaluate.tab"), id="evaluate"):
            evaluation = evaluate_view.build(site, words, run_name)
        with gr.Tab(words("export.tab"), id="export"):
            export = export_view.build(site, words, run_name)

    def refresh_tabs(name: str, evaluation_seen: str, export_seen: str) -> list[Any]:
        return [*evaluation.look(name, evaluation_seen), *export.look(name, export_seen)]

    gr.on(
        [run_name.change, tick.tick], refresh_tabs, [run_name, evaluation.outputs[0], export.outputs[0]],
        [*evaluation.outputs, *export.outputs], show_progress="hidden", trigger_mode="always_last",
    )  # fmt: skip
    parts = Parts(
        seen_state,
        head,
        warnings,
        selection,
        plots,
        no_curves,
        samples,
        completions,
        order,
        checkpoints,
        result,
        recipe,
        plan,
    )
    inputs = [run_name, seen_state, order, *looks, kept]

    def refresh(name: str, seen: str, order: Any, *looked_at: Any) -> list[Any]:
        return look(site, words, name, seen, order, *looked_at)

    def choose(name: str, chosen: list[str], kept: Any) -> Any:
        with history_of(site.run(name)) as reader:
            return with_charts(kept, chosen, charts.kinds_of(reader.series))

    overlaid = looks[-1]
    choosing = selection.input(choose, [run_name, selection, kept], kept, show_progress="hidden")
    for listen in (run_name.change, tick.tick, order.input, *(control.input for control in looks), choosing.then):
        listen(
            refresh, inputs, parts.outputs, show_progress="hidden", trigger_mode="always_last",
            concurrency_limit=NUM_AT_ONCE,
        )  # fmt: skip

    def others(name: str) -> Any:
        return gr.Dropdown(choices=[line.name for line in listing_of(site.root).lines() if line.name != name])

    gr.on([run_name.change, overlaid.focus], others, run_name, overlaid, show_progress="hidden")
    overlaid.input(None, overlaid, None, js=ADDRESS)
    smoothing, is_log, by, clip, _ = looks
    keep(kept, smoothing=smoothing, is_log=is_log, by=by, clip=clip)
    return looks


def opened_looks(site: Site, name: str, overlaid: list[str], kept: Any) -> list[Any]:
    """Return the chart settings of an opened page: as the browser stored them, with the runs that the address names."""
    run_names = [line.name for line in listing_of(site.root).lines() if line.name != name]
    there = [run_name for run_name in dict.fromkeys(overlaid) if run_name in run_names][:MAX_OVERLAID]
    return [*looks_in(kept).values(), gr.Dropdown(choices=run_names, value=there)]


def _looks(words: Words) -> tuple[list[Any], gr.Dropdown]:
    """Return the controls of the charts, and of which are shown."""
    with gr.Accordion(words("runs.look"), open=False, elem_id="runs-look"):
        with gr.Row():
            smoothing = gr.Slider(
                0, MAX_SMOOTHING, 0, step=0.01, label=words("runs.smoothing"), info=words("runs.smoothing_help"),
                elem_id="runs-smoothing", min_width=240,
            )  # fmt: skip
            by = axis_radio(words, elem_id="runs-by")
        with gr.Row():
            is_log = gr.Checkbox(label=words("runs.log_scale"), elem_id="runs-log-scale", min_width=160)
            clip = gr.Checkbox(label=words("runs.clip"), elem_id="runs-clip", min_width=160)
        overlaid = gr.Dropdown(
            [], multiselect=True, max_choices=MAX_OVERLAID, label=words("runs.overlay"), elem_id="runs-overlay"
        )
        selection = gr.Dropdown(
            [], multiselect=True, max_choices=NUM_CHARTS, label=words("runs.shown_charts"),
            info=words("runs.shown_charts_help"), elem_id="runs-shown",
        )  # fmt: skip
    return [smoothing, is_log, by, clip, overlaid], selection


def axis_radio(words: Words, *, elem_id: str) -> gr.Radio:
    """Return the choice of the horizontal axis."""
    axes = [(words(f"charts.{axis}"), axis) for axis in charts.AXES]
    return gr.Radio(axes, value="step", label=words("runs.by"), elem_id=elem_id, min_width=160)


def look(
    site: Site,
    words: Words,
    name: str,
    seen: str,
    order: Any,
    smoothing: float,
    is_log: bool,
    by: Any,
    clip: bool,
    overlaid: list[str] | None,
    kept: Any = None,
) -> list[Any]:
    """Return the changes of a run since a browser's last request, for each of `Parts.outputs`."""
    if not name:
        return [gr.skip()] * (NUM_OTHERS + NUM_CHARTS)
    view = charts.View(smoothing, is_log, by if by in charts.AXES else "step", clip)
    try:
        run = site.run(name)
        overlaid_runs = [site.run(other) for other in (overlaid or [])[:MAX_OVERLAID]]
        line = listing_of(site.root).line(name)
        before = json.loads(seen or "{}")
        return _changed(run, overlaid_runs, line, before, view, order, words, kept)
    except tunekit.TunekitError as error:
        return ["", told(error), *[gr.skip()] * (NUM_OTHERS - 2 + NUM_CHARTS)]


def _changed(
    run: tunekit.Run,
    others: list[tunekit.Run],
    line: Line,
    before: dict[str, str],
    view: charts.View,
    order: Any,
    words: Words,
    kept: Any,
) -> list[Any]:
    now: dict[str, str] = {}

    def is_new(part: str, *made_from: object) -> bool:
        now[part] = repr((run.name, *made_from))
        return now[part] != before.get(part)

    with history_of(run, patient=True) as reader:
        if reader.is_behind:
            return _reading(share_read(reader), run_parts.head(run, line, reader, words), words)
        marks = [charts_mark(reader, is_over=line.is_over)]
        head: Any = run_parts.head(run, line, reader, words)
        head = head if is_new("head", hash(head)) else gr.skip()
        warnings: Any = run_parts.warnings(reader, words)
        warnings = gr.HTML(warnings, visible=bool(warnings)) if is_new("warnings", hash(warnings)) else gr.skip()
        samples: Any = run_parts.samples(run, reader, words) if is_new("samples", _answers_mark(reader)) else gr.skip()
        answers = reader.all("completions")
        choice, completions = gr.skip(), gr.skip()
        if is_new("completions", len(answers), answers[-1]["time"] if answers else 0, order):
            choice = gr.Radio(visible=bool(answers))
            completions = run_parts.completions(reader, words, order)
        saved = [event["step"] for event in reader.all("checkpoint")]
        checkpoints: Any = gr.skip()
        if is_new("checkpoints", saved, sorted(path.name for path in (run.path / "checkpoints").glob("*"))):
            checkpoints = run_parts.checkpoints(run, reader, words)
        kinds = charts.kinds_of(reader.series)
        keys = shown_charts(kept, kinds)[:NUM_CHARTS]
        last_event = reader.newest("result")
        result: Any = (
            run_parts.result(reader, words) if is_new("result", last_event and last_event["time"]) else gr.skip()
        )
    plots: list[Any] = [gr.skip()] * NUM_CHARTS
    no_curves: Any = gr.skip()
    for other in others:
        with history_of(other, patient=True) as reader:
            if reader.is_behind:
                return _reading(share_read(reader), head, words)
            marks.append(charts_mark(reader, is_over=False))
    selection: Any = gr.skip()
    if is_new("selection", kinds, keys):
        selection = gr.update(choices=[(kind.title(words), kind.key) for kind in kinds], value=keys)
    is_moved = is_new("places", len(keys), bool(kinds))
    if is_new("charts", [other.name for other in others], marks, view, keys) or is_moved:
        chosen = [kind for key in keys for kind in kinds if kind.key == key]
        drawn = drawings([run, *others], view, words, chosen, planned_of=run)
        # A component is an update of more than its value, for which gradio builds it anew.
        plots[: len(drawn)] = drawn
        if is_moved:
            plots = [gr.Plot(value=drawing, visible=True) for drawing in drawn]
            plots += [gr.Plot(visible=False)] * (NUM_CHARTS - len(drawn))
            no_curves = gr.HTML(run_parts.empty(words("runs.no_curves")), visible=not kinds)
    recipe, plan = gr.skip(), gr.skip()
    if is_new("recipe", _mark(run.path / "recipe.yaml"), _mark(run.path / "plan.yaml")):
        recipe, plan = recipe_of(run), plan_of(run, words)
    return [
        json.dumps(now), head, warnings, no_curves, *plots, selection, choice, completions,
        samples, checkpoints, result, recipe, plan,
    ]  # fmt: skip


def _reading(share: float, head: Any, words: Words) -> list[Any]:
    """Return the values to show until all events are read: partial curves would be taken for whole."""
    output = gr.HTML(run_parts.reading(share, words), visible=True)
    return ["", head, gr.skip(), output, *[gr.skip()] * (NUM_OTHERS - 4 + NUM_CHARTS)]


def charts_mark(reader: frontend.EventReader, *, is_over: bool) -> tuple[int, ...]:
    """Return the state of a run by which its charts are drawn anew; that of a long run changes less often than it logs.

    A step more of very many moves no curve that can be seen, and drawing and sending the charts of a run takes more
    than all else on its page. When the run ends, they are drawn once more.

    Args:
        reader: Its events.
        is_over: Whether it has ended.
    """
    grain = reader.num_events // MANY_EVENTS
    if grain < 2 or not reader.series:
        return reader.read_bytes, reader.num_events
    newest = max(series.last.time for series in reader.series.values())
    evaluations = (series.last.step for name, series in reader.series.items() if name.startswith("eval"))
    return int(is_over), reader.num_events // grain, int(newest // REDRAW_SECONDS), *evaluations


def drawings(
    runs: Sequence[tunekit.Run],
    view: charts.View,
    words: Words,
    kinds: Sequence[charts.Kind],
    *,
    planned_of: tunekit.Run | None = None,
) -> list[PlotData]:
    """Draw charts of runs, once for all that look at the same.

    Args:
        runs: The runs whose curves are in each chart.
        view: How they are looked at.
        words: The language.
        kinds: The charts.
        planned_of: The run whose planned memory is drawn.
    """
    marks: list[object] = []
    for run in runs:
        with history_of(run) as reader:
            marks.append((str(run.path), reader.read_bytes, reader.num_events))
    key = (*marks, planned_of and planned_of.name, view, words.language, *kinds)
    with _lock:
        if key in _drawings:
            _drawings.move_to_end(key)
            return _drawings[key]
    curves: dict[str, list[charts.Curve]] = {kind.key: [] for kind in kinds}
    resumed: list[charts.Resume] = []
    for run in runs:
        with history_of(run) as reader:
            resumed += charts.resumes_of(run.name, reader, view)
            for kind in kinds:
                curves[kind.key] += charts.curves_of(run.name, reader, kind, view)
    planned = planned_bytes(planned_of) if planned_of is not None and "memory" in curves else None
    names, drawn = [run.name for run in runs], []
    for kind in kinds:
        spec = charts.spec_of(kind, curves[kind.key], view, words, runs=names, resumed=resumed, planned_bytes=planned)
        drawn.append(PlotData(type="altair", plot=charts.to_text(spec)))
    with _lock:
        _drawings[key] = drawn
        while len(_drawings) > MAX_DRAWINGS:
            _drawings.popitem(last=False)
    return drawn


def planned_bytes(run: tunekit.Run) -> float | None:
    """Return the planned bytes of each process; None where the plan cannot be read."""
    try:
        return run.plan.memory.total_bytes
    except (tunekit.TunekitError, OSError, ValueError, KeyError, yaml.YAMLError):
        return None


def recipe_of(run: tunekit.Run) -> str:
    """The recipe of a run as it was written."""
    try:
        return frontend.redacted((run.path / "recipe.yaml").read_text(encoding="utf-8"))
    except OSError as error:
        return f"# {error.strerror}"


def plan_of(run: tunekit.Run, words: Words) -> str:
    """The plan of a run with its reasons."""
    try:
        return f"<h2>{escape(words('plan.title'))}</h2>{frontend.redacted(plan_html(run.plan, words))}"
    except tunekit.TunekitError as error:
        return told(error)
    except (OSError, ValueError, KeyError, yaml.YAMLError) as error:
        return told(tunekit.TunekitError(f"{run.path / 'plan.yaml'} is damaged", hint=str(error)))


def _answers_mark(reader: frontend.EventReader) -> list[tuple[str, ...]]:
    return [tuple(answers) for answers in reader.answers.values()]


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
