"""Chat templates come with the model: a limit of their time, what is said where they refuse, and a first look.

Time limit of a chat template for a row: it comes with the model, and its sandbox allows endless loops.

What ends it is no `Exception`: Jinja computes what is constant in a template while it compiles it, and goes on after
any exception there. In the main thread a signal interrupts also the arithmetic of large numbers, which Python does in
C. Other threads are interrupted between two instructions of Python: a power of constants is computed to its end there.

A look at the first row of each source through the chat template, before anything heavy is loaded.

transformers renders templates with Jinja and a few names of its own. So does this, for one row, to see a refusal that
the template itself speaks out (`raise_exception`); whatever else may go wrong is left to the run, which renders every
row with transformers.
"""

import ctypes
import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.messages import tools_of, unweighted
from tunekit.data.formats.row_formats import Row
from tunekit.data.sources.load import LoadedData
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
    """What a template writes of a message; nothing where it refuses it."""
    from jinja2 import TemplateError

    try:
        with template_in_time("a first conversation"):
            return str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
    except (TemplateError, TypeError, ValueError, DataError):
        return ""


def without_template() -> DataError:
    """The error of conversations whose tokenizer has no chat template."""
    return DataError(
        "the tokenizer has no chat template to render messages",
        hint="set model.chat_template to a Jinja file, use a chat model, or use rows of prompt and completion",
    )


def refusal(error: Exception, place: str) -> DataError:
    """The error of a row that a chat template does not take."""
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return DataError(f"chat template syntax error in line {error.lineno}: {error.message}")
    problem = f"{place}: the chat template rejects the row: {error}"
    return DataError(problem, hint="change the row or model.chat_template")


_MARKER = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
"""Markers of the assistant's tokens, which transformers reads and plain Jinja does not know."""


def check_first_rows(data: LoadedData, template: str | None, tokens: Mapping[str, str]) -> None:
    """Check that the first conversation of each source has a template that takes it.

    Args:
        data: The rows.
        template: The chat template; None where the tokenizer has none.
        tokens: The tokenizer's special tokens by their names, which templates write.

    Raises:
        DataError: There is no template, or it refuses a row.
    """
    for rows in (*data.train, *data.eval):
        messages = _conversation(rows.rows[0])
        if messages is None:
            continue
        if template is None:
            raise without_template()
        _check(messages, rows.rows[0].get("tools"), rows.place(0), template, tokens)


def _conversation(row: Row) -> list[Row] | None:
    """The messages of a row, those of its prompt and its answer together; None where it is a text."""
    parts = [row[name] for name in ("messages", "prompt", "completion", "chosen") if isinstance(row.get(name), list)]
    messages = [message for part in parts for message in part]
    return unweighted(messages) or None


def _check(messages: list[Row], tools: Any, place: str, template: str, tokens: Mapping[str, str]) -> None:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    plain = _MARKER.sub(lambda found: f"{{%{found[1]} {'endif' if found[2] else 'if true'} {found[3]}%}}", template)
    asks = messages[-1].get("role") != "assistant"
    try:
        with template_in_time(place):
            environment.from_string(plain).render(
                messages=messages, tools=tools_of(tools) or None, documents=None, add_generation_prompt=asks, **tokens
            )
    except TemplateError as error:
        # A subclass is Jinja's own, as of a name that is missing here.
        if type(error) is TemplateError:
            raise refusal(error, place) from error
    except (TypeError, ValueError, OverflowError, MemoryError):
        return
