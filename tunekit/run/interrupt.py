"""Ctrl-C that is not lost.

Python raises KeyboardInterrupt wherever the program happens to be. Where that is a destructor or a callback from C,
the exception is reported and dropped, and training would go on. So the wish is remembered too, and asked for again
at the end of each step.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def remembered_interrupts() -> Iterator[threading.Event]:
    """Raise KeyboardInterrupt on SIGINT as ever, and set the event besides.

    Nothing changes outside the main thread, nor where the process was started to ignore the signal.
    """
    asked = threading.Event()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield asked
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        asked.set()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)
