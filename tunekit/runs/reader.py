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
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import lt
from pathlib import Path
from typing import Any, NamedTuple

from tunekit.runs.events import Event, is_event, is_finite, open_events, parse_event
from tunekit.runs.thumbnails import digests_of

MAX_POINTS = 2000
"""Points that are kept of a curve; a screen has about as many columns."""

MAX_TOLD = 200
"""Events of a kind that are kept, the newest."""

CHUNK_BYTES = 1 << 18
"""Bytes that are read at once: while they are processed, nothing else of the process runs."""

MAX_LINE_BYTES = 1 << 24
"""Longest line that is read as an event."""

HEAD_BYTES = 256
"""Of the beginning of the file, by which another one in its place is told."""

TAIL_BYTES = 1 << 16
"""Of the end of the file, which is all that a list of runs looks at."""

MAX_RECENT = 256
"""Losses that are kept as they were logged: a checkpoint is told of when it is written, some steps after its own."""

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
    """A curve of at most `MAX_POINTS` points: all of them while they are few, then the extremes of equal intervals.

    An interval has the steps with the same `step // width`. Of one with more than two points, the minimum and maximum
    are kept; of the newest all. Once there are too many points, intervals become twice as wide.
    """

    def __init__(self) -> None:
        self._width = 1
        # Columns of plain numbers take a sixth of the memory of tuples.
        self._steps, self._times, self._values = array("q"), array("d"), array("d")
        # Of these only extremes are left.
        self._num_thin = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Point]:
        return map(Point, self._steps, self._times, self._values)

    @property
    def last(self) -> Point:
        """The newest point, as it was logged."""
        return self._point(-1) if self._steps else Point(-1, 0.0, 0.0)

    @property
    def width(self) -> int:
        """Steps per interval; 1 while all points are kept."""
        return self._width

    def add(self, step: int, time: float, value: float) -> None:
        """Add a point; earlier points of this and later steps are dropped."""
        self.extend([step], [time], [value])

    def extend(self, steps: Sequence[int], times: Sequence[float], values: Sequence[float]) -> None:
        """Add points with increasing steps; earlier points of the first one's and later steps are dropped."""
        self.cut(steps[0])
        for column, added in zip(self._columns, (steps, times, values), strict=True):
            column.extend(added)
        if len(self) > MAX_POINTS:
            self._thin()

    def at(self, step: int) -> Point | None:
        """Return the last kept point up to a step; None if there is none."""
        place = bisect_right(self._steps, step)
        return self._point(place - 1) if place else None

    def cut(self, step: int) -> None:
        """Drop the points of a step and all later ones."""
        if self._steps and self._steps[-1] >= step:
            place = bisect_left(self._steps, step)
            for column in self._columns:
                del column[place:]
            self._num_thin = min(self._num_thin, max(0, len(self) - 2))

    @property
    def _columns(self) -> "tuple[array[Any], ...]":
        return self._steps, self._times, self._values

    def _point(self, place: int) -> Point:
        return Point(self._steps[place], self._times[place], self._values[place])

    def _thin(self) -> None:
        """Keep the extremes of each interval; where that leaves too many, of intervals twice as wide."""
        self._keep(self._extremes(self._num_thin), self._num_thin)
        while len(self) > MAX_POINTS // 2 + 1:
            self._width *= 2
            self._keep(self._extremes(0), 0)
        # The newest interval may still grow.
        self._num_thin = max(0, len(self) - 3)

    def _keep(self, places: Sequence[int], start: int) -> None:
        """Drop all points from a place on but some and the last one."""
        for column in self._columns:
            column[start:] = array(column.typecode, [column[place] for place in (*places, len(column) - 1)])

    def _extremes(self, start: int) -> list[int]:
        """Return the places of the minimum and maximum of each interval from a place on, without the last point."""
        extremes: list[int] = []
        end = len(self) - 1
        while start < end:
            interval = self._steps[start] // self._width
            after = bisect_left(self._steps, (interval + 1) * self._width, start, end)
            values = self._values[start:after]
            extremes += sorted({start + values.index(choose(values)) for choose in (min, max)})
            start = after
        return extremes


