"""Event histories of runs, read once for all browsers and for all parts of their pages.

What was written since the last question is read when the next one comes. A long history would keep everybody waiting:
it is read by a process of its own, one file after another, and whoever asks meanwhile is told how far it is.
"""

import contextlib
import multiprocessing
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import tunekit
from tunekit import frontend
from webui.long_history import read_parts

MAX_READERS = 24
"""Runs whose curves are kept in memory, those that were looked at last; each takes about a megabyte."""

PIECE_BYTES = 2**19
"""Bytes that are read at a request, some ten milliseconds' work. The rest of a longer file is read elsewhere."""

PATIENCE_SECONDS = 1.5
"""Seconds that a request waits for the end of the file that is being read, if it asks to."""


class _Shared:
    """A reader that threads take turns with."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.reader = frontend.EventReader(path)
        self.is_read = threading.Event()
        self.is_read.set()


_lock = threading.Lock()
_readers: OrderedDict[Path, _Shared] = OrderedDict()
_long: SimpleQueue[_Shared] = SimpleQueue()
_first: list[_Shared] = []
"""The one that is being read elsewhere."""
_threads: list[threading.Thread] = []


@contextlib.contextmanager
def history_of(run: tunekit.Run, *, patient: bool = False) -> Iterator[frontend.EventReader]:
    """Yield a run's history until now, or the part that is read where the reader says that it `is_behind`.

    Nobody else reads on while the context lasts.

    Args:
        run: The run.
        patient: Whether to wait a moment for the end of the file.
    """
    path = run.path / "events.jsonl"
    with _lock:
        shared = _readers.setdefault(path, _Shared(path))
        _readers.move_to_end(path)
        while len(_readers) > MAX_READERS:
            _readers.popitem(last=False)
    with shared.lock:
        if shared.is_read.is_set():
            shared.reader.read(PIECE_BYTES)
            if shared.reader.is_behind:
                shared.is_read.clear()
                _read_elsewhere(shared)
    # Where others come first it would wait in vain.
    if patient and _first in ([], [shared]):
        shared.is_read.wait(PATIENCE_SECONDS)
    with shared.lock:
        yield shared.reader


def checkpoints_of(run: tunekit.Run) -> list[frontend.Checkpoint]:
    """The checkpoints of a run, the newest first; their losses as far as its history is read."""
    with history_of(run) as reader:
        return tunekit.checkpoints(run, reader)


def steps_of(run: tunekit.Run) -> list[int]:
    """The steps of a run's checkpoints that can be used, the last first."""
    return sorted({checkpoint.step for checkpoint in checkpoints_of(run) if checkpoint.fault is None}, reverse=True)


def share_read(reader: frontend.EventReader) -> float:
    """Return the share of a file that is read, from 0 to 1."""
    return reader.read_bytes / reader.file_bytes if reader.file_bytes else 1.0


def _read_elsewhere(shared: _Shared) -> None:
    _long.put(shared)
    with _lock:
        if not _threads:
            _threads.append(threading.Thread(target=_read_all, name="histories", daemon=True))
            _threads[0].start()


def _read_all() -> None:
    while True:
        shared = _long.get()
        _first[:] = [shared]
        # A process that ends too early leaves the rest to the next question, which says what is wrong with the file.
        with contextlib.suppress(EOFError, OSError):
            _read_rest(shared)
        _first.clear()
        shared.is_read.set()


def _read_rest(shared: _Shared) -> None:
    """Have a process read a file to its end, and take over what it has read so far, again and again."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_parts, args=(theirs, shared.reader), name="history", daemon=True)
    process.start()
    theirs.close()
    with ours:
        while shared.reader.is_behind:
            reader = ours.recv()
            with shared.lock:
                shared.reader = reader
    process.join()
