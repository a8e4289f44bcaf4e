"""Reads `events.jsonl` while it grows: each byte once, in memory that does not grow with the run.

A curve of 100,000 steps is kept as the extremes of equal stretches of it, so that a peak of a single step is still seen
at any zoom that a screen has. What a run took back, by going on from a checkpoint before, is taken out of the curves.

    reader = EventReader(run.path / "events.jsonl")
    while reader.read():
        print(reader.series["loss"].last)
"""

import json
import os
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from math import isfinite
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

_NUMBERS = frozenset({int, float})

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
        # The stretch that the newest point is in, which is not in the columns yet.
        self._stretch = -1
        self._least = self._most = self._last = Point(-1, 0.0, 0.0)

    def __len__(self) -> int:
        return len(self._steps) + len(self._open())

    def __iter__(self) -> Iterator[Point]:
        yield from map(Point, self._steps, self._times, self._values)
        yield from self._open()

    @property
    def last(self) -> Point:
        """The newest point, as it was logged."""
        return self._last

    @property
    def width(self) -> int:
        """Steps that a stretch has; 1 while no point was left out."""
        return self._width

    def add(self, step: int, time: float, value: float) -> None:
        """Add a point. Those of this step and later ones, which were told before, no longer count."""
        if step <= self._last.step:
            self.cut(step)
        point = self._last = Point(step, time, value)
        stretch = step // self._width
        if stretch == self._stretch:
            if value < self._least.value:
                self._least = point
            elif value > self._most.value:
                self._most = point
            return
        if self._stretch >= 0:
            self._close(sorted({self._least, self._most}))
            if len(self._steps) > MAX_POINTS - 3:
                self._widen()
                stretch = step // self._width
        self._stretch, self._least, self._most = stretch, point, point

    def cut(self, step: int) -> None:
        """Take out what is told of a step and of all later ones."""
        kept = [point for point in self._open() if point.step < step]
        if not kept:
            first = bisect_left(self._steps, step)
            for column in (self._steps, self._times, self._values):
                del column[first:]
            kept = self._reopened()
        self._stretch = kept[-1].step // self._width if kept else -1
        if not kept:
            self._last = Point(-1, 0.0, 0.0)
            return
        self._least, self._most = (choose(kept, key=lambda point: point.value) for choose in (min, max))
        self._last = kept[-1]

    def _open(self) -> list[Point]:
        """The points of the newest stretch."""
        return sorted({self._least, self._most, self._last}) if self._stretch >= 0 else []

    def _reopened(self) -> list[Point]:
        """The points of the last stretch in the columns, taken out of them."""
        points: list[Point] = []
        while self._steps and (not points or self._steps[-1] // self._width == points[0].step // self._width):
            points.insert(0, Point(self._steps.pop(), self._times.pop(), self._values.pop()))
        return points

    def _close(self, points: Iterable[Point]) -> None:
        """Put points into the columns."""
        for point in points:
            self._steps.append(point.step)
            self._times.append(point.time)
            self._values.append(point.value)

    def _widen(self) -> None:
        """Make stretches twice as wide until half of the points are gone."""
        points = list(map(Point, self._steps, self._times, self._values))
        while len(points) > MAX_POINTS // 2:
            self._width *= 2
            stretches = (list(some) for _, some in groupby(points, key=lambda point: point.step // self._width))
            points = [
                point
                for some in stretches
                for point in sorted({choose(some, key=lambda one: one.value) for choose in (min, max)})
            ]
        self._steps, self._times, self._values = array("q"), array("d"), array("d")
        self._close(points)


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
        is_behind: Whether there was more than was to be read.
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
        self.is_behind = False
        self._rest = self._head = b""
        self._seen: tuple[int, int, int] | None = None

    def read(self, max_bytes: int | None = None) -> bool:
        """Take in what was written since the last time; whether that is anything.

        A file that was replaced or cut short meanwhile is read from its beginning, and all before forgotten.

        Args:
            max_bytes: About how much is read at most; what is left comes the next time.
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
            stream.seek(self.read_bytes)
            before = self.num_events
            # What is written from here on waits: a fast writer keeps nobody busy.
            end = min(status.st_size, self.read_bytes + (max_bytes or status.st_size))
            while self.read_bytes < end:
                piece = stream.read(min(CHUNK_BYTES, end - self.read_bytes))
                if not piece:
                    break
                self._head += piece[: HEAD_BYTES - len(self._head)]
                self.read_bytes += len(piece)
                self._take(piece)
            self.is_behind = self.read_bytes < status.st_size
            self._seen = (status.st_ino, self.read_bytes, 0) if self.is_behind else seen
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
            if type(value) not in _NUMBERS or name in _NO_MEASURES or not isfinite(value):
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
