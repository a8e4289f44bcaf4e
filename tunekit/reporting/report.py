"""The report of a run: one page that needs nothing else, with what was trained on what and what came of it.

It is made from the files of the run folder alone, so it can be had of a run that trains, has failed, or came from
another machine. It holds no script, loads nothing, and tells no secret.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunekit.data.formats.row_formats import counted
from tunekit.estimates.throughput.speed import duration
from tunekit.estimates.throughput.step import Range
from tunekit.planner.plan import Plan, gib
from tunekit.recipe.load import dump_recipe
from tunekit.reporting.page import CURVES, Line, draw, page_of
from tunekit.reporting.summary import Story, story_of
from tunekit.runs.evaluation_result import Score, evaluations_of, newest_scores
from tunekit.runs.events import Event, first_and_last, judged_by, rows_of, words_of
from tunekit.runs.fingerprints import FINGERPRINTS, fingerprints_of
from tunekit.runs.run import Run
from tunekit.tracking.trackers import facts_of, kept_of

MAX_WARNINGS = 50
"""Warnings that are shown, the last ones."""


def report(run: Run | str | Path) -> str:
    """A run as one HTML page that loads nothing from elsewhere.

    Args:
        run: The run, its folder, or its name in `runs/`.

    Raises:
        RunError: There is no such run.
    """
    story = story_of(run)
    run_found, plan, events = story.run, story.plan, story.run.events()
    result = next((event for event in reversed(events) if event["event"] == "result"), None)
    return page_of(
        "report.html.jinja",
        name=run_found.name,
        state=story.state,
        reason=story.status["exit_reason"],
        headline=_headline(story, result),
        facts=list(story.facts()),
        results=list(_results(events, result)),
        evaluated=list(_evaluated(run_found)),
        measured=list(_measured(plan, result)),
        curves=list(_curves(events)),
        samples=list(_samples(run_found)),
        warnings=_warnings(events),
        decisions=[(reason.topic, reason.choice, reason.why) for reason in plan.reasons],
        changes=list(_changes(events)),
        reported=list(_reported(story, events)),
        environment=list(_environment(story)),
        commands=_commands(run_found),
        recipe=dump_recipe(story.recipe),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _headline(story: Story, result: Event | None) -> str:
    """Describe the progress of a run."""
    words = f"step {story.step_words}"
    if result is None:
        return words
    losses = [result["first_eval_loss"], result["eval_loss"]]
    if None in losses:
        return f"{words}, in {duration(result['seconds'])}"
    return f"{words}, in {duration(result['seconds'])}: evaluation loss {losses[0]:.4f} → {losses[1]:.4f}"


def _results(events: Sequence[Event], result: Event | None) -> Iterator[tuple[str, str]]:
    """Yield the results of a run; of one that has not finished, the latest."""
    logs = [event for event in events if event["event"] == "log"]
    evals = [event for event in events if event["event"] == "eval"]
    for what, logged, name in (("Training loss", logs, "loss"), ("Evaluation loss", evals, "eval_loss")):
        values = [value for event in logged if (value := _number(event.get(name))) is not None]
        if values:
            yield what, f"{values[0]:.4f} → {values[-1]:.4f}"
    measures = result["measures"] if result is not None else first_and_last(events)
    yield from rows_of(measures)
    if result is not None:
        yield "Tokens seen", f"{result['num_tokens']:,}"
        best = result["checkpoints"]["best"]
        if best is not None:
            yield "Best evaluation", f"{best['metric']} {best['value']:.4f} at step {best['step']:,}"


def _evaluated(run: Run) -> Iterator[tuple[str, list[Score]]]:
    """Yield evaluations with their figures: the newest of each, of the result first and then of checkpoints."""
    evaluations = evaluations_of(run)
    for step in sorted({evaluation.step for evaluation in evaluations}, key=lambda step: (step is not None, step)):
        newest = [score for _, score in newest_scores(evaluations, step)]
        for of in dict.fromkeys(score.of for score in newest):
            scores = [score for score in newest if score.of == of]
            rows = max(score.num_rows for score in scores)
            at = "" if step is None else f", checkpoint of step {step:,}"
            yield f"{Path(of).name}, {counted(rows, 'row')}{at}", scores


def _measured(plan: Plan, result: Event | None) -> Iterator[tuple[str, str, str, str]]:
    """Yield planned beside measured figures of a finished run, and what the two have to do with each other."""
    if result is None:
        return
    planned, peak = plan.memory.total_bytes, result["peak_memory_bytes"]
    yield "Memory per device", gib(planned), gib(peak), f"{(peak - planned) / planned:+.0%}"
    speed = plan.speed
    rates = None if speed is None else speed.tokens_per_second
    words = "unknown" if rates is None else rates.words("{:,.0f}".format)
    yield "Tokens per second", words, f"{result['tokens_per_second']:,.0f}", _within(rates, result)
    seconds = None if speed is None else speed.seconds
    words = "unknown" if seconds is None else seconds.words(duration)
    note = "planned: training steps only; measured: includes loading, evaluations and checkpoints"
    yield "Time", words, duration(result["seconds"]), note


def _within(rates: Range | None, result: Event) -> str:
    if rates is None:
        return ""
    measured: float = result["tokens_per_second"]
    if rates.low <= measured <= rates.high:
        return "as planned"
    if measured < rates.low:
        return f"{measured / rates.low - 1:+.0%} from the lower bound"
    return f"{measured / rates.high - 1:+.0%} from the upper bound"


def _curves(events: Sequence[Event]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the curves of what was logged, the metric that the run is judged by first: title, SVG, labels of lines."""
    logs = {event["step"]: event for event in events if event["event"] == "log"}
    evals = {event["step"]: event for event in events if event["event"] == "eval"}
    names = {name for log in logs.values() for name in log}
    learned = judged_by(sorted(names))
    for name in dict.fromkeys([learned, "loss"]):
        lines = [Line("training", _points(logs, name)), Line("evaluation", _points(evals, f"eval_{name}"), dots=True)]
        title = "Loss" if name == "loss" else words_of(name)
        yield from _curve(title, [line for line in lines if line.points])
    for name, title in CURVES:
        yield from _curve(title, [Line(title, _points(logs, name))])


