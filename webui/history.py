"""What happened in runs, read once for all browsers."""

import contextlib
import threading
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
        shared.reader.read()
        yield shared.reader
