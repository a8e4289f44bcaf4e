"""Reads `events.jsonl` while it grows: each byte once, in memory that does not grow with the run.

A curve of 100,000 steps is kept as the extremes of equal stretches of it, so that a peak of a single step is still seen
at any zoom that a screen has. What a run took back, by going on from a checkpoint before, is taken out of the curves.

    reader = EventReader(run.path / "events.jsonl")
    while reader.read():
        print(reader.series["loss"].last)
"""

import json
import math
import os
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tunekit.run.events import Event

MAX_POINTS = 2000
"""Points that are kept of a curve; a screen has about as many columns."""

MAX_TOLD = 200
"""Events of a kind that are kept, the newest."""

CHUNK_BYTES = 1 << 20
"""What is read at once."""

HEAD_BYTES = 256
"""Of the beginning of the file, by which another one in its place is told."""

TAIL_BYTES = 1 << 16
"""Of the end of the file, which is all that a list of runs looks at."""

_NO_MEASURES = frozenset({"event", "time", "step"})


class Point(NamedTuple):
    """A value that was logged.

    Attributes:
        step: The step.
        time: When, in seconds since the epoch.
        value: What.
    """

    step: int
    time: float
    value: float


class Series:
    """A curve of at most `MAX_POINTS` points: all of them while they are few, then extremes of equal stretches.

    A stretch is the steps with the same `step // width`. Of one that has more than two points, the least and the
    greatest are kept. Once there are too many, stretches become twice as wide. The newest point is always there.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._times = array("d")
        self._values = array("d")
        self._width = 1

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Point]:
        return map(Point, self._steps, self._times, self._values)

    @property
    def last(self) -> Point:
        """The newest point, as it was logged."""
        return Point(self._steps[-1], self._times[-1], self._values[-1])

    @property
    def width(self) -> int:
        """Steps that a stretch has; 1 while no point was left out."""
        return self._width

    def add(self, step: int, time: float, value: float) -> None:
        """Add a point. Those of this step and later ones, which were told before, no longer count."""
        steps = self._steps
        if steps and step <= steps[-1]:
            self.cut(step)
        # The newest point may be the third of its stretch, until another one follows.
        if len(steps) >= 3 and steps[-1] // self._width == steps[-3] // self._width:
            self._settle()
        steps.append(step)
        self._times.append(time)
        self._values.append(value)
        if len(steps) > MAX_POINTS:
            self._widen()

    def cut(self, step: int) -> None:
        """Take out what is told of a step and of all later ones."""
        first = bisect_left(self._steps, step)
        for column in (self._steps, self._times, self._values):
            del column[first:]

    def _settle(self) -> None:
        """Take the middle one of the last three points out."""
        start = len(self._values) - 3
        middle = sorted(range(start, start + 3), key=self._values.__getitem__)[1]
        for column in (self._steps, self._times, self._values):
            del column[middle]

    def _widen(self) -> None:
        """Make stretches twice as wide until half of the points are gone."""
        while len(self._steps) > MAX_POINTS // 2:
            self._width *= 2
            kept: list[int] = []
            start = 0
            for end in range(1, len(self._steps) + 1):
                if end == len(self._steps) or self._steps[end] // self._width != self._steps[start] // self._width:
                    stretch = range(start, end)
                    least, most = min(stretch, key=self._values.__getitem__), max(stretch, key=self._values.__getitem__)
                    kept += sorted({least, most})
                    start = end
            newest = len(self._steps) - 1
            kept += [newest] if kept[-1] != newest else []
            self._steps = array("q", map(self._steps.__getitem__, kept))
            self._times = array("d", map(self._times.__getitem__, kept))
            self._values = array("d", map(self._values.__getitem__, kept))


class EventReader:
    """What happened in a run so far, and at each `read` what happened since. Not for several threads at once.

    Attributes:
        path: The file, `events.jsonl` of a run folder; it need not be there yet.
        series: The curves by the names of the log; those of evaluations begin with `eval_`. `peak_memory_bytes`, of the
            process that used most so far, has a point for each `ranks` event.
        told: The newest events of every other kind but `sample`, by kind, the oldest first.
        answers: What each sampled prompt was answered, by `when`.
        began: Time of the first event; None before there is one.
        num_events: How many events there were.
        num_broken: Lines that are no event, which are passed over.
        read_bytes: How much was read of the file in its place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.series: dict[str, Series] = {}
        self.told: dict[str, deque[Event]] = {}
        self.answers: dict[str, dict[str, str]] = {}
        self.began: float | None = None
        self.num_events = self.num_broken = self.read_bytes = 0
        self._rest = self._head = b""
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> bool:
        """Take in what was written since the last time; whether that is anything.

        A file that was replaced or cut short meanwhile is read from its beginning, and all before forgotten.
        """
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            was_there = self._seen is not None
            self._forget()
            return was_there
        with stream:
            status = os.fstat(stream.fileno())
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen == self._seen:
                return False
            is_other = self._seen is not None and not self._goes_on(status, stream.read(len(self._head)))
            if is_other:
                self._forget()
            self._seen = seen
            stream.seek(self.read_bytes)
            before = self.num_events
            # What is written from here on waits: a fast writer keeps nobody busy.
            while self.read_bytes < status.st_size:
                piece = stream.read(min(CHUNK_BYTES, status.st_size - self.read_bytes))
                if not piece:
                    break
                self._head += piece[: HEAD_BYTES - len(self._head)]
                self.read_bytes += len(piece)
                self._take(piece)
        return is_other or self.num_events > before

    def newest(self, kind: str) -> Event | None:
        """The newest event of a kind that has no curve; None where there is none."""
        return self.told[kind][-1] if kind in self.told else None

    def all(self, kind: str) -> list[Event]:
        """The newest events of a kind that has no curve, the oldest first."""
        return list(self.told.get(kind, ()))

    def _goes_on(self, status: os.stat_result, head: bytes) -> bool:
        """Whether the file is still the one that was read."""
        assert self._seen is not None
        return status.st_ino == self._seen[0] and status.st_size >= self.read_bytes and head == self._head

    def _take(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            event = _event(line)
            if event is None:
                self.num_broken += bool(line.strip())
                continue
            self.num_events += 1
            if self.began is None:
                self.began = event["time"]
            self._add(event)

    def _add(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("log", "eval") and isinstance(event.get("step"), int):
            self._add_values(event)
            return
        if kind == "sample":
            answers = self.answers.setdefault(str(event.get("prompt")), {})
            answers[str(event.get("when"))] = str(event.get("answer"))
            while len(self.answers) > MAX_TOLD:
                del self.answers[next(iter(self.answers))]
            return
        if kind == "ranks" and isinstance(event.get("step"), int):
            peaks = [rank["peak_memory_bytes"] for rank in event["ranks"]]
            self._add_values({**event, "peak_memory_bytes": max(peaks, default=None)})
        if kind in ("restart", "resume") and isinstance(event.get("step"), int):
            # With nothing but its weights, the checkpoint's steps begin again.
            kept = -1 if event.get("weights_only") else event["step"]
            for series in self.series.values():
                series.cut(kept + 1)
            self.series = {name: series for name, series in self.series.items() if len(series)}
        self.told.setdefault(kind, deque(maxlen=MAX_TOLD)).append(event)

    def _add_values(self, event: Event) -> None:
        step, time = event["step"], event["time"]
        for name, value in event.items():
            # Numbers that are not finite are written as text.
            if name in _NO_MEASURES or not isinstance(value, int | float) or not math.isfinite(value):
                continue
            series = self.series.get(name)
            if series is None:
                series = self.series[name] = Series()
            series.add(step, time, value)


def last_events(path: Path) -> list[Event]:
    """The last events of a file, as many as end in its last `TAIL_BYTES`; of a file that is not there, none."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            tail = stream.read(TAIL_BYTES)
    except FileNotFoundError:
        return []
    lines = tail.split(b"\n")[:-1]
    if size > TAIL_BYTES:
        # Its beginning may lie before.
        lines = lines[1:]
    return [event for event in map(_event, lines) if event is not None]


def _event(line: bytes) -> Event | None:
    """An event by its line; None where it is none."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_one = isinstance(event, dict) and isinstance(event.get("event"), str)
    return event if is_one and isinstance(event.get("time"), int | float) else None
