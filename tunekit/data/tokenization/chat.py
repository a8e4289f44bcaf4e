"""Errors of chat templates, which come with models."""

from collections.abc import Collection

from tunekit.errors import DataError
from tunekit.recipe.chat_templates import fitting, missing_tokens, named_templates
from tunekit.recipe.reading.parse import to_inline_yaml


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
