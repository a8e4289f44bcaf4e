"""Chat templates come with the model: what is said where they refuse, and a first look.

A look at the first rows of each source through the chat template, before anything heavy is loaded.

transformers renders templates with Jinja and a few names of its own. So does this, for some rows, to see a refusal that
the template itself speaks out (`raise_exception`); whatever else may go wrong is left to the run, which renders every
row with transformers.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.messages import tools_of, unweighted
from tunekit.data.formats.row_formats import Row
from tunekit.data.sources.load import LoadedData
from tunekit.errors import DataError
from tunekit.probe.chat_template import template_in_time
from tunekit.recipe.chat_templates import fitting, missing_tokens, named_templates
from tunekit.recipe.reading.parse import to_inline_yaml

if TYPE_CHECKING:
    from jinja2 import Template

NUM_CHECKED = 100
"""Rows of each source that a plan renders."""


def without_template(vocabulary: Collection[str]) -> DataError:
    """The error of conversations whose tokenizer has no chat template, with the names of those that fit its tokens."""
    names = fitting(vocabulary)
    remedy = f"set model.chat_template to one that its tokens fit, such as {', '.join(names)}"
    if not names:
        tokens = to_inline_yaml(missing_tokens(named_templates()["chatml"], vocabulary))
        remedy = f"set model.chat_template=chatml and model.add_special_tokens={tokens}"
    return DataError(
        "the tokenizer has no chat template to render messages",
        hint=f"{remedy}, set it to a Jinja file, use a chat model, or use rows of prompt and completion",
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
        DataError: There is no template, or it refuses a row.
    """
    compiled = None if template is None else _compiled(template)
    for rows in (*data.train, *data.eval):
        for index in range(min(NUM_CHECKED, len(rows))):
            row = rows.rows[index]
            messages = _conversation(row)
            if messages is None:
                continue
            if template is None:
                raise without_template(vocabulary())
            if compiled is not None:
                _check(messages, row.get("tools"), rows.place(index), compiled, tokens)


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
