"""Events of a run, and the metrics that they hold.

Events are JSON lines, written as they happen and read while the file grows. Every event has `event` (its kind), `time`
(seconds since the epoch) and the fields of its kind:

- `phase`: `phase`, one of PHASES
- `queue`: `place`, counted from 1, among the runs that wait for the same devices, `behind`, the names of those before
  it or on them now, and `devices`, by UUID (see `tunekit.launching.local`)
- `hosts`: `hosts`, each with `name`, `interface` and `infiniband` (see `tunekit.launching.ssh_hosts`)
- `engine`: the running configuration when training began (see `tunekit.training.engines.engine`)
- `fused`: `lines`, the result for each kind of module of the model (see `tunekit.models.fusion.fuse`), also as
  `message`
- `attention`: `message`, the measured accuracy of tunekit's attention for packed rows (see
  `tunekit.training.check_reference`)
- `tracker`: `name` of a tracker that the run is reported to, and its address or command there as `message`
- `log`: `step`, `loss`, `learning_rate` (of the optimizer's first group), `grad_norm`, `epoch`; `num_tokens` of all
  processes, without padding but with one token of each row that fills an epoch's last step; of the steps since the last
  one `tokens_per_second`, `model_flops_per_second` and `mfu` of all processes (None if the peak of the device is
  unknown), and by the main process's clock `step_seconds`, of these `optimizer_seconds` and, if the model learns from
  its own answers, `generation_seconds`, and `data_seconds` between the steps
- `eval`: `step`, `eval_loss` and the method's own metrics
- `completions`: `step`, and of the prompt with the largest gap of rewards among the last generated answers, `prompt`,
  `best`, `worst` and the `others` of its answers, each with `answer`, its `rewards` by name and its `advantage`; some
  50 times a run
- `sample`: `when` (`before` or `after`), `prompt`, `answer`; for a prompt with images, their digests as `pictures`
- `checkpoint`: `step`, `path`
- `restart`: `attempt`, `step` of the checkpoint to resume from (0: from the start), `reason`
- `resume`: `step`, `path` of the checkpoint, `skipped`, newer ones with their faults, `changes` from before, a phrase
  each, and `weights_only`, whether only the weights are used, so that steps start at 0
- `ranks`: `step`, and `ranks`, a `tunekit.training.timing.RankReport` of each process; with every checkpoint. Of
  several processes each has `communication_seconds` and `communication_share`: the time of collectives in one step,
  the `communication_step`, and its share, by torch's profiler (see `tunekit.training.timing`). Part of it may overlap
  with compute; `exposed_share` (on CUDA) does not
- `warning`: `message`; for a non-finite step, its number as `left_out`, and `rows`, each with its place and start; for
  a slow process, its `rank` and `node`; for a trend in the metrics, its name as `trend` (see
  `tunekit.training.health_warnings`); for a tracker that failed, `tracker`
- `result`: the summary of a finished run; speed over all steps by the clock of the slowest process, warm-up in the
  first step included; `seconds` from loading to the saved result, and by part those of the main process; memory as
  planned and at the peak of the process that used most, in all and of tensors alone, `held_bytes`, the bytes of
  weights, adapters, gradients and optimizer states of the main process in the first step; `stopped_early`, the reason
  if it did; and `ranks`
- `early_stop`: `step`, and its reason as `message`; the evaluation is that of the last step
- `stop`: a stop request; `by` whom or which signal, whether `now`, and its effect as `message`
- `error`: `message`

Steps after a checkpoint are logged again after a resume from it: the later event counts.

Metrics besides the loss have TRL's names; `measures.yaml` has labels and formats.
"""

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

from tunekit.errors import RunError
from tunekit.files import open_regular, parse_json, read_table
from tunekit.redact import without_secrets

Event = dict[str, Any]
Listener = Callable[[Event], None]

PHASES = ("queued", "starting", "loading", "training", "saving", "finished", "failed", "interrupted")
"""Phase of a run: `queued` where a cluster is to start it, at first or again, or where it waits in the queue for
devices; the last three are final."""

FINAL_PHASES = PHASES[-3:]