def _curve(title: str, lines: Sequence[Line]) -> Iterator[tuple[str, str, list[str]]]:
    svg = draw(lines, title=f"{title} by step")
    if svg:
        yield title, svg, [line.label for line in lines] if len(lines) > 1 else []


def _points(events: dict[int, Event], name: str) -> list[tuple[float, float]]:
    points = ((step, _number(events[step].get(name))) for step in sorted(events))
    return [(float(step), value) for step, value in points if value is not None]


def _number(value: Any) -> float | None:
    """A value that is a number and finite: what is not was written as text."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _samples(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the sample prompts with their answers, and thumbnails of their pictures."""
    samples = run.samples()
    urls = run.thumbnails(digest for sample in samples for digest in sample.get("pictures", ()))
    for sample in samples:
        digests = sample.get("pictures", ())
        yield {**sample, "thumbnails": [urls[digest] for digest in digests if digest in urls]}


def _warnings(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Warnings and errors, each with its step where it has one."""
    warnings = [
        (f"step {event['step']:,}" if event.get("step") is not None else event["event"], str(event["message"]))
        for event in events
        if event["event"] in ("warning", "error")
    ]
    return list(dict.fromkeys(warnings))[-MAX_WARNINGS:]


def _changes(events: Sequence[Event]) -> Iterator[tuple[str, str]]:
    """Yield when the run was stopped, restarted and resumed."""
    for event in events:
        if event["event"] == "resume":
            changed = f", with {', '.join(event['changes'])}" if event["changes"] else ""
            yield "resumed", f"from step {event['step']:,}{changed}"
        elif event["event"] == "restart":
            yield "restarted", f"from step {event['step']:,}: {event['reason']}"
        elif event["event"] in ("stop", "early_stop"):
            yield "stopped", str(event["message"])


def _reported(story: Story, events: Sequence[Event]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the trackers of the run: where it is shown there, and what failed."""
    trackers = [event["name"] for event in events if event["event"] == "tracker"]
    for tracker in dict.fromkeys((*story.recipe.output.report_to, *trackers)):
        places = [event["message"] for event in events if event["event"] == "tracker" and event["name"] == tracker]
        failures = [event["message"] for event in events if event.get("tracker") == tracker]
        title = facts_of(tracker)["title"]
        brief = [words.removeprefix(f"{title}: ") for words in dict.fromkeys(failures)]
        if brief and kept_of(story.run, tracker).num_sent == sum(event["event"] in ("log", "eval") for event in events):
            brief.append("all metrics were uploaded later")
        yield title, places[-1] if places else "no metrics uploaded", brief


def _environment(story: Story) -> Iterator[tuple[str, str]]:
    """Yield the environment of the run, and the provenance of its inputs."""
    yield from story.environment()
    prints = fingerprints_of(story.run)
    if prints:
        yield "Inputs", f"{len(prints)} files, SHA-256 in {FINGERPRINTS}"


def _commands(run: Run) -> list[str]:
    """Return the commands to repeat, show and resume it."""
    folder = shlex.quote(str(run.path))
    again = shlex.quote(str(run.path / "recipe.yaml"))
    return [
        f"tunekit rerun {folder}",
        f"tunekit train {again} output.dir=null",
        f"tunekit runs show {folder}",
        f"tunekit chat {folder}",
    ]
