"""Signs of life: what each process of a run says of itself while it lives, for whoever asks from outside.

Each writes `ranks/rank-N.json` once a second, from a thread of its own: who it is, at what it is, and since when.
"""

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tunekit.run.place import Place
from tunekit.run.run import Run

RANKS = "ranks"
"""Folder of a run folder with what its processes say."""

BEAT_SECONDS = 1.0
"""How often they do."""


@dataclass(frozen=True)
class Beat:
    """What a process said last.

    Attributes:
        rank: Which one it is.
        pid: Its number on its host.
        process_started: When it started, in seconds since the epoch, by that host's clock.
        host: Name of its host.
        time: When it said this, in seconds since the epoch.
        step: The step that it is at.
        at: What it does in it: `loading`, `data`, `forward`, `backward`, `optimizer`, `evaluation`, `saving`, ...
        since: When it began that, in seconds since the epoch.
    """

    rank: int
    pid: int
    process_started: float
    host: str
    time: float
    step: int
    at: str
    since: float


class Heart:
    """Says where this process is, from the beginning of a `with` block to its end.

    Args:
        run: The run.
        place: Which of its processes this is.
    """

    def __init__(self, run: Run, place: Place) -> None:
        self._file = run.path / RANKS / f"rank-{place.rank}.json"
        self._place = place
        self._started = psutil.Process().create_time()
        self._step, self._at, self._since = 0, "starting", time.time()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def mark(self, at: str, step: int | None = None) -> None:
        """Say what the process does from here on."""
        self._step, self._at, self._since = self._step if step is None else step, at, time.time()

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
            self._write()

    def _write(self) -> None:
        beat = Beat(
            rank=self._place.rank,
            pid=os.getpid(),
            process_started=self._started,
            host=os.uname().nodename,
            time=time.time(),
            step=self._step,
            at=self._at,
            since=self._since,
        )
        draft = self._file.with_name(f".{self._file.name}")
        draft.write_text(json.dumps(asdict(beat)), encoding="utf-8")
        draft.replace(self._file)


def beats_of(run: Run) -> list[Beat]:
    """What the processes of a run said last, by rank; one that ended in order says nothing more."""
    files = (run.path / RANKS).glob("rank-*.json")
    return sorted((_read(file) for file in files), key=lambda beat: beat.rank)


def _read(file: Path) -> Beat:
    return Beat(**json.loads(file.read_text(encoding="utf-8")))