FIELDS: dict[str, tuple[tuple[str, type], ...]] = {
    "phase": (("phase", str),),
    "log": (("step", int),),
    "eval": (("step", int),),
    "sample": (("when", str), ("prompt", str), ("answer", str)),
    "warning": (("message", str),),
    "error": (("message", str),),
    "ranks": (("step", int), ("ranks", list)),
}
"""Fields by type that events of a kind are read by in many places."""

MAX_STEP = 2**53
"""Largest step of an event, which a float still holds exactly."""


class EventLog:
    """Appends events to a file and hands each to a listener.

    Args:
        path: The file, `events.jsonl` of a run folder.
        listener: Called with each event after it is written.
    """

    def __init__(self, path: Path, listener: Listener | None = None) -> None:
        self.path = path
        self.listener = listener
        self._has_written = False

    def write(self, event: str, **fields: Any) -> None:
        """Write one event. Numbers that JSON has no word for (NaN, infinities) are written as text.

        Raises:
            OSError: It cannot be written; nothing of it is then.
        """
        entry: Event = {"event": event, "time": round(time.time(), 3), **without_secrets(fields)}
        line = json.dumps({key: _plain(value) for key, value in entry.items()}, ensure_ascii=False) + "\n"
        content = line.encode("utf-8")
        with self.path.open("ab", buffering=0) as stream:
            if not self._has_written:
                _cut_incomplete_line(stream, self.path)
            end = stream.tell()
            if stream.write(content) < len(content):
                stream.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._has_written = True
        if self.listener is not None:
            self.listener(entry)


def _cut_incomplete_line(stream: IO[bytes], path: Path) -> None:
    """Cut what a power loss left behind the last line of an events file: a part of a line, or zeros."""
    end, kept = stream.tell(), stream.tell()
    with path.open("rb") as written:
        while kept:
            begin = max(0, kept - _BLOCK)
            written.seek(begin)
            at = written.read(kept - begin).rfind(b"\n")
            kept = begin + at + 1
            if at >= 0:
                break
    if kept < end:
        stream.truncate(kept)


_BLOCK = 2**16
"""Bytes that are read at once in search of a line's end."""


