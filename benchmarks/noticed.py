"""What is done to the files of a run, as the kernel tells it (inotify), in the order in which it is done.

It does not matter who writes them, in Python, C++ or Rust: each call of a C function is followed by a look at what the
kernel has to tell, before the process does anything else.
"""

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CREATE, CLOSE_WRITE, MOVED_FROM, MOVED_TO, DELETE, IS_FOLDER = 0x100, 0x8, 0x40, 0x80, 0x200, 0x40000000
"""Flags of inotify(7)."""

WORDS = {CREATE: "begun", CLOSE_WRITE: "written", MOVED_TO: "renamed", DELETE: "deleted"}
"""What can be done to a file, by its flag."""

NOT_WATCHED = ("data", "errors", "ranks", "stacks")
"""Folders of a run folder in which nothing lies that it goes on from."""


@dataclass(frozen=True)
class Happening:
    """Something that was done to a file or a folder.

    Attributes:
        what: One of WORDS.
        path: Which, in the run folder.
        apart: Whether the process did something else before the next one, as far as Python can see.
    """

    what: str
    path: str
    apart: bool = True


class Files:
    """What is done to the files of a run.

    Args:
        folder: The run.
        tell: Called with each happening once somebody listens.
    """

    def __init__(self, folder: Path, tell: Callable[[Happening], None]) -> None:
        self._folder = folder
        self._tell = tell
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._notices = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._notices >= 0, os.strerror(ctypes.get_errno())
        self._watched: dict[int, Path] = {}
        self._moved: dict[int, Path] = {}
        self.happened: list[Happening] = []
        self._watch(folder)

    def listen(self) -> None:
        """Look at what the kernel tells after each call of a C function, in this thread and those that it starts."""
        self._read(tell=False)
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def listen_no_more(self) -> None:
        """Leave it."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _look(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("c_return", "c_exception"):
            self._read(tell=True)

    def _read(self, *, tell: bool) -> None:
        found: list[Happening] = []
        while True:
            try:
                notices = os.read(self._notices, 1 << 16)
            except BlockingIOError:
                break
            found += self._happenings(notices)
        if not tell:
            return
        for number, happening in enumerate(found):
            if number < len(found) - 1:
                happening = Happening(happening.what, happening.path, apart=False)
            self.happened.append(happening)
            self._tell(happening)

    def _happenings(self, notices: bytes) -> list[Happening]:
        found, offset = [], 0
        while offset < len(notices):
            watch, flags, cookie, length = struct.unpack_from("iIII", notices, offset)
            offset += 16 + length
            name = notices[offset - length : offset].rstrip(b"\0").decode()
            parent = self._watched.get(watch)
            if parent is None or not name:
                continue
            path = parent / name
            inner = path.relative_to(self._folder)
            if inner.parts[0] in NOT_WATCHED or (len(inner.parts) == 1 and not flags & IS_FOLDER):
                continue
            if flags & IS_FOLDER:
                self._follow(path, flags, cookie)
            what = next((word for flag, word in WORDS.items() if flags & flag), None)
            if what is not None:
                found.append(Happening(what, inner.as_posix()))
        return found

    def _follow(self, folder: Path, flags: int, cookie: int) -> None:
        if flags & CREATE:
            self._watch(folder)
        elif flags & MOVED_FROM:
            self._moved[cookie] = folder
        elif flags & MOVED_TO:
            before = self._moved.pop(cookie, None)
            if before is None:
                self._watch(folder)
                return
            for watch, path in self._watched.items():
                if path == before or before in path.parents:
                    self._watched[watch] = folder / path.relative_to(before)

    def _watch(self, folder: Path) -> None:
        mask = CREATE | CLOSE_WRITE | MOVED_FROM | MOVED_TO | DELETE
        watch = self._libc.inotify_add_watch(self._notices, os.fsencode(folder), mask)
        if watch < 0:
            return  # It is gone again.
        self._watched[watch] = folder
        for inner in folder.iterdir():
            if inner.is_dir() and inner.name not in NOT_WATCHED:
                self._watch(inner)
