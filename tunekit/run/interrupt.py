"""Ctrl-C that is not lost, and SIGTERM as another Ctrl-C.

Python raises KeyboardInterrupt wherever the program happens to be. Where that is a destructor or a callback from C,
the exception is reported and dropped, and training would go on. So the wish is remembered too, and asked for again
at the end of each step. Schedulers and service managers end a program with SIGTERM, which is to leave a run in the same
state.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def remembered_interrupts(*, sigterm: bool = True) -> Iterator[threading.Event]:
    """Raise KeyboardInterrupt on SIGINT as ever, and on SIGTERM too, and set the event besides.

    Nothing changes outside the main thread, for a signal that the process was started to ignore, nor for SIGTERM where
    the program has a handler of its own.

    Args:
        sigterm: Whether SIGTERM is a wish of the user's; otherwise it ends the process as ever.
    """
    asked = threading.Event()
    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = [signal.SIGINT] if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN else []
    if sigterm and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.default_int_handler):
        signals.append(signal.SIGTERM)
    if not in_main_thread or not signals:
        yield asked
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        asked.set()
        raise KeyboardInterrupt

    previous = {sign: signal.signal(sign, ask) for sign in signals}
    try:
        yield asked
    finally:
        for sign, handler in previous.items():
            signal.signal(sign, handler)
