"""Standard streams that a long job survives: a pager that is quit, a terminal that is closed, a full disk.

A display never ends a run. What is shown is in the run's folder as well, so nothing is lost with a reader.
"""

import io
import os
import sys
from typing import Any, TextIO, cast


class _Lasting(io.TextIOBase):
    """A stream of text that writes to another one for as long as that can be written, and to nowhere afterwards.

    Args:
        stream: Where to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False

    def write(self, text: str) -> int:
        """Write a text, if it can be."""
        if not self._is_lost:
            try:
                self._stream.write(text)
            except OSError:
                self._is_lost = True
            except ValueError:
                self._is_lost = self._stream.closed
                if not self._is_lost:
                    raise
        return len(text)

    def flush(self) -> None:
        """Write what was kept back, if it can be."""
        if self._is_lost or self._stream.closed:
            return
        try:
            self._stream.flush()
        except OSError:
            self._is_lost = True

    def writable(self) -> bool:
        """Always."""
        return True

    def isatty(self) -> bool:
        """Return whether the other stream is a terminal."""
        return not self._stream.closed and self._stream.isatty()

    def fileno(self) -> int:
        """The file of the other stream."""
        return self._stream.fileno()

    @property
    def buffer(self) -> Any:
        """The bytes below the other stream."""
        return self._stream.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the other stream."""
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """Error handler with which the other stream writes characters that it cannot encode."""
        return self._stream.errors


def lasting(stream: TextIO) -> TextIO:
    """Return a stream that writes to another one for as long as that can be written, and to nowhere afterwards."""
    return cast(TextIO, _Lasting(stream))


def open_standard_streams() -> None:
    """Have the standard streams lead nowhere that were closed before the program began (`command >&-`).

    Else the first file that is opened would be standard output, for every library that writes there.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _fill(descriptor)
            stream = os.fdopen(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _fill(descriptor: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    os.set_inheritable(descriptor, True)


def outlive_readers() -> None:
    """Have this program go on when nobody reads its standard output and error any more."""
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