def read_events(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Return the events since a byte offset, and the next offset. An incomplete last line is left for later.

    Raises:
        RunError: A line is damaged.
    """
    opened = open_events(path)
    if opened is None:
        return [], offset
    with opened as stream:
        stream.seek(offset)
        whole, newline, _ = stream.read().rpartition(b"\n")
    events = []
    for place, line in enumerate(whole.splitlines(), start=1):
        try:
            events.append(parse_event(line))
        except ValueError as error:
            with open_regular(path) as stream:
                number = stream.read(offset).count(b"\n") + place
            raise RunError(f"{path}:{number}: damaged line: {error}", hint="delete it, or restore the file") from error
    return events, offset + len(whole) + len(newline)


def open_events(path: Path) -> IO[bytes] | None:
    """Open an events file, if it exists.

    Raises:
        RunError: It is no file, or another user's.
    """
    try:
        return open_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", hint="restore it from a copy") from error


def parse_event(line: bytes) -> Event:
    """The event of a line.

    Raises:
        ValueError: It is none.
    """
    event = parse_json(line)
    if not is_event(event):
        raise ValueError("not an event")
    return dict(event)


def is_event(event: object) -> bool:
    """Return whether a line's value is an event, with the fields that every reader relies on."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    if not is_finite(event.get("time")) or (isinstance(event.get("step"), int) and abs(event["step"]) > MAX_STEP):
        return False
    return all(isinstance(event.get(key), kind) for key, kind in FIELDS.get(event["event"], ()))


def is_finite(value: object) -> bool:
    """Return whether a logged value is a number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Measure:
    """A logged metric.

    Attributes:
        name: TRL's name, with a star for what the recipe names.
        words: Its label, with braces for what the star stands for.
        digits: Its format.
        brief: Its short label during a run; None if it is not shown then.
        spread: TRL's name of its standard deviation; None if there is none.
        held_out: Whether evaluations have it.
        better: Direction in which it improves; None if it has none.
    """

    name: str
    words: str
    digits: str
    brief: str | None = None
    spread: str | None = None
    held_out: bool = True
    better: Literal["more", "less"] | None = None

    def label(self, name: str) -> str:
        """Its words for a name that it matches."""
        return self.words.format(self.star(name))

    def star(self, name: str) -> str:
        """The part of a name that it matches for which its star stands."""
        before, _, behind = self.name.partition("*")
        return name[len(before) : len(name) - len(behind)]

    def spread_of(self, name: str) -> str | None:
        """The name of how much the values of a name differ; None where there is none."""
        return self.spread and self.spread.replace("*", self.star(name))


@cache
def measures() -> tuple[Measure, ...]:
    """Return the measures of `measures.yaml`, in the order in which they are told."""
    return tuple(Measure(**row) for row in read_table(Path(__file__).with_name("measures.yaml")))


_TIED = 1e-5
"""Margin below which a model prefers nothing: two passes of the same float32 weights differ by less."""


def first_and_last(events: Sequence[Event]) -> dict[str, list[float]]:
    """Each measure's first and last value by its name in the log, of the evaluations where they have it."""
    values_by_name: dict[str, list[float]] = {}
    logs, evaluations = ([event for event in events if event["event"] == kind] for kind in ("log", "eval"))
    names = dict.fromkeys(name for log in logs for name in log)
    for measure in measures():
        for name in (name for name in names if fnmatch(name, measure.name)):
            for each in filter(None, (name, measure.spread_of(name))):
                held_out = [event.get(f"eval_{each}") for event in evaluations] if measure.held_out else []
                values = [value for value in held_out or [log.get(each) for log in logs] if value is not None]
                if values:
                    values_by_name[each] = [values[0], values[-1]]
    return values_by_name


def rows_of(values: Mapping[str, Sequence[float]]) -> list[tuple[str, str]]:
    """Describe the first and last values that `first_and_last` returned."""
    ends = [{name: pair[place] for name, pair in values.items()} for place in (0, -1)]
    return [
        (measure.label(name), " → ".join(_said(measure, name, end) for end in ends))
        for measure in measures()
        for name in values
        if fnmatch(name, measure.name)
    ]


def brief(logs: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the metrics of a step in short form, the most important first.

    Args:
        logs: What was logged.
        prefix: Before each name, where that is an evaluation.
    """
    own = {name.removeprefix(prefix): value for name, value in logs.items() if name.startswith(prefix)}
    return [
        f"{measure.brief} {_said(measure, measure.name, own, spread=False)}"
        for measure in measures()
        if measure.brief is not None and own.get(measure.name) is not None and (measure.held_out or not prefix)
    ]


def judged_by(names: Sequence[str]) -> str:
    """Return the logged metric that best tells whether a run learns: the loss where there is no other."""
    best = ("ebft/cfm_loss", "reward", "rewards/margins", "margin")
    return next((name for name in best if name in names), "loss")


def direction_of(name: str, logged: Container[str]) -> Literal["more", "less"] | None:
    """Return the direction in which a metric improves; None where it has none.

    Args:
        name: The measure, by its name in training.
        logged: All that the run logs. Where answers earn rewards, the loss is what the gradient comes from: its value
            says nothing of the answers.
    """
    if name == "loss":
        return None if "reward" in logged else "less"
    return next((measure.better for measure in measures() if fnmatch(name, measure.name)), None)


def words_of(name: str) -> str:
    """Return the label of a logged metric."""
    return next((measure.label(name) for measure in measures() if fnmatch(name, measure.name)), name)


def _said(measure: Measure, name: str, values: Mapping[str, Any], *, spread: bool = True) -> str:
    """A value, and by how much values differ."""
    margin = values.get("rewards/margins")
    if name == "rewards/accuracies" and margin is not None and abs(margin) < _TIED:
        # The model still equals its reference: an accuracy on pairs carries no information.
        return "n/a"
    apart = values.get(measure.spread_of(name) or "") if spread else None
    return number(values[name], measure.digits) + ("" if apart is None else f" ± {number(apart, measure.digits)}")


def number(value: float, digits: str) -> str:
    """A number, without the sign of what is rounded to nothing."""
    text = format(value, digits)
    return text.removeprefix("-") if not any(digit in text for digit in "123456789") else text
