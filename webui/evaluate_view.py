"""Evaluation of a run's result or checkpoints, on held-out rows, a file, or benchmark tasks; and what came of it."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

import tunekit
from tunekit import frontend
from webui.data_asked import data_files, rewards_in
from webui.data_view import progress as progress_bar
from webui.export_view import models_of
from webui.jobs import Jobs, Progress, Tab
from webui.run_parts import empty, moment, table
from webui.site import Site
from webui.words import Words, told

MAX_SHOWN = 12
"""Evaluations that are listed, the newest ones."""

VERDICTS = {"better": "better", "worse": "worse", "no clear difference": "unclear", "no difference": "same"}


def _progress_in(event: dict[str, Any]) -> Progress | None:
    if event["event"] != "evaluate":
        return None
    return Progress(f"{event['side']} {event['of']}", event["done"], event["total"])


_jobs = Jobs("evaluate", "evaluated", _progress_in)


def build(site: Site, words: Words, run_name: gr.Textbox) -> Tab:
    """The tab of a run's page. `run_name` says of which run."""
    seen_state = gr.Textbox("", visible=False)
    if site.read_only:
        output = gr.HTML(elem_id="evaluate-shown")
        gr.HTML(empty(words("evaluate.read_only")), elem_id="evaluate-read-only")
        return Tab(lambda name, seen: look(site, words, name, seen)[:2], [seen_state, output])
    with gr.Row():
        checkpoint = gr.Dropdown([], label=words("export.checkpoint"), elem_id="evaluate-checkpoint", min_width=180)
        data = gr.Dropdown(
            [""], value="", label=words("evaluate.data"), info=words("evaluate.data_help"), elem_id="evaluate-data",
            min_width=240,
        )  # fmt: skip
        limit = gr.Textbox(
            label=words("evaluate.limit"), info=words("evaluate.limit_help"), max_lines=1, elem_id="evaluate-limit",
            min_width=160,
        )  # fmt: skip
    with gr.Row():
        metrics = gr.Textbox(
            label=words("evaluate.metrics"), info=words("evaluate.metrics_help"), max_lines=1,
            elem_id="evaluate-metrics", min_width=240,
        )  # fmt: skip
        tasks = gr.Textbox(
            label=words("evaluate.tasks"), info=words("evaluate.tasks_help"), max_lines=1, elem_id="evaluate-tasks",
            min_width=240,
        )  # fmt: skip
    before = gr.Checkbox(True, label=words("evaluate.before"), elem_id="evaluate-before")
    start = gr.Button(
        words("evaluate.start"), variant="primary", interactive=False, size="md", elem_id="evaluate-start"
    )
    status = gr.HTML(elem_id="evaluate-status")
    output = gr.HTML(elem_id="evaluate-shown")
    outputs = [seen_state, output, checkpoint, start, status]

    def refresh(name: str, seen: str) -> list[Any]:
        return look(site, words, name, seen)

    def evaluate(name: str, checkpoint: str, data: str, limit: str, metrics: str, tasks: str, before: bool) -> Any:
        return begin(
            site,
            words,
            name,
            checkpoint=checkpoint,
            data=data,
            limit=limit,
            metrics=metrics,
            tasks=tasks,
            before=before,
        )

    update: dict[str, Any] = {
        "fn": refresh,
        "inputs": [run_name, seen_state],
        "outputs": outputs,
        "show_progress": "hidden",
    }
    gr.on(
        [run_name.change, data.focus], lambda: gr.update(choices=["", *data_files(site)]), None, data,
        show_progress="hidden",
    )  # fmt: skip
    inputs = [run_name, checkpoint, data, limit, metrics, tasks, before]
    start.click(evaluate, inputs, status, show_progress="hidden").then(**update)
    return Tab(refresh, outputs)