class EventReader:
    """Incremental reader of a run's events; not thread-safe.

    Attributes:
        path: The file, `events.jsonl` of a run folder; it may not exist yet.
        series: Curves by logged name; those of evaluations start with `eval_`. `peak_memory_bytes`, the maximum over
            processes, has a point for each `ranks` event.
        told: The newest events of every other kind but `sample`, by kind, oldest first.
        answers: Answers to each sample prompt, by `when`.
        pictures: Digests of the pictures of sample prompts that have some.
        began: Time of the first event; None before there is one.
        num_events: Number of events read.
        num_broken: Number of invalid lines, which are skipped.
        read_bytes: Bytes read of the current file.
        file_bytes: Size of the file at the last read.
        is_behind: Whether the last read stopped before the end of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.series: dict[str, Series] = {}
        self.told: dict[str, deque[Event]] = {}
        self.answers: dict[str, dict[str, str]] = {}
        self.pictures: dict[str, tuple[str, ...]] = {}
        self.began: float | None = None
        self.num_events = self.num_broken = self.read_bytes = self.file_bytes = 0
        self.is_behind = False
        self._recent: deque[tuple[int, float]] = deque(maxlen=MAX_RECENT)
        self._losses: dict[int, tuple[float | None, float | None]] = {}
        self._rest = self._head = b""
        self._seen: tuple[int, int, int] | None = None

    def read(self, max_bytes: int | None = None) -> bool:
        """Read what was written since the last call, and return whether anything changed.

        A file that was replaced or truncated is read again from its start.

        Args:
            max_bytes: Approximate limit of bytes to read; the rest follows with the next call.
        """
        opened = open_events(self.path)
        if opened is None:
            was_there = self._seen is not None
            self._forget()
            return was_there
        with opened as stream:
            status = os.fstat(stream.fileno())
            signature = (status.st_ino, status.st_size, status.st_mtime_ns)
            if signature == self._seen:
                return False
            is_other = self._seen is not None and not self._goes_on(status, stream.read(len(self._head)))
            if is_other:
                self._forget()
            stream.seek(self.read_bytes)
            self.file_bytes = status.st_size
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
            self._seen = (status.st_ino, self.read_bytes, 0) if self.is_behind else signature
        return is_other or self.num_events > before

    def newest(self, kind: str) -> Event | None:
        """Return the newest event of a kind without curves; None if there is none."""
        return self.told[kind][-1] if kind in self.told else None

    def all(self, kind: str) -> list[Event]:
        """Return the newest events of a kind without curves, oldest first."""
        return list(self.told.get(kind, ()))

    def losses_at(self, step: int) -> tuple[float | None, float | None]:
        """Return the loss and the evaluation loss of a checkpoint, of its step or of the last one before that has some.

        None if none was logged; approximate for old steps without a checkpoint among the newest `MAX_TOLD`.
        """
        if step in self._losses:
            return self._losses[step]
        points = (self.series[name].at(step) if name in self.series else None for name in ("loss", "eval_loss"))
        loss, evaluated = (None if point is None else point.value for point in points)
        return loss, evaluated

    def _goes_on(self, status: os.stat_result, head: bytes) -> bool:
        """Return whether the file is still the one that was read."""
        assert self._seen is not None
        return status.st_ino == self._seen[0] and status.st_size >= self.read_bytes and head == self._head

    def _take(self, piece: bytes) -> None:
        lines, newline, self._rest = (self._rest + piece).rpartition(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            # No event: what comes until the end of the line is none either, and is not kept.
            self._rest = b"\0"
        if not newline:
            return
        for names, some in groupby(self._valid(lines), key=_measures_of):
            events = list(some)
            steps = [event["step"] for event in events] if names else []
            if names and all(map(lt, steps, steps[1:])):
                self._add_values(names, steps, events)
            else:
                for event in events:
                    self._add(event)

    def _valid(self, lines: bytes) -> Iterator[Event]:
        """The events of some lines."""
        for event in _events(lines):
            if event is None:
                self.num_broken += 1
                continue
            self.num_events += 1
            if self.began is None:
                self.began = event["time"]
            yield event

    def _add(self, event: Event) -> None:
        kind = event["event"]
        has_step = isinstance(event.get("step"), int)
        names = _measures_of(event)
        if names:
            self._add_values(names, [event["step"]], [event])
            return
        if kind == "sample":
            prompt = str(event.get("prompt"))
            self.answers.setdefault(prompt, {})[str(event.get("when"))] = str(event.get("answer"))
            if digests := digests_of(event):
                self.pictures[prompt] = digests
            while len(self.answers) > MAX_TOLD:
                oldest = next(iter(self.answers))
                del self.answers[oldest]
                self.pictures.pop(oldest, None)
            return
        if kind == "ranks" and has_step:
            peaks = [rank["peak_memory_bytes"] for rank in event["ranks"] if "peak_memory_bytes" in rank]
            measured = {"step": event["step"], "time": event["time"], "peak_memory_bytes": max(peaks, default=None)}
            self._add_values(tuple(measured), [event["step"]], [measured])
        if kind == "checkpoint" and has_step:
            self._keep_losses(event["step"])
        if kind in ("restart", "resume") and has_step:
            # With nothing but its weights, the checkpoint's steps begin again.
            last_step = -1 if event.get("weights_only") else event["step"]
            for series in self.series.values():
                series.cut(last_step + 1)
            self.series = {name: series for name, series in self.series.items() if len(series)}
        self.told.setdefault(kind, deque(maxlen=MAX_TOLD)).append(event)

    def _add_values(self, names: Sequence[str], steps: Sequence[int], events: Sequence[Event]) -> None:
        """Add to the curves what events say that have the same names, in their order, and later and later steps."""
        columns = dict(zip(names, zip(*(event.values() for event in events), strict=True), strict=True))
        for name in names:
            if name in _NO_MEASURES:
                continue
            at, times, values = steps, columns["time"], columns[name]
            # Numbers that are not finite are written as text.
            if not all(map(is_finite, values)):
                points = [point for point in zip(steps, times, values, strict=True) if is_finite(point[2])]
                if not points:
                    continue
                at, times, values = zip(*points, strict=True)
            if name not in self.series:
                self.series[name] = Series()
            self.series[name].extend(at, times, values)
            if name == "loss":
                self._recent.extend(zip(at[-MAX_RECENT:], values[-MAX_RECENT:], strict=True))

    def _keep_losses(self, step: int) -> None:
        """Remember the losses of a checkpoint, since curves lose points while they grow."""
        self._losses.pop(step, None)
        near, evaluated = self.losses_at(step)
        self._losses[step] = (next((value for at, value in reversed(self._recent) if at <= step), near), evaluated)
        while len(self._losses) > MAX_TOLD:
            del self._losses[next(iter(self._losses))]


def last_events(path: Path) -> list[Event]:
    """Return the events in the last `TAIL_BYTES` of a file; none if it does not exist."""
    opened = open_events(path)
    if opened is None:
        return []
    with opened as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - TAIL_BYTES))
        tail = stream.read(TAIL_BYTES)
    lines = tail.split(b"\n")[:-1]
    if size > TAIL_BYTES:
        # Its beginning may lie before.
        lines = lines[1:]
    return [event for event in map(_event, lines) if event is not None]


def _measures_of(event: Event) -> tuple[str, ...]:
    """The names of what an event says of a step, in their order; none of one that has no curves."""
    return tuple(event) if event["event"] in ("log", "eval") and isinstance(event.get("step"), int) else ()


def _events(lines: bytes) -> Iterator[Event | None]:
    """The events of some lines, with None for each that is none; empty lines do not count."""
    try:
        # Together they take half of the time. No text of theirs goes over the end of a line.
        events = json.loads(b"[" + lines.replace(b"\n", b",") + b"]")
    except (ValueError, RecursionError):
        events = []
    if len(events) == lines.count(b"\n") + 1:
        yield from (event if is_event(event) else None for event in events)
    else:
        yield from (_event(line) for line in lines.split(b"\n") if line.strip())


def _event(line: bytes) -> Event | None:
    """An event by its line; None where it is none."""
    try:
        return parse_event(line)
    except ValueError:
        return None
