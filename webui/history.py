"""What happened in runs, read once for all browsers."""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import tunekit

MAX_READERS = 24
"""Runs whose curves are kept in memory, those that were looked at last; each takes about a megabyte."""


class _Shared:
    """A reader that threads take turns with."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.reader = tunekit.EventReader(path)
        self.read_at = float("-inf")


MAX_BYTES = 16 * 2**20
"""What is read of a file at once: the rest of a long history comes with the next questions, a second's work each."""

PAUSE_SECONDS = 1.0
"""How long a history that is still being read is shown as far as it was."""

_lock = threading.Lock()
_readers: OrderedDict[Path, _Shared] = OrderedDict()


@contextlib.contextmanager
def history_of(run: tunekit.Run) -> Iterator[tunekit.EventReader]:
    """What happened in a run until now; nobody else reads on while the context lasts."""
    path = run.path / "events.jsonl"
    with _lock:
        shared = _readers.setdefault(path, _Shared(path))
        _readers.move_to_end(path)
        while len(_readers) > MAX_READERS:
            _readers.popitem(last=False)
    with shared.lock:
        # One question may come here several times.
        if not shared.reader.is_behind or time.monotonic() - shared.read_at > PAUSE_SECONDS:
            shared.reader.read(MAX_BYTES)
            shared.read_at = time.monotonic()
        yield shared.reader
