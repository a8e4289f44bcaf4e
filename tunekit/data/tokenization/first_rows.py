"""The first rows of each source through the chat template, before anything heavy is loaded.

transformers renders templates with Jinja and a few names of its own. So does this, for some rows, to see a refusal that
the template itself speaks out (`raise_exception`), an assistant turn that cannot be located in the text, or a tool call
that the template drops. Whatever else may go wrong is left to the run, which renders every row with transformers.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tunekit.data.formats.messages import tools_of, unweighted
from tunekit.data.formats.row_formats import Row
from tunekit.data.sources.load import LoadedData
from tunekit.data.sources.rows import Rows
from tunekit.data.tokenization.chat import refusal, without_template
from tunekit.data.tokenization.render import ChatRenderer
from tunekit.errors import DataError
from tunekit.probe.chat_template import template_in_time

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

NUM_CHECKED = 100
"""Rows of each source that a plan renders."""

_MASKED = ("messages", "prompt_completion")
"""Formats in whose conversations the assistant's tokens are located."""

_MARKER = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
"""Markers of the assistant's tokens, which transformers reads and plain Jinja does not know."""


def check_first_rows(
    data: LoadedData, template: str | None, tokens: Mapping[str, str], vocabulary: Callable[[], Collection[str]]
) -> None:
    """Check that the first conversations of each source have a template that takes them.

    Args:
        data: The rows.
        template: The chat template; None where the tokenizer has none.
        tokens: The tokenizer's special tokens by their names, which templates write.
        vocabulary: Returns its tokens, which decide about the templates that fit it.

    Raises:
        DataError: There is no template, it refuses a row, or the assistant's turns are not in its text.
    """
    compiled = None if template is None else _compiled(template)
    for rows in (*data.train, *data.eval):
        renderer = None if compiled is None else _renderer(rows, cast(str, template), compiled, tokens)
        for index in range(min(NUM_CHECKED, len(rows))):
            row = rows.rows[index]
            messages = _conversation(row)
            if messages is None:
                continue
            if template is None:
                raise without_template(vocabulary())
            if compiled is not None:
                _check(messages, row.get("tools"), rows.place(index), compiled, tokens)
            if renderer is not None:
                _check_located(renderer, row, rows.place(index))


def _conversation(row: Row) -> list[Row] | None:
    """The messages of a row, those of its prompt and its answer together; None where it is a text."""
    parts = [row[name] for name in ("messages", "prompt", "completion", "chosen") if isinstance(row.get(name), list)]
    messages = [message for part in parts for message in part]
    return unweighted(messages) or None


def _compiled(template: str) -> "Template | None":
    """Return a template as transformers compiles it; None of one that Jinja cannot read, which is left to the run."""
    from jinja2 import FunctionLoader, TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], loader=FunctionLoader(lambda _: None)
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    plain = _MARKER.sub(lambda found: f"{{%{found[1]} {'endif' if found[2] else 'if true'} {found[3]}%}}", template)
    try:
        return environment.from_string(plain)
    except TemplateError:
        return None


def _check(messages: list[Row], tools: Any, place: str, template: "Template", tokens: Mapping[str, str]) -> None:
    """Refuse a conversation that a template does not take."""
    from jinja2 import TemplateError, TemplateNotFound

    asks = messages[-1].get("role") != "assistant"
    with template_in_time(place):
        try:
            template.render(
                messages=messages, tools=tools_of(tools) or None, documents=None, add_generation_prompt=asks, **tokens
            )
        except TemplateNotFound as error:
            problem = f"{place}: the chat template reads another file, {error.name!r}"
            raise DataError(problem, hint="write its text into the template") from error
        except TemplateError as error:
            # A subclass is Jinja's own, as of a name that is missing here.
            if type(error) is TemplateError:
                raise refusal(error, place) from error
        except (TypeError, ValueError, OverflowError):
            return


class _LeftToRun(Exception):
    """Plain Jinja cannot render a conversation; transformers may."""


class _Tokenizer:
    """The part of a tokenizer that renders conversations, without transformers."""

    def __init__(self, chat_template: str, compiled: "Template", tokens: Mapping[str, str]) -> None:
        self.chat_template = chat_template
        self._compiled = compiled
        self._tokens = tokens

    def get_chat_template(self) -> str:
        """Return the template's text."""
        return self.chat_template

    def get_added_vocab(self) -> list[str]:
        """Return the special tokens."""
        return [token for token in self._tokens.values() if token]

    def apply_chat_template(self, messages: list[Row], *, tools: Any, add_generation_prompt: bool, **_: Any) -> str:
        """Return a conversation as text."""
        from jinja2 import TemplateError

        try:
            return self._compiled.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except (TemplateError, TypeError, ValueError, OverflowError) as error:
            raise _LeftToRun from error


def _renderer(rows: Rows, text: str, compiled: "Template", tokens: Mapping[str, str]) -> ChatRenderer | None:
    """Return a renderer that locates turns as the run will; None where the run takes markers, or masks nothing."""
    if rows.format not in _MASKED or rows.loss_on == "all" or rows.media or _MARKER.search(text):
        return None
    tokenizer = cast("PreTrainedTokenizerBase", _Tokenizer(text, compiled, tokens))
    renderer = ChatRenderer(tokenizer, last_only=rows.loss_on == "last")
    with suppress(_LeftToRun):
        return None if not renderer.locates_turns() and _has_training_version(text) else renderer
    return None


def _has_training_version(text: str) -> bool:
    """Return whether TRL has a version of a chat template with markers; it knows templates by their text."""
    spec = find_spec("trl")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    files = (file for folder in folders for file in (Path(folder) / "chat_templates").glob("*.jinja"))
    return any(file.read_text(encoding="utf-8") == text for file in files)


def _check_located(renderer: ChatRenderer, row: Row, place: str) -> None:
    """Refuse a conversation whose assistant turns cannot be located in its text, or lack their tool calls."""
    messages: list[Row] = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
    num_prompt, tools = len(row.get("prompt", ())), row.get("tools")
    with suppress(_LeftToRun):
        rendered = renderer.render(messages, place, num_prompt=num_prompt, tools=tools)
        renderer.check_calls(messages, place, rendered, num_prompt=num_prompt, tools=tools)