def begin(
    site: Site,
    words: Words,
    name: str,
    *,
    checkpoint: str | None,
    data: str | None,
    limit: str,
    metrics: str,
    tasks: str,
    before: bool,
) -> Any:
    """Begin an evaluation, or say why not."""
    try:
        run = site.run(name)
        if data:
            site.inside(data)
        if limit.strip() and not (limit.strip().isdecimal() and int(limit) > 0):
            raise tunekit.TunekitError(f"{limit!r} is not a number of rows", hint="use 1 or more, or leave it empty")
        _jobs.begin(
            run,
            checkpoint=checkpoint or None,
            data=data or None,
            metrics=_as_list(rewards_in(metrics)) if metrics.strip() else [],
            tasks=[task.strip() for task in tasks.split(",") if task.strip()],
            limit=int(limit) if limit.strip() else None,
            before=before,
        )
    except tunekit.TunekitError as error:
        return told(error)
    return _busy(Progress("waiting"), words)


def _as_list(read: object) -> list[Any]:
    return read if isinstance(read, list) else [read]


def look(site: Site, words: Words, name: str, seen: str) -> list[Any]:
    """Return the changes since a browser's last request: seen state, evaluations, checkpoints, button, and status."""
    if not name:
        return [gr.skip()] * 5
    try:
        run = site.run(name)
        state, progress = run.state, _jobs.progress_of(run)
        folders = sorted(path.name for path in (run.path / "checkpoints").glob("checkpoint-*"))
        evaluations = sorted(path.name for path in (run.path / "evaluations").glob("*.json"))
        first = repr((name, state, folders))
        mark = first + repr((progress, evaluations))
        if mark == seen:
            return [gr.skip()] * 5
        output = evaluations_html(frontend.evaluations_of(run), words)
    except tunekit.TunekitError as error:
        return ["", told(error), *[gr.skip()] * 3]
    choices = models_of(run, state, words)
    is_new = not seen.startswith(first)
    status: Any = "" if choices else empty(words("evaluate.nothing"))
    if progress is not None:
        status = told(progress.error) if progress.error is not None else _busy(progress, words)
    chosen = {"value": choices[0][1] if choices else None} if is_new else {}
    is_busy = progress is not None and not progress.is_over
    return [
        mark,
        output,
        gr.Dropdown(choices=choices, **chosen),
        gr.Button(interactive=bool(choices) and not is_busy),
        status,
    ]


def _busy(progress: Progress, words: Words) -> str:
    if progress.total is None:
        phase = words(f"evaluate.phase_{progress.phase}")
        return f"<p class='export-busy' role='status'>{escape(phase)}</p>"
    side, _, of = progress.phase.partition(" ")
    return progress_bar(words(f"evaluate.phase_{side}", of=Path(of).name), progress.done, progress.total)


def evaluations_html(evaluations: Sequence[frontend.Evaluation], words: Words) -> str:
    """Evaluations as tables, the newest first."""
    if not evaluations:
        return empty(words("evaluate.none"))
    parts = [_evaluation(evaluation, words) for evaluation in [*evaluations][: -MAX_SHOWN - 1 : -1]]
    return f"<p class='data-soft'>{escape(words('evaluate.interval'))}</p>{''.join(parts)}"


def _evaluation(evaluation: frontend.Evaluation, words: Words) -> str:
    title = words("evaluate.of_model", model=evaluation.model, what=evaluation.what)
    facts = [moment(evaluation.began)]
    if evaluation.step is not None:
        facts.insert(0, words("evaluate.of_step", step=evaluation.step))
    compares = any(score.before is not None for score in evaluation.scores)
    columns = ["figure", "rows", *(["value_before", "value", "difference"] if compares else ["value"])]
    rows = [_cells(score, words, compares=compares) for score in evaluation.scores]
    notes = "".join(f"<p class='data-soft'>{escape(note)}</p>" for note in evaluation.notes)
    head = [words(f"evaluate.{column}") for column in columns]
    return (
        f"<section class='evaluate-one'><h2>{escape(title)}</h2><p class='data-soft'>{escape(' · '.join(facts))}</p>"
        f"{table(head, rows, kind='evaluate-scores')}{notes}</section>"
    )


def _cells(score: frontend.Score, words: Words, *, compares: bool) -> list[str]:
    before, after, difference = score.cells
    cells = [escape(score.words), f"{score.num_rows:,}"]
    if not compares:
        return [*cells, escape(after)]
    verdict = VERDICTS.get(score.verdict)
    told_verdict = f" <span class='evaluate-{verdict}'>{escape(words(f'evaluate.{verdict}'))}</span>" if verdict else ""
    return [*cells, escape(before), escape(after), escape(difference) + told_verdict]
