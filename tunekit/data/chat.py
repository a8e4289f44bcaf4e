"""Conversations as text, and which characters of that text the model is to learn.

A chat template turns a list of messages into one text. The loss belongs on what the assistant says, up to and with
the token that ends its turn: a model that never saw the end of a turn does not stop talking.

Two ways lead to those characters. A template can mark them itself (`{% generation %} ... {% endgeneration %}`).
Otherwise they are found by rendering the conversation twice per assistant turn: once up to the point where the
assistant is asked to speak, once with its turn; the difference is what it said. That is right only if the template
writes what came before the same way whatever follows. Many do not: Qwen3 and DeepSeek strip earlier reasoning,
Phi-3 closes the whole conversation. For the well-known ones TRL has a version with markers, which is used instead;
with any other, a row whose turns cannot be told apart is refused: guessing would put the loss on the wrong words.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tunekit.data.formats import Row
from tunekit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

_REMEDY = "name a template with {% generation %} markers in model.chat_template, or set data.loss_on=all"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the character ranges `[start, end)` that count in the loss."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatRenderer:
    """Renders conversations through the chat template of one tokenizer.

    Raises:
        DataError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if tokenizer.chat_template is None:
            raise DataError(
                "the tokenizer has no chat template, so messages cannot become text",
                hint="name a Jinja file in model.chat_template, start from a chat model, "
                "or use rows of prompt and completion",
            )
        self._tokenizer = tokenizer
        self._template: str = tokenizer.get_chat_template()
        self._added_tokens: tuple[str, ...] = tuple(tokenizer.get_added_vocab())
        self._marked = _MARKER.search(self._template) is not None

    def prepare(self, messages: Sequence[Row], place: str) -> list[str]:
        """Decide, once for all rows, how the assistant's words are found, and check the decision on one row.

        Returns:
            What the user should know about it, a sentence each.

        Raises:
            DataError: The template refuses the row, or leaves the end of an assistant turn out of the loss.
        """
        notes = []
        self.text(messages, place)
        if not self._marked and not self._can_be_told_apart():
            version = _training_version(self._tokenizer)
            if version is not None:
                self._template, self._marked = version, True
                notes.append(
                    "the model's chat template does not mark the assistant's turns; TRL's version of it for training "
                    "does and is used here, and the model keeps its own"
                )
        unended = self._check_end_of_turn(messages, place)
        return notes if unended is None else [*notes, unended]

    def text(self, messages: Sequence[Row], place: str, *, add_generation_prompt: bool = False) -> str:
        """The conversation as text, as `apply_chat_template` writes it."""
        from jinja2 import TemplateError

        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError) as error:
            raise _refusal(error, place) from error
        return cast(str, rendered)

    def render(self, messages: Sequence[Row], place: str, *, num_prompt: int = 0) -> Rendered:
        """The conversation with the ranges of its assistant turns.

        Args:
            messages: The whole conversation.
            place: Where the row stands, for messages.
            num_prompt: So many messages at the start are given; only what follows them counts.

        Raises:
            DataError: The template refuses the row, or its turns cannot be told apart in the text.
        """
        if self._marked:
            return self._by_markers(messages, place, num_prompt)
        return self._by_difference(messages, place, num_prompt)

    def _can_be_told_apart(self) -> bool:
        """Whether rendering twice finds the turns of a longer conversation, each with a token that ends it."""
        turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
        try:
            rendered = self._by_difference([{"role": r, "content": c} for r, c in turns], "a conversation", 0)
        except DataError:
            return False
        return all(rendered.text[:end].rstrip().endswith(self._added_tokens) for _, end in rendered.spans)

    def _check_end_of_turn(self, messages: Sequence[Row], place: str) -> str | None:
        """Whether the token that ends an assistant turn is in the loss: an error, a note or nothing."""
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        rendered = self.render(messages[: last + 1], place)
        end = rendered.spans[-1][1] if rendered.spans else 0
        if not rendered.spans or rendered.text[:end].rstrip().endswith(self._added_tokens):
            return None
        behind = rendered.text[end:].lstrip()
        token = max((t for t in self._added_tokens if behind.startswith(t)), key=len, default=None)
        if token is not None:
            raise DataError(
                f"the chat template's {{% generation %}} block leaves out '{token}', which ends an assistant turn: "
                "the model would not learn to stop",
                hint=f"move {{% endgeneration %}} behind '{token}' (model.chat_template), or set data.loss_on=all",
            )
        return (
            "the chat template ends an assistant turn with no special token; "
            "the model learns no sign of its own to stop"
        )

    def _by_markers(self, messages: Sequence[Row], place: str, num_prompt: int) -> Rendered:
        # apply_chat_template gives the marked tokens, not the marked characters, and goes wrong where a range begins
        # or ends on white space that belongs to no token; its renderer gives the characters.
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, ranges = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError) as error:
            raise _refusal(error, place) from error
        text: str = texts[0]
        given = 0
        if num_prompt:
            asked = self.text(messages[:num_prompt], place, add_generation_prompt=True)
            given = common_prefix_length(asked, text)
        spans = ((max(start, given), end) for start, end in ranges[0])
        return Rendered(text, tuple((start, end) for start, end in spans if start < end))

    def _by_difference(self, messages: Sequence[Row], place: str, num_prompt: int) -> Rendered:
        text = self.text(messages, place)
        spans = []
        for i, message in enumerate(messages):
            if i < num_prompt or message["role"] != "assistant":
                continue
            if i == 0:
                raise DataError(
                    f"{place}: the row begins with an assistant turn, whose start the chat template does not show",
                    hint=_REMEDY,
                )
            asked = self.text(messages[:i], place, add_generation_prompt=True)
            answered = text if i == len(messages) - 1 else self.text(messages[: i + 1], place)
            if not answered.startswith(asked) or not text.startswith(answered):
                raise DataError(
                    f"{place}: the chat template writes earlier turns differently once messages[{i}] or a later "
                    "message follows, so the assistant's words cannot be told from the rest",
                    hint=_REMEDY,
                )
            spans.append((len(asked), len(asked) + len(self._said(answered[len(asked) :]))))
        return Rendered(text, tuple(spans))

    def _said(self, turn: str) -> str:
        # What a template writes behind the end-of-turn token, mostly a line break, is never generated.
        bare = turn.rstrip()
        return bare if bare.endswith(self._added_tokens) else turn


def in_loss(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """For each token, whether it holds a character of one of the spans.

    A token that straddles the start of a span counts: its characters from there on have to be produced. Tokens
    without characters count as the one character at their place.

    Args:
        offsets: Character range of each token, in order.
        spans: Character ranges that count, in order, not overlapping.
    """
    counts = []
    k = 0
    for start, end in offsets:
        while k < len(spans) and spans[k][1] <= start:
            k += 1
        counts.append(k < len(spans) and max(end, start + 1) > spans[k][0])
    return counts


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items two sequences (characters, tokens) share at their start."""
    for i, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return i
    return min(len(first), len(second))


def _training_version(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """TRL's version of a well-known chat template, with markers; None for any other template."""
    from trl import get_training_chat_template

    try:
        return cast(str | None, get_training_chat_template(tokenizer))
    except ValueError:
        return None


def _refusal(error: Exception, place: str) -> DataError:
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return DataError(f"the chat template has an error in line {error.lineno}: {error.message}")
    return DataError(
        f"{place}: the chat template refuses the row: {error}", hint="change the row or model.chat_template"
    )


def offsets_of(encoding: Any) -> list[list[tuple[int, int]]]:
    """The character ranges of the tokens of a batch."""
    return cast(list[list[tuple[int, int]]], encoding["offset_mapping"])
