"""Conversations as text, and which characters of that text the model is to learn.

A chat template turns a list of messages into one text. The loss belongs on what the assistant says, up to and with
the token that ends its turn: a model that never saw the end of a turn does not stop talking.

Two ways lead to those characters. A template can mark them itself (`{% generation %} ... {% endgeneration %}`).
Otherwise they are found by rendering twice per assistant turn: once up to the point where the assistant is asked to
speak, once with its turn; the difference is what it said. Rendering all that came before each time would take time
in the square of the turns, so a turn is rendered behind a lead of two messages instead, which gives its piece of the
text. That is believed only where it is proved for the row at hand: the pieces, one behind the other, are the
rendering of the whole conversation, character for character. Where they are not, everything before the turn is
rendered after all, and the row is refused unless each of these beginnings is a beginning of the whole.

A turn with `weight: 0`, as OpenAI writes it, is read and not learned; `weights` makes it of other tools' marks.
Templates never see the weight.

Many templates write what came before differently once more follows: Qwen3 and DeepSeek strip earlier reasoning,
Phi-3 closes the whole conversation. For the well-known ones TRL has a version with markers, which is used instead;
with any other, a row whose turns cannot be told apart is refused: guessing would put the loss on the wrong words.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tunekit.data.formats.messages import check_calls_written, function_names, unweighted
from tunekit.data.formats.row_formats import Row
from tunekit.data.media.in_rows import ANY_MARK, as_parts
from tunekit.data.packing.sequences import common_prefix_length
from tunekit.data.tokenization.chat import refusal, without_template
from tunekit.errors import DataError
from tunekit.probe.chat_template import template_in_time

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Row]
Tools = list[Row] | None
"""Functions that the assistant may call, as JSON schemas."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

_LEAD: tuple[Row, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
"""Message put before a later turn that is rendered alone, so that it is not the first."""

_PROBES: tuple[tuple[Row, ...], ...] = (
    (*_LEAD, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}),
    (
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "0", "type": "function", "function": {"name": "b", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "0", "name": "b", "content": "c"},
        {"role": "assistant", "content": "d"},
    ),
)
"""Conversations that show what a template writes before the assistant speaks, behind a question and behind a tool."""

_FEW_TURNS = 2
"""Number of turns up to which rendering whole prefixes is cheaper than rendering behind a lead."""

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

