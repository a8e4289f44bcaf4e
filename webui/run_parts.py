"""The parts of a run's page that are text: how it goes, what was warned of, answers, checkpoints, and the result."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import Any, Literal, NamedTuple

import tunekit
from tunekit import frontend
from webui import charts, usage
from webui.listing import Line
from webui.words import Words

SYMBOLS = {
    "queued": "…",
    "starting": "◔",
    "loading": "◔",
    "training": "▶",
    "saving": "◕",
    "finished": "✓",
    "failed": "✕",
    "died": "✕",
    "interrupted": "■",
    "stuck": "!",
    "unreadable": "?",
}
"""Symbols before the names of states, for those who do not see their colours."""

WAY = ("starting", "loading", "training", "saving", "finished")
"""Stages of a run."""

DOINGS = (
    *("loading", "data", "forward", "backward", "optimizer", "logging", "evaluation", "saving"),
    *("generation", "rewards", "ending"),
)
"""Activities of processes that have a translation."""

MAX_ANSWERS = 100
"""Answers of a table that is sorted by reward."""


def state_words(state: str, words: Words) -> str:
    """A state as HTML: a symbol, and the word."""
    symbol = f"<span aria-hidden='true'>{SYMBOLS[state]}</span>"
    return f"<span class='runs-state runs-{escape(state)}'>{symbol} {escape(words(f'runs.state_{state}'))}</span>"


def duration(seconds: float, words: Words) -> str:
    """A time in words, with two units at most."""
    whole = round(seconds)
    if whole < 60:
        return words("runs.seconds", seconds=whole if seconds >= 10 else f"{seconds:.1f}")
    if whole < 3600:
        return words("runs.minutes", minutes=whole // 60, seconds=whole % 60)
    return words("runs.long", hours=whole // 3600, minutes=whole % 3600 // 60)


def moment(seconds: float) -> str:
    """A time of the clock."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def clock(seconds: float) -> str:
    """A time of the day."""
    return f"{datetime.fromtimestamp(seconds):%H:%M:%S}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """A table of HTML; its cells are HTML already. On a narrow screen each row becomes a card."""
    heads = "".join(f"<th scope='col'>{escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>"
        + "".join(f"<td data-label='{escape(name)}'>{cell}</td>" for name, cell in zip(head, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table class='runs-table {kind}'><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"


def empty(text: str) -> str:
    """Render the placeholder where there is nothing to show."""
    return f"<p class='runs-empty'>{escape(text)}</p>"


def reading(share: float, words: Words) -> str:
    """Render the progress of reading a long history."""
    label = words("runs.reading", percent=int(100 * share))
    return (
        "<div class='runs-progress runs-reading' role='status'>"
        f"<progress max='1' value='{share:.2f}' aria-hidden='true'></progress><span>{escape(label)}</span></div>"
    )


def head(run: tunekit.Run, line: Line, reader: frontend.EventReader, words: Words) -> str:
    """The name of a run, what it is at, how far it is, and why it ended."""
    began = words("runs.began", when=moment(line.started)) if line.started else ""
    facts = [line.method, line.model, began, *line.tags]
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts if fact)
    reason = run.status()["exit_reason"]
    # A run that trained to its end needs no reason for it, and of one that failed a card tells more.
    ended = reason if line.is_over and line.state not in ("finished", "failed") and reason else None
    return (
        f"<div class='runs-head'><h1>{escape(line.name)}</h1>{state_words(line.state, words)}"
        f"<ul class='runs-facts'>{items}</ul>{_progress(line, words)}{_way(line, words)}"
        f"<p id='runs-now' aria-live='polite'>{escape(_now(run, line, words))}</p>"
        + ("" if line.is_over else usage.bars(usage.usage_of(run), words))
        + (f"<p class='runs-reason'>{escape(frontend.redacted(ended))}</p>" if ended else "")
        + (f"<p class='runs-note-text'>{escape(line.note)}</p>" if line.note else "")
        + _restarts(reader, words)
        + "</div>"
    )


def _progress(line: Line, words: Words) -> str:
    if not line.num_steps:
        return ""
    label = words("runs.steps", step=line.step, num_steps=line.num_steps)
    return (
        f"<div class='runs-progress'><progress max='{line.num_steps}' value='{line.step}' "
        f"aria-label='{escape(label)}'></progress><span>{escape(label)}</span></div>"
    )


def _way(line: Line, words: Words) -> str:
    if line.state not in WAY:
        return ""
    at = WAY.index(line.state)
    steps = "".join(
        f"<li class='{'runs-done' if place < at or line.is_over else ''}'"
        f"{' aria-current=step' if place == at else ''}>{escape(words(f'runs.state_{phase}'))}</li>"
        for place, phase in enumerate(WAY)
    )
    return f"<ol class='runs-way' aria-label='{escape(words('runs.phases'))}'>{steps}</ol>"


def _now(run: tunekit.Run, line: Line, words: Words) -> str:
    """Describe the present activity of a run, its speed, and the remaining time."""
    if line.is_over:
        return ""
    doing = run.doing
    facts = []
    if doing is not None and line.state not in ("queued", "stuck"):
        facts.append(words(f"runs.doing_{doing}") if doing in DOINGS else doing)
    if line.tokens_per_second:
        facts.append(words("runs.speed", tokens=f"{line.tokens_per_second:,.0f}"))
    if line.seconds_left is not None:
        facts.append(words("runs.to_go", time=duration(line.seconds_left, words)))
    return " · ".join(facts)


def _restarts(reader: frontend.EventReader, words: Words) -> str:
    """Render the restarts of a run from a checkpoint."""
    events = sorted([*reader.all("restart"), *reader.all("resume")], key=lambda event: float(event["time"]))
    if not events:
        return ""
    rows = "".join(
        f"<li>{clock(event['time'])} · {escape(words('runs.went_on', step=event['step']))}{escape(_why(event))}</li>"
        for event in events
    )
    summary = escape(words("runs.restarts", num=len(events)))
    return f"<details class='runs-restarts'><summary>{summary}</summary><ul>{rows}</ul></details>"


def _why(event: frontend.Event) -> str:
    reasons = [event["reason"]] if event.get("reason") else [*event.get("changes", ())]
    return f": {frontend.redacted('; '.join(map(str, reasons)))}" if reasons else ""


def warnings(reader: frontend.EventReader, words: Words) -> str:
    """Render the warnings, the newest first, with the time."""
    events = [event for kind in ("warning", "error", "stop", "early_stop") for event in reader.all(kind)]
    if not events:
        return ""
    newest = sorted(events, key=lambda event: float(event["time"]), reverse=True)
    rows = "".join(
        f"<li class='runs-{escape(event['event'])}'><time>{clock(event['time'])}</time> "
        f"{escape(frontend.redacted(str(event.get('message', ''))))}</li>"
        for event in newest
    )
    # Of an error, a card tells already.
    opened = " open" if len(newest) <= 3 and not any(event["event"] == "error" for event in newest) else ""
    summary = escape(words("runs.warnings", num=len(newest)))
    return f"<details class='runs-warnings'{opened}><summary>{summary}</summary><ul>{rows}</ul></details>"


def samples(run: tunekit.Run, reader: frontend.EventReader, words: Words) -> str:
    """Render the answers to the same prompts before and after training, and in between where that was requested."""
    if not reader.answers:
        return empty(words("runs.no_samples"))
    titles = {"before": words("runs.before"), "after": words("runs.after")}
    whens = list(dict.fromkeys(when for answers in reader.answers.values() for when in answers))
    whens.sort(key=lambda when: (when == "after", when != "before"))
    urls = run.thumbnails(digest for digests in reader.pictures.values() for digest in digests)
    rows = [
        [
            pictured(prompt, [urls[digest] for digest in reader.pictures.get(prompt, ()) if digest in urls]),
            *(_answer(answers.get(when), words) for when in whens),
        ]
        for prompt, answers in reader.answers.items()
    ]
    return table([words("runs.prompt"), *(titles.get(when, when) for when in whens)], rows, kind="runs-texts")


def pictured(prompt: str, urls: Iterable[str]) -> str:
    """A prompt, below thumbnails of its pictures, whose names stand in it."""
    images = "".join(f"<img src='{escape(url)}' alt=''>" for url in urls)
    return f"<div class='runs-pictures'>{images}</div>{escape(prompt)}" if images else escape(prompt)


def completions(reader: frontend.EventReader, words: Words, order: Literal["newest", "best", "worst"]) -> str:
    """Answers of the training with their rewards: by groups, the newest first, or all by their reward."""
    events = [(event, [event["best"], *event.get("others", ()), event["worst"]]) for event in reader.all("completions")]
    if order == "newest":
        # As many groups as have answers enough for a table.
        num_shown = max(1, MAX_ANSWERS // max((len(answers) for _, answers in events), default=1))
        return "".join(_group(event, answers, words) for event, answers in events[: -1 - num_shown : -1])
    rows = [(event, answer) for event, answers in events for answer in answers]
    rows.sort(key=lambda row: _total(row[1]["rewards"]), reverse=order == "best")
    if not rows:
        return ""
    head = [words(f"runs.{key}") for key in ("step", "prompt", "answer", "rewards", "advantage")]
    cells = [
        [f"{event['step']:,}", escape(event["prompt"]), *_rewarded(answer, words)]
        for event, answer in rows[:MAX_ANSWERS]
    ]
    return table(head, cells, kind="runs-texts")


def _group(event: frontend.Event, answers: Sequence[dict[str, Any]], words: Words) -> str:
    """Render the answers to a prompt in a step."""
    head = [words(f"runs.{key}") for key in ("answer", "rewards", "advantage")]
    rows = [_rewarded(answer, words) for answer in answers]
    return (
        f"<section class='runs-group'><h2>{escape(words('runs.group', step=event['step']))}</h2>"
        f"<p class='runs-answer'>{escape(event['prompt'])}</p>{table(head, rows, kind='runs-texts')}</section>"
    )


def _rewarded(answer: dict[str, Any], words: Words) -> list[str]:
    """Return cells of an answer, its rewards and its advantage."""
    return [_answer(answer["answer"], words), escape(_rewards(answer["rewards"])), f"{answer['advantage']:+.2f}"]


def checkpoints(run: tunekit.Run, reader: frontend.EventReader, words: Words) -> str:
    """Render the checkpoints, the newest first, and whether they still exist."""
    events = {event["step"]: event for event in reader.all("checkpoint")}
    if not events:
        return empty(words("runs.no_checkpoints"))
    rows = []
    best: dict[str, Any] = next((event["best"] for event in reversed(events.values()) if event.get("best")), {})
    for step in sorted(events, reverse=True):
        event = events[step]
        is_there = (run.path / "checkpoints" / f"checkpoint-{step}").is_dir()
        notes = [words("runs.kept" if is_there else "runs.gone")]
        if best.get("step") == step:
            notes.append(words("runs.best", metric=best["metric"], value=f"{best['value']:.4g}"))
        size = f"{event['bytes'] / 2**20:,.1f} MiB" if event.get("bytes") else "–"
        rows.append([f"{step:,}", moment(event["time"]), size, escape(" · ".join(notes))])
    return table([words(f"runs.{key}") for key in ("step", "when", "size", "note")], rows)


class ResultRow(NamedTuple):
    """A row of a summary.

    Attributes:
        label: Its label.
        text: Its value as text.
        value: The number that runs are compared by; None if there is none.
        better: Direction in which the number is better; None if neither is.
        is_learned: Whether it tells what the model learned, which runs of one method alone have in common.
    """

    label: str
    text: str
    value: float | None = None
    better: Literal["more", "less"] | None = None
    is_learned: bool = False


def result_rows(result: frontend.Event, words: Words) -> list[ResultRow]:
    """The summary of a finished run: what it is, and how it came out."""
    measures: dict[str, Any] = result.get("measures", {})
    rows = []
    if "reward" not in measures:
        for key, first, last in (("loss", "first_loss", "last_loss"), ("eval_loss", "first_eval_loss", "eval_loss")):
            if result.get(last) is not None:
                rows.append(_learned(words(f"runs.{key}"), result.get(first), result[last], "less"))
    charts_by_name = {kind.names[0]: kind.key for kind in charts.KINDS if len(kind.names) == 1}
    for name, ends in measures.items():
        label = words(f"charts.{charts_by_name[name]}") if name in charts_by_name else name
        rows.append(_learned(label, ends[0], ends[-1], frontend.direction_of(name, measures)))
    if speed := result.get("tokens_per_second"):
        rows.append(ResultRow(words("runs.tokens_per_second"), f"{speed:,.0f}", round(speed), "more"))
    rows.append(ResultRow(words("runs.num_tokens"), f"{result['num_tokens']:,}", result["num_tokens"]))
    if result.get("mfu") is not None:
        rows.append(ResultRow("MFU", f"{result['mfu']:.1%}", result["mfu"], "more"))
    rows.append(ResultRow(words("runs.time"), duration(result["seconds"], words), result["seconds"]))
    for part in ("step", "generation", "evaluation", "saving", "data"):
        seconds = result.get(f"{part}_seconds")
        if seconds:
            share = f"{seconds / result['seconds']:.0%}" if result["seconds"] else "–"
            rows.append(ResultRow(words(f"runs.time_{part}"), f"{duration(seconds, words)} ({share})"))
    measured, planned = result.get("peak_memory_bytes"), result.get("planned_memory_bytes")
    if measured and planned:
        text = words("runs.memory_both", measured=f"{measured / 2**30:.2f}", planned=f"{planned / 2**30:.2f}")
        rows.append(ResultRow(words("runs.memory"), text, round(measured / 2**30, 2), "less"))
    rows.append(ResultRow(words("runs.model"), str(result.get("model", ""))))
    return rows


def _learned(label: str, first: Any, last: Any, better: Literal["more", "less"] | None) -> ResultRow:
    # A number that is not finite is logged as text.
    value = last if isinstance(last, int | float) else None
    return ResultRow(label, f"{_figure(first)} → {_figure(last)}", value, better, is_learned=True)


def result(reader: frontend.EventReader, words: Words) -> str:
    """The summary of a finished run as a table."""
    event = reader.newest("result")
    if event is None:
        return empty(words("runs.no_result"))
    rows = "".join(
        f"<tr><th scope='row'>{escape(row.label)}</th><td>{escape(row.text)}</td></tr>"
        for row in result_rows(event, words)
    )
    return f"<table class='runs-table runs-result'><tbody>{rows}</tbody></table>"


def _answer(text: str | None, words: Words) -> str:
    if text is None:
        return "–"
    return f"<div class='runs-answer'>{escape(text)}</div>" if text else f"<em>{escape(words('runs.no_answer'))}</em>"


def _total(rewards: dict[str, float | None]) -> float:
    return sum(value for value in rewards.values() if isinstance(value, int | float))


def _rewards(rewards: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_figure(value)}" for name, value in rewards.items())


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"
