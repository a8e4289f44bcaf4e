"""Chat templates, which come with models: limits of their time and memory, and texts for those that read parts alone.

Those that a recipe sets, by name or by file: their text, and the end of their answers.

A template's sandbox allows endless loops. What ends it is no `Exception`: Jinja computes what is constant in a template
while it compiles it, and goes on after any exception there. In the main thread a signal interrupts also the arithmetic
of large numbers, which Python does in C. Other threads are interrupted between two instructions of Python: a power of
constants is computed to its end there.

What a template does that no row asks for - calls without end, a text that fills the memory, another file - is an error
of the template.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tunekit.errors import DataError, ModelError
from tunekit.recipe.chat_templates import missing_tokens, named_template
from tunekit.recipe.reading.parse import to_inline_yaml
from tunekit.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_SECONDS = 30.0
"""Far more than any row takes."""

ROW_BYTES = 2 * 2**30
"""The same of memory. The limit is one of the process, so that it is set only where a signal ends a template."""

AGAIN_SECONDS = 1.0
"""After which time it is ended again, where the end was dropped: Python drops what is raised in a destructor."""


CHECKS = 100
"""Passes of a loop in which a thread certainly looks for what it was sent: it does so in each."""


class _TimeIsUp(BaseException):
    """The time is up. What the template runs in catches no such exception."""


@contextlib.contextmanager
def template_in_time(place: str) -> Iterator[None]:
    """Within it a template that takes too long, or in the main thread too much memory, is ended.

    Args:
        place: The row, for messages.

    Raises:
        DataError: It took too long or too much memory, or fails whatever the row is.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    is_free = in_main_thread and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    try:
        with _by_signal(_body_of(sys._getframe())) if is_free else _by_thread():
            yield
    except _TimeIsUp:
        problem = f"{place}: rendering the chat template timed out after {ROW_SECONDS:.0f} s"
        raise DataError(problem, hint="check it for endless loops, or set model.chat_template") from None
    except (TypeError, OverflowError, RecursionError, MemoryError) as error:
        problem = f"{place}: rendering the chat template failed: {_said(error)}"
        raise DataError(problem, hint="set model.chat_template to another one") from error


def _body_of(frame: FrameType) -> FrameType | None:
    """Return the frame with the `with` that enters a context manager of this frame, or one around that."""
    around: FrameType | None = frame
    while around is not None and (entry := around.f_back) is not None and entry.f_code is _ENTRY:
        around = entry.f_back
    return around


_ENTRY = contextlib._GeneratorContextManager.__enter__.__code__


def _said(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep, or calls itself without end"
    return "not enough memory for its text" if isinstance(error, MemoryError) else str(error)


@contextlib.contextmanager
def _by_signal(body: FrameType | None) -> Iterator[None]:
    """End what is called from a frame, when the time is up."""

    def end(signum: int, frame: FrameType | None) -> None:
        # Not within what takes the alarm back: that comes after, and would be left undone.
        while frame is not body:
            if frame is None or frame.f_code.co_filename in (__file__, contextlib.__file__):
                return
            frame = frame.f_back
        raise _TimeIsUp

    limits = resource.getrlimit(resource.RLIMIT_AS)
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, ROW_SECONDS, AGAIN_SECONDS)
    try:
        _limit_memory(*limits)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _limit_memory(soft: int, hard: int) -> None:
    """Allow this process ROW_BYTES beyond what it has mapped; on Linux, which tells how much that is."""
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        num_pages = int(os.read(descriptor, 32).split()[0])
    finally:
        os.close(descriptor)
    limit = num_pages * resource.getpagesize() + ROW_BYTES
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@contextlib.contextmanager
def _by_thread() -> Iterator[None]:
    """The same from another thread, for one that gets no signals, or whose alarm is somebody else's."""
    thread, lock = ctypes.c_ulong(threading.get_ident()), threading.Lock()
    is_over = is_sent = False

    def end() -> None:
        nonlocal is_sent
        with lock:
            if not is_over:
                is_sent = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_TimeIsUp))

    timer = threading.Timer(ROW_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()
        # One that was sent and did not come yet comes here. Taken back, it would leave Python 3.11 looking for it
        # before each instruction, and hanging under a debugger or profiler.
        if is_sent:
            with contextlib.suppress(_TimeIsUp):
                for _ in range(CHECKS):
                    pass


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
    if not isinstance(template, str) or _PROBE in written(tokenizer, _PROBE):
        return
    if _PROBE in written(tokenizer, [{"type": "text", "text": _PROBE}]):
        tokenizer.chat_template = _TEXTS_AS_PARTS + template


def written(tokenizer: "PreTrainedTokenizerBase", content: Any) -> str:
    """Return the text that a template writes of a message of a user; empty where it refuses it."""
    from jinja2 import TemplateError

    with template_in_time("a first conversation"):
        try:
            return str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
        except (TemplateError, TypeError, ValueError, OverflowError):
            return ""


def template_text(template: str) -> str:
    """Return the Jinja text that `model.chat_template` means: that of a known name, or of a file.

    Raises:
        DependencyError: The template is TRL's, and the installed TRL has none of this name.
        ModelError: The file cannot be read.
    """
    shipped = named_template(template)
    if shipped is not None:
        return shipped.text()
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        first = str(error).partition("\n")[0]
        problem = f"model.chat_template: {template!r} cannot be read: {first}"
        raise ModelError(problem, hint="set it to a Jinja file, or to a known name such as chatml") from error


def end_answers(tokenizer: "PreTrainedTokenizerBase", section: ModelSection) -> None:
    """Make the token that ends answers, by a template that the recipe names, the end token of the tokenizer.

    What generates stops at the end token alone: with another one a trained model would go on behind each answer.

    Raises:
        ModelError: The tokenizer lacks that token.
    """
    template = named_template(section.chat_template)
    if template is None:
        return
    if template.end is None:
        if tokenizer.eos_token is None:
            problem = f"model.chat_template: {template.name} ends answers with the tokenizer's end token; it has none"
            raise ModelError(problem, hint="set model.special_tokens.eos_token")
        return
    missing = missing_tokens(template, tokenizer.get_vocab())
    if template.end in missing:
        tokens = to_inline_yaml([*(section.add_special_tokens or ()), *missing])
        raise ModelError(
            f"model.chat_template: {template.name} ends answers with {template.end}, which the tokenizer of "
            f"{section.path!r} lacks: a trained model would never stop",
            hint=f"set model.add_special_tokens={tokens}",
        )
    tokenizer.add_special_tokens({"eos_token": template.end})
