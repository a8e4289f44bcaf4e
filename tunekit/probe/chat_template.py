"""Chat templates, which come with models: a limit of their time, and texts for those that read parts alone.

A template's sandbox allows endless loops. What ends it is no `Exception`: Jinja computes what is constant in a template
while it compiles it, and goes on after any exception there. In the main thread a signal interrupts also the arithmetic
of large numbers, which Python does in C. Other threads are interrupted between two instructions of Python: a power of
constants is computed to its end there.
"""

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from tunekit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        problem = f"{place}: rendering the chat template timed out after {ROW_SECONDS:.0f} s"
        raise DataError(problem, hint="check it for endless loops, or set model.chat_template") from None


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


_PROBE = "a text of one user"

_TEXTS_AS_PARTS = (
    "{%- set texts = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- if message['content'] is string -%}"
    "{%- set message = dict(message, content=[{'type': 'text', 'text': message['content']}]) -%}{%- endif -%}"
    "{%- set texts.messages = texts.messages + [message] -%}{%- endfor -%}"
    "{%- set messages = texts.messages -%}"
)


def take_texts(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Have a chat template that reads contents as lists of parts alone, such as LLaVA's, read texts too.

    Without, it writes each text as nothing, and a model would learn to answer questions that it never saw.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or _PROBE in _written(tokenizer, _PROBE):
        return
    if _PROBE in _written(tokenizer, [{"type": "text", "text": _PROBE}]):
        tokenizer.chat_template = _TEXTS_AS_PARTS + template


def _written(tokenizer: "PreTrainedTokenizerBase", content: Any) -> str:
    """Text that a template writes of a message; empty where it refuses it."""
    from jinja2 import TemplateError

    try:
        with template_in_time("a first conversation"):
            return str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
    except (TemplateError, TypeError, ValueError, DataError):
        return ""
