"""How long a chat template may take for a row: it comes with the model, and its sandbox lets it loop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tunekit.errors import DataError

ROW_SECONDS = 30.0
"""Far more than any row takes."""


@contextmanager
def template_in_time(place: str) -> Iterator[None]:
    """Within it a template that takes too long is ended; in the main thread alone, as Python tells no other of time.

    Args:
        place: The row, for messages.

    Raises:
        DataError: It took too long.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        raise DataError(
            f"{place}: the chat template takes more than {ROW_SECONDS:.0f} s",
            hint="see whether it ends at all, or set model.chat_template",
        )

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, ROW_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
