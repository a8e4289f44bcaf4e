"""Signs of life: what each process of a run says of itself while it lives, for whoever asks from outside.

Each writes `ranks/rank-N.json` once a second, from a thread of its own: who it is, at what it is, and since when.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from tunekit.runs.liveness import RANKS, Place, identity_of
from tunekit.runs.run import Run
from tunekit.runs.small_files import read_object

BEAT_SECONDS = 1.0
"""Seconds between heartbeats."""

UNEVEN = ("generation", "rewards")
"""Activities that not all processes go through."""


@dataclass(frozen=True)
class Beat:
    """Last heartbeat of a process.

    Attributes:
        rank: Which one it is.
        pid: Its number on its host.
        identity: What no other process of that host ever has with this number.
        host: Name of its host.
        time: When it said this, in seconds since the epoch.
        step: The step that it is at.
        at: What it does in it: `loading`, `data`, `forward`, `backward`, `optimizer`, `evaluation`, `saving`, ...
        since: When it began that, in seconds since the epoch.
        marks: How many such parts it has begun in this step. All processes go through the same.
        moves: How often it was seen to move in this part: rows, layers, batches.
        is_warm: Whether its first step is over, in which a model is compiled and buffers are filled.
    """

    rank: int
    pid: int
    identity: str
    host: str
    time: float
    step: int
    at: str
    since: float
    marks: int = 0
    moves: int = 0
    is_warm: bool = False

    @property
    def position(self) -> tuple[int, int, int]:
        """Progress of the process, for comparison with others."""
        # Answers differ in length, and rewards in what they take.
        return self.step, self.marks, 0 if self.at in UNEVEN else self.moves

    def has_moved_since(self, before: "Beat") -> bool:
        """Return whether it made progress since an earlier heartbeat."""
        return (self.step, self.marks, self.moves) != (before.step, before.marks, before.moves)


class Heart:
    """Says where this process is, from the beginning of a `with` block to its end.

    Args:
        run: The run.
        place: Which of its processes this is.
    """

    def __init__(self, run: Run, place: Place) -> None:
        self._file = run.path / RANKS / f"rank-{place.rank}.json"
        self._place = place
        self._identity = identity_of(os.getpid()) or ""
        self.step, self.at, self._since = 0, "starting", time.time()
        self._marks = self._moves = 0
        self._is_warm = False
        self.thread = threading.get_ident()
        """The thread that works."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def mark(self, at: str, step: int | None = None) -> None:
        """Say what the process does from here on. It is kept in memory, and costs nothing."""
        if step is not None and step != self.step:
            # Before the first of an attempt it has step 0.
            self._is_warm = self.step > 0
            self.step, self._marks = step, 0
        self.at, self._since = at, time.time()
        self._marks += 1
        self._moves = 0

    def move(self) -> None:
        """Say that it moved on in this."""
        self._moves += 1

    def now(self) -> Beat:
        """Return the current heartbeat."""
        return Beat(
            rank=self._place.rank,
            pid=os.getpid(),
            identity=self._identity,
            host=os.uname().nodename,
            time=time.time(),
            step=self.step,
            at=self.at,
            since=self._since,
            marks=self._marks,
            moves=self._moves,
            is_warm=self._is_warm,
        )

    def __enter__(self) -> Self:
        self._file.parent.mkdir(exist_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._file.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._write()
            except OSError:
                # A full disk is no reason to be taken for dead.
                with contextlib.suppress(OSError):
                    os.utime(self._file)

    def _write(self) -> None:
        draft = self._file.with_name(f".{self._file.name}")
        draft.write_text(json.dumps(asdict(self.now())), encoding="utf-8")
        draft.replace(self._file)


def beats_of(run: Run) -> list[Beat]:
    """Return the last heartbeats of a run's processes, by rank; one that ended in order sends no more."""
    beats = []
    for file in (run.path / RANKS).glob("rank-*.json"):
        # It may end meanwhile.
        with contextlib.suppress(FileNotFoundError):
            beats.append(Beat(**read_object(file)))
    return sorted(beats, key=lambda beat: beat.rank)


def last_signs(run: Run) -> dict[int, int]:
    """Return the time of each rank's last heartbeat, by the clock of the disk in nanoseconds."""
    signs = {}
    for file in (run.path / RANKS).glob("rank-*.json"):
        with contextlib.suppress(FileNotFoundError):
            signs[int(file.stem.removeprefix("rank-"))] = file.stat().st_mtime_ns
    return signs


def forget_beats(run: Run) -> None:
    """Take away what the processes of an earlier attempt said last."""
    shutil.rmtree(run.path / RANKS, ignore_errors=True)
