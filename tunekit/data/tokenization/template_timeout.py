"""Time limit of a chat template for a row: it comes with the model, and its sandbox allows endless loops.

What ends it is no `Exception`: Jinja computes what is constant in a template while it compiles it, and goes on after
any exception there. In the main thread a signal interrupts also the arithmetic of large numbers, which Python does in
C. Other threads are interrupted between two instructions of Python: a power of constants is computed to its end there.
"""

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tunekit.errors import DataError

ROW_SECONDS = 30.0
"""Far more than any row takes."""

AGAIN_SECONDS = 1.0
"""After which time it is ended again, where the end was dropped: Python drops what is raised in a destructor."""


class _TimeIsUp(BaseException):
    """The time is up. What the template runs in catches no such exception."""


@contextmanager
def template_in_time(place: str) -> Iterator[None]:
    """Within it a template that takes too long is ended.

    Args:
        place: The row, for messages.

    Raises:
        DataError: It took too long.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    is_free = in_main_thread and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    try:
        with _by_signal() if is_free else _by_thread():
            yield
    except _TimeIsUp:
        raise DataError(
            f"{place}: the chat template takes more than {ROW_SECONDS:.0f} s",
            hint="see whether it ends at all, or set model.chat_template",
        ) from None


@contextmanager
def _by_signal() -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise _TimeIsUp

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, ROW_SECONDS, AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@contextmanager
def _by_thread() -> Iterator[None]:
    """The same from another thread, for one that gets no signals, or whose alarm is somebody else's."""
    thread, lock, is_over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def end() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_TimeIsUp))

    timer = threading.Timer(ROW_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        # One that was sent and did not come yet.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
        timer.cancel()