_REMEDY = "set model.chat_template to a template with {% generation %} markers, or set data.loss_on=all"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the character ranges `[start, end)` that count in the loss."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatRenderer:
    """Renders conversations through the chat template of one tokenizer.

    Args:
        tokenizer: The tokenizer, with its chat template.
        last_only: Only the last assistant turn of a conversation counts.
        in_parts: Contents are passed to the template as parts, since texts have marks of media.

    Raises:
        DataError: The tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, last_only: bool = False, in_parts: bool = False
    ) -> None:
        if tokenizer.chat_template is None:
            raise without_template(tokenizer.get_vocab())
        self._tokenizer = tokenizer
        self._last_only = last_only
        self._in_parts = in_parts
        self._template: str = tokenizer.get_chat_template()
        self._added_tokens: tuple[str, ...] = tuple(tokenizer.get_added_vocab())
        self._marked = _MARKER.search(self._template) is not None
        self._lead_text: str | None = None
        self._given_heads: tuple[str, ...] | None = None

    def prepare(self, messages: Messages, place: str, *, tools: Tools = None) -> list[str]:
        """Decide, once for all rows, how the assistant's words are found, and check the decision on one row.

        Returns:
            What the user should know about it, a sentence each.

        Raises:
            DataError: The template refuses the row, or leaves the end of an assistant turn out of the loss.
        """
        notes = []
        if not self._marked and not self.locates_turns():
            version = _training_version(self._tokenizer)
            if version is not None and self._writes_alike(version, messages, place, tools):
                self._template, self._marked = version, True
                notes.append(
                    "the chat template has no {% generation %} markers; TRL's training version of it is used to mask "
                    "the loss, the model keeps its own"
                )
        messages = unweighted(messages)
        self.text(messages, place, tools=tools)
        unended = self._check_end_of_turn(messages, place, tools)
        return notes if unended is None else [*notes, unended]

    def text(self, messages: Messages, place: str, *, tools: Tools = None, add_generation_prompt: bool = False) -> str:
        """The conversation as text, as `apply_chat_template` writes it.

        Raises:
            DataError: The template refuses the row, or a turn of it has the weight 0, which a text cannot show.
        """
        weightless = next((i for i, message in enumerate(messages) if message.get("weight") == 0), None)
        if weightless is not None:
            raise DataError(
                f"{place}: messages[{weightless}] has weight 0, but data.loss_on=all includes every token in the loss",
                hint="set data.loss_on=assistant, or remove the weights from the rows",
            )
        with _rendering(place):
            rendered = self._tokenizer.apply_chat_template(
                self._for_template(unweighted(messages)),
                tools=cast(Any, tools),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        return cast(str, rendered)

    def render(self, messages: Messages, place: str, *, num_prompt: int = 0, tools: Tools = None) -> Rendered:
        """The conversation with the ranges of its assistant turns.

        Args:
            messages: The whole conversation.
            place: Where the row stands, for messages.
            num_prompt: So many messages at the start are given; only what follows them counts.
            tools: The functions that the assistant may call, as JSON schemas.

        Raises:
            DataError: The template refuses the row, its turns cannot be told apart in the text, or only its last turn
                may count and has the weight 0.
        """
        spoken = _spoken(messages)
        weightless = {i for i in spoken if messages[i].get("weight") == 0}
        if self._last_only:
            num_prompt = max(num_prompt, spoken[-1])
            if spoken[-1] in weightless:
                problem = f"{place}: messages[{spoken[-1]}] has weight 0, but data.loss_on=last includes no other turn"
                raise DataError(problem, hint="set data.loss_on=assistant, or remove the row")
        turns = [i for i in spoken if i >= num_prompt and i not in weightless]
        messages = unweighted(messages)
        if self._marked:
            return self._by_markers(messages, place, num_prompt, tools, weightless)
        text = self.text(messages, place, tools=tools)
        spans = None
        if len(turns) > _FEW_TURNS:
            with suppress(DataError):  # a template can take a conversation, but not every part of it
                spans = self._by_windows(messages, place, turns, tools, text)
        if spans is None:
            spans = self._by_prefixes(messages, place, turns, tools, text)
        return Rendered(text, tuple(spans))

    def check_calls(
        self, messages: Messages, place: str, rendered: Rendered, *, num_prompt: int = 0, tools: Tools
    ) -> None:
        """Check that the calls of the turns that count are in a conversation's text.

        Args:
            messages: The whole conversation.
            place: Where the row stands, for messages.
            rendered: Its text; where it has no ranges, all of it counts.
            num_prompt: So many messages at the start are given.
            tools: The functions that the assistant may call.

        Raises:
            DataError: The chat template leaves out a call.
        """
        spoken = _spoken(messages)
        turns = [i for i in spoken[-1:] if self._last_only] or spoken
        check_calls_written(
            messages,
            [i for i in turns if i >= num_prompt and messages[i].get("weight") != 0],
            place,
            lambda renamed: self.text(unweighted(renamed), place, tools=tools),
            said="".join(rendered.text[start:end] for start, end in rendered.spans),
            remedy="or set weight: 0 on the message" if rendered.spans else "or remove the row",
        )

    def left_out(self, messages: Messages, place: str, tools: Tools, text: str) -> set[str]:
        """Return the kinds of content of a conversation that its text lacks: `system messages`, `reasoning`, `tools`.

        A word that the template writes elsewhere hides a lost one, so this can miss a loss, but invents none of what
        is written as it stands or as JSON.
        """
        kinds = {
            kind
            for message in messages
            for kind, part in _parts(message)
            if part not in text and json.dumps(part, ensure_ascii=False)[1:-1] not in text
        }
        with suppress(DataError):  # a template need not take the conversation without its tools
            if tools and self.text(unweighted(messages), place) == text:
                kinds.add("tools")
        return kinds

    def _for_template(self, messages: Messages) -> list[Row]:
        return as_parts(messages) if self._in_parts else list(messages)

    def _writes_alike(self, version: str, messages: Messages, place: str, tools: Tools) -> bool:
        """Return whether another template writes a conversation with media as the model's own does."""
        if not self._in_parts:
            return True
        own, text = self._template, self.text(unweighted(messages), place, tools=tools)
        self._template = version
        try:
            return self.text(unweighted(messages), place, tools=tools) == text
        except DataError:
            return False
        finally:
            self._template = own

    def locates_turns(self) -> bool:
        """Return whether rendering twice locates the turns of a longer conversation, each with an end-of-turn token."""
        try:
            rendered = self.render(_PROBES[0], "a conversation")
        except DataError:
            return False
        return all(rendered.text[:end].rstrip().endswith(self._added_tokens) for _, end in rendered.spans)

    def _check_end_of_turn(self, messages: Messages, place: str, tools: Tools) -> str | None:
        """Check that the end-of-turn token of an assistant turn is in the loss; return an error, a note or nothing."""
        rendered = self.render(messages[: _spoken(messages)[-1] + 1], place, tools=tools)
        end = rendered.spans[-1][1] if rendered.spans else 0
        if not rendered.spans or rendered.text[:end].rstrip().endswith(self._added_tokens):
            return None
        behind = rendered.text[end:].lstrip()
        token = max((t for t in self._added_tokens if behind.startswith(t)), key=len, default=None)
        if token is not None:
            raise DataError(
                f"the chat template's {{% generation %}} block excludes '{token}', the end of an assistant turn; "
                "the model would not learn to stop",
                hint=f"move {{% endgeneration %}} after '{token}' (model.chat_template), or set data.loss_on=all",
            )
        return "the chat template ends assistant turns without a special token; the model learns no end-of-turn token"

    def _by_markers(
        self, messages: Messages, place: str, num_prompt: int, tools: Tools, weightless: set[int]
    ) -> Rendered:
        text, spans = self._marked_spans(messages, place, tools)
        if weightless:
            turns = _spoken(messages)
            if len(spans) != len(turns):
                raise DataError(
                    f"{place}: the chat template marks {len(spans)} spans for {len(turns)} assistant turns, so "
                    "turns with weight 0 cannot be located",
                    hint="remove the weights from the row, or set another model.chat_template",
                )
            spans = [span for i, span in zip(turns, spans, strict=True) if i not in weightless]
        spans = [(self._without_head(text, start, end), end) for start, end in spans]
        offset = 0
        if num_prompt:
            prompt_text, earlier = self._marked_spans(messages[:num_prompt], place, tools, add_generation_prompt=True)
            offset = common_prefix_length(prompt_text, text)
            if earlier and offset < earlier[-1][1]:
                raise _rewritten(place, num_prompt)
        inside = ((max(start, offset), end) for start, end in spans)
        return Rendered(text, tuple((start, end) for start, end in inside if start < end))

    def _without_head(self, text: str, start: int, end: int) -> int:
        """Return the start of a marked passage behind the generation prompt that the template writes itself."""
        if self._given_heads is None:
            self._given_heads = tuple({head for probe in _PROBES for head in self._heads_in(probe)})
        head_length = max((len(head) for head in self._given_heads if text.startswith(head, start, end)), default=0)
        return start + head_length

    def _heads_in(self, messages: Messages) -> Iterator[str]:
        """The special tokens at the start of marked passages that a generation prompt ends in.

        TRL's template for DeepSeek marks `<｜Assistant｜>` and `<｜tool▁outputs▁end｜>` with the answer; both stand
        there before the model begins to write.
        """
        turns = _spoken(messages)
        with suppress(DataError):  # a template need not know tools
            text, spans = self._marked_spans(messages, "a conversation", None)
            if len(spans) != len(turns):
                return
            for (start, end), turn in zip(spans, turns, strict=True):
                prompt_text, _ = self._marked_spans(messages[:turn], "a conversation", None, add_generation_prompt=True)
                shared = text[start : min(end, common_prefix_length(prompt_text, text))]
                head = _leading(shared, self._added_tokens)
                if head and any(token.startswith(shared[len(head) :]) for token in self._added_tokens):
                    yield head

    def _marked_spans(
        self, messages: Messages, place: str, tools: Tools, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        # apply_chat_template gives the marked tokens, not the marked characters, and goes wrong where a range begins
        # or ends on white space that belongs to no token; its renderer gives the characters.
        from transformers.utils.chat_template_utils import render_jinja_template

        with _rendering(place):
            texts, ranges = render_jinja_template(
                conversations=[self._for_template(messages)],
                tools=cast(Any, tools),
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=add_generation_prompt,
                **self._tokenizer.special_tokens_map,
            )
        return texts[0], ranges[0]

    def _by_windows(
        self, messages: Messages, place: str, turns: Sequence[int], tools: Tools, text: str
    ) -> list[tuple[int, int]] | None:
        """The ranges of turns from short renderings; None where their pieces are not proved to make up the text."""
        spans = []
        length = 0
        begin = 0
        for i in _spoken(messages):
            pieces = self._pieces(messages, place, begin, i, tools if begin == 0 else None)
            if pieces is None or not text.startswith("".join(pieces), length):
                return None
            prompt_text, answer = pieces
            length += len(prompt_text)
            if i in turns:
                spans.append((length, length + len(self._said(answer))))
            length += len(answer)
            begin = i + 1
        tail = self._rest(messages, place, begin)
        return spans if tail is not None and text[length:] == tail else None

    def _pieces(self, messages: Messages, place: str, begin: int, turn: int, tools: Tools) -> tuple[str, str] | None:
        """Return what `messages[begin:turn + 1]` add to a conversation: the text up to the assistant's turn, and the
        turn.
        """
        lead = _lead(messages, begin)
        window = [*lead, *messages[begin : turn + 1]]
        if len(window) == 1:
            return None
        before = self._before(lead, place)
        prompt_text = self.text(window[:-1], place, tools=tools, add_generation_prompt=True)
        answered = self.text(window, place, tools=tools)
        if not answered.startswith(prompt_text) or not prompt_text.startswith(before):
            return None
        return prompt_text[len(before) :], answered[len(prompt_text) :]

    def _rest(self, messages: Messages, place: str, begin: int) -> str | None:
        """Return what the messages behind the last assistant turn add to a conversation."""
        if begin == len(messages):
            return ""
        lead = _lead(messages, begin)
        before, whole = self._before(lead, place), self.text([*lead, *messages[begin:]], place)
        return whole[len(before) :] if whole.startswith(before) else None

    def _before(self, lead: list[Row], place: str) -> str:
        if not lead:
            return ""
        if lead != list(_LEAD):
            return self.text(lead, place)
        if self._lead_text is None:
            self._lead_text = self.text(lead, place)
        return self._lead_text

    def _by_prefixes(
        self, messages: Messages, place: str, turns: Sequence[int], tools: Tools, text: str
    ) -> list[tuple[int, int]]:
        """The ranges from the renderings of all that came before each of the turns."""
        spans = []
        for i in turns:
            if i == 0:
                problem = f"{place}: the row begins with an assistant turn whose start the rendered text does not show"
                raise DataError(problem, hint=_REMEDY)
            prompt_text = self.text(messages[:i], place, tools=tools, add_generation_prompt=True)
            answered = text if i == len(messages) - 1 else self.text(messages[: i + 1], place, tools=tools)
            if not answered.startswith(prompt_text) or not text.startswith(answered):
                raise _rewritten(place, i, is_last=i == max(turns))
            spans.append((len(prompt_text), len(prompt_text) + len(self._said(answered[len(prompt_text) :]))))
        return spans

    def _said(self, turn: str) -> str:
        # What a template writes behind the end-of-turn token, mostly a line break, is never generated.
        bare = turn.rstrip()
        return bare if bare.endswith(self._added_tokens) else turn


@contextmanager
def _rendering(place: str) -> Iterator[None]:
    """Within it a template that takes too long is ended, and its refusal of a row is a DataError."""
    from jinja2 import TemplateError

    with template_in_time(place):
        try:
            yield
        except (TemplateError, TypeError, OverflowError) as error:
            raise refusal(error, place) from error


def _spoken(messages: Messages) -> list[int]:
    """The turns of the assistant."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _leading(text: str, tokens: Sequence[str]) -> str:
    """The special tokens that a text begins with."""
    length = 0
    while following := max((token for token in tokens if text.startswith(token, length)), key=len, default=""):
        length += len(following)
    return text[:length]


def _parts(message: Row) -> Iterator[tuple[str, str]]:
    role = message["role"]
    reasoning, _, answer = (
        message["content"].rpartition("</think>") if role == "assistant" else ("", "", message["content"])
    )
    for words in re.split(ANY_MARK, answer):
        yield f"{role} messages", words.strip()
    yield "reasoning", reasoning.strip().removeprefix("<think>").strip()
    for key in _REASONING_KEYS:
        if isinstance(message.get(key), str):
            yield "reasoning", message[key].strip()
    for name in function_names(message):
        yield "tool calls", name


def _lead(messages: Messages, begin: int) -> list[Row]:
    """Return the messages to put before `messages[begin]`, which follows an assistant turn, to render it alone."""
    if begin == 0:
        return []
    # A tool answers the call before it, and the template may look back at that.
    return list(_LEAD) if messages[begin]["role"] == "user" else [_LEAD[0], messages[begin - 1]]


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


def _training_version(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """TRL's version of a well-known chat template, with markers; None for any other template."""
    from trl import get_training_chat_template

    try:
        # It tries what the template does with tools.
        with template_in_time("a first conversation"):
            return cast(str | None, get_training_chat_template(tokenizer))
    except ValueError:
        return None


def _rewritten(place: str, index: int, *, is_last: bool = True) -> DataError:
    return DataError(
        f"{place}: the chat template renders earlier turns differently once messages[{index}] or a later message "
        "follows, so the assistant's tokens cannot be located",
        hint=_REMEDY if is_last else f"{_REMEDY} or last",
    )
