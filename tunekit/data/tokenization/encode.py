"""Rows as token ids, and for each token whether it counts in the loss.

Which tokens count follows from where their characters stand in the text, never from what they are: a model whose
padding token is its end-of-sequence token still learns to end its answers.

- `messages` go through the tokenizer's chat template. The template writes every special token, so none is added:
  no text begins twice.
- `prompt` and `completion` as strings are plain text, joined as they stand, with the end-of-sequence token behind
  them; no chat template is applied. They are tokenised together, as they will be read, and the loss begins at the
  first token that the completion changes. As lists of messages they are one conversation whose prompt is given.
  Both as in TRL.
- `text` is tokenised wholly, with the end-of-sequence token behind it, and all of it counts.
- `tokens` are taken as they are.

Texts become tokens word by word where the tokenizer's words are known (`words`), otherwise through the tokenizer
itself, several times slower. Where a token stands in the text follows from the bytes that it is made of, or is asked of
the tokenizer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tunekit.data.formats.messages import unweighted
from tunekit.data.formats.row_formats import Row, counted
from tunekit.data.media.expand import MediaTokens, MediumTokens, Span
from tunekit.data.media.kinds import COLUMN, media_of
from tunekit.data.packing.sequences import IGNORED, Batch, common_prefix_length
from tunekit.data.sources.rows import Rows
from tunekit.data.tokenization.fast_bpe import word_encoder
from tunekit.data.tokenization.render import ChatRenderer, Rendered, in_loss
from tunekit.errors import DataError
from tunekit.recipe.sections.data import MediaKind

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

ROWS_LOOKED_AT = 100
"""Number of conversations that are searched for content dropped by the chat template."""


@dataclass
class Observed:
    """Observations while rows were tokenized; they add up over batches."""

    num_straddling: int = 0
    """Rows in which the end of the prompt and the start of the completion fall into one token."""
    num_looked_at: int = 0
    """Conversations that were searched for what the chat template left out."""
    left_out: Counter[str] = field(default_factory=Counter)
    """In how many of them a kind of content was missing."""
    num_media: Counter[MediaKind] = field(default_factory=Counter)
    """Media of the rows, by kind."""
    num_media_tokens: Counter[MediaKind] = field(default_factory=Counter)
    """Tokens that they take."""

    def add(self, other: "Observed") -> None:
        """Take what was seen in another batch."""
        self.num_straddling += other.num_straddling
        self.num_looked_at += other.num_looked_at
        self.left_out.update(other.left_out)
        self.num_media.update(other.num_media)
        self.num_media_tokens.update(other.num_media_tokens)

    def notes(self, source: str) -> list[str]:
        """Return notes for the user, a sentence each."""
        notes = []
        if self.num_straddling:
            notes.append(
                f"{source}: in {counted(self.num_straddling, 'row')} one token spans the end of the prompt and the "
                "start of the completion and is included in the loss; end prompts with a line break or a period"
            )
        notes += (
            f"{source}: in {number:,} of {counted(self.num_looked_at, 'row')} checked, the chat template drops {kind}; "
            "the model does not see them"
            for kind, number in sorted(self.left_out.items())
        )
        return notes


@dataclass(frozen=True)
class Encoded(Batch):
    """Rows as tokens, each a sequence, before anything is cut.

    Attributes:
        observed: What was seen on the way.
        has_media: For each row whether it has media, so that it must not be cut, bool, `(rows,)`; None where none
            has.
        pixel_values: For each row the values of the pixels of its pictures, int64, `(rows,)`; None as above.
    """

    observed: Observed
    has_media: "np.ndarray | None" = None
    pixel_values: "np.ndarray | None" = None


_Pair = tuple["np.ndarray", "np.ndarray | None"]
"""The tokens of a row, int32, and which of them count; None if all do."""


class Encoder:
    """Encodes the rows of one source with one tokenizer.

    Args:
        rows: Rows of the source, the first of them at least, with what counts in them.
        tokenizer: Tokenizer of the model, with its chat template for rows of messages.
        media: The tokens of media, for rows that have some.

    Raises:
        DataError: The first row cannot go through the chat template, or the tokenizer lacks what the format needs.
    """

    def __init__(self, rows: Rows, tokenizer: "PreTrainedTokenizerBase", media: MediaTokens | None = None) -> None:
        self._media = media if rows.media else None
        self._format = rows.format
        self._tokenizer = tokenizer
        self._words = word_encoder(tokenizer)
        self._all = rows.loss_on == "all"
        self._chat: ChatRenderer | None = None
        self._affixes: tuple[list[int], list[int]] = ([], [])
        self.notes: list[str] = []
        """Notes for the user before the rows are encoded."""
        first = rows.rows[0]
        if rows.format == "tokens":
            return
        if rows.format == "messages" or isinstance(first.get("prompt"), list):
            self._prepare_chat(first, rows.place(0), last_only=rows.loss_on == "last")
        else:
            self._prepare_plain(rows.source)

    def encode(self, rows: Rows, indices: range) -> Encoded:
        """Encode some rows of the source.

        Raises:
            DataError: A row cannot go through the chat template.
        """
        batch = [rows.rows[i] for i in indices]
        observed = Observed()
        if self._chat is not None:
            places = [rows.place(i) for i in indices]
            num_looked_at = max(0, min(ROWS_LOOKED_AT, indices.stop) - indices.start)
            pairs = self._encode_chats(self._chat, batch, places, num_looked_at, observed)
        elif self._format == "tokens":
            pairs = [self._given_tokens(row, rows.place(i)) for row, i in zip(batch, indices, strict=True)]
        elif self._format == "prompt_completion":
            pairs = self._encode_completions(batch, observed)
        else:
            pairs = [(_array(ids), None) for ids in self._encode_plain([row["text"] for row in batch])]
        encoded = _flat(pairs, observed)
        if self._media is None:
            return encoded
        import numpy as np

        values = [sum(self._media.of(medium).num_values for medium in media_of(row)) for row in batch]
        return replace(
            encoded,
            has_media=np.array([COLUMN in row for row in batch], dtype=np.bool_),
            pixel_values=np.array(values, dtype=np.int64),
        )

    def check_media(self, rows: Rows) -> None:
        """Check that the tokens of the first row with media of each kind are those of the whole processor.

        Raises:
            DataError: They are not.
        """
        if self._media is None:
            return
        firsts: dict[MediaKind, int] = {}
        for index, row in enumerate(rows.rows):
            firsts = {medium["kind"]: index for medium in row.get(COLUMN, ())} | firsts
            if len(firsts) == len(rows.media):
                break
        for first in sorted(set(firsts.values())):
            row, place = rows.rows[first], rows.place(first)
            ids = self.encode(rows, range(first, first + 1)).ids.tolist()
            self._media.check(self.text_of(row, place), media_of(row), ids, place)

    def media_of(self, rows: Rows, index: int) -> list[MediumTokens]:
        """Return the media of a row of the source with their tokens in it, before anything is cut."""
        row, place = rows.rows[index], rows.place(index)
        if self._media is None or COLUMN not in row:
            return []
        return self._media.placed(self.text_of(row, place), media_of(row), place, self._marks)

    def _marks(self, text: str, span: Span) -> Sequence[bool]:
        ((_, marks),) = self._marked([Rendered(text, (span,))])
        assert marks is not None
        listed: list[bool] = marks.tolist()
        return listed

    def text_of(self, row: Row, place: str) -> str:
        """Return a conversation as text in which each medium is the one token that its processor replaces."""
        assert self._chat is not None
        return self._chat.text(unweighted(_conversation(row)), place, tools=row.get("tools"))

    def _prepare_chat(self, first: Row, place: str, *, last_only: bool) -> None:
        self._chat = ChatRenderer(self._tokenizer, last_only=last_only, in_parts=self._media is not None)
        if self._all:
            return
        if not self._tokenizer.is_fast:
            problem = "the tokenizer reports no character offsets, needed to find the assistant's tokens"
            raise DataError(problem, hint="use a model with a tokenizer.json, or set data.loss_on=all")
        self.notes += self._chat.prepare(_conversation(first), place, tools=first.get("tools"))

    def _prepare_plain(self, source: str) -> None:
        if self._tokenizer.eos_token_id is None:
            problem = "the tokenizer has no end-of-sequence token, needed to learn where a text ends"
            raise DataError(problem, hint="set eos_token in the model's tokenizer_config.json")
        if self._format == "prompt_completion":
            note = f"{source}: prompt and completion concatenated as plain text"
            if self._tokenizer.chat_template is not None:
                note += ", without the chat template; for a chat model, use rows of messages"
            self.notes.append(note)
        self._affixes = _affixes(self._tokenizer)

    def _encode_chats(
        self, chat: ChatRenderer, rows: list[Row], places: list[str], num_looked_at: int, observed: Observed
    ) -> "list[_Pair]":
        rendered = []
        for number, (row, place) in enumerate(zip(rows, places, strict=True)):
            messages, tools, num_prompt = _conversation(row), row.get("tools"), len(row.get("prompt", ()))
            if self._all:
                r = Rendered(chat.text(messages, place, tools=tools), ())
            else:
                r = chat.render(messages, place, num_prompt=num_prompt, tools=tools)
            chat.check_calls(messages, place, r, num_prompt=num_prompt, tools=tools)
            if number < num_looked_at:
                observed.num_looked_at += 1
                observed.left_out.update(chat.left_out(messages, place, tools, r.text))
            if self._media is not None:
                media = media_of(row)
                spans = ((0, len(r.text)),) if self._all else r.spans
                text, spans = self._media.expand(r.text, spans, media, place)
                r = Rendered(text, spans)
                for medium in media:
                    observed.num_media[medium.kind] += 1
                    observed.num_media_tokens[medium.kind] += self._media.of(medium).num_tokens
            rendered.append(r)
        if self._all and self._media is None:
            return [(_array(ids), None) for ids in self._ids([r.text for r in rendered])]
        return self._marked(rendered)

    def _marked(self, rendered: list[Rendered]) -> "list[_Pair]":
        """Tokens of texts, and which of them lie in the texts' spans."""
        import numpy as np

        encoded = [self._marked_by_words(r) for r in rendered]
        remaining = [i for i, pair in enumerate(encoded) if pair is None]
        if remaining:
            encoding = self._tokenizer(
                [rendered[i].text for i in remaining],
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
            for i, ids, offsets in zip(remaining, encoding["input_ids"], encoding["offset_mapping"], strict=True):
                encoded[i] = _array(ids), np.array(in_loss(offsets, rendered[i].spans), dtype=np.bool_)
        return [pair for pair in encoded if pair is not None]

    def _marked_by_words(self, rendered: Rendered) -> "_Pair | None":
        import numpy as np

        if self._words is None or (encoded := self._words.encode(rendered.text)) is None:
            return None
        ids = _array(encoded)
        ends = np.cumsum(self._words.byte_lengths[ids])
        spans, num_bytes = _in_bytes(rendered)
        # Word for word the tokens make up the text; anything else would put the marks on other words.
        assert (ends[-1] if encoded else 0) == num_bytes
        marks = np.zeros(len(ids), dtype=np.bool_)
        first = np.searchsorted(ends, [start for start, _ in spans], side="right")
        last = np.searchsorted(ends, [end for _, end in spans], side="left")
        for start, end in zip(first.tolist(), last.tolist(), strict=True):
            marks[start : end + 1] = True
        return ids, marks

    def _encode_completions(self, rows: list[Row], observed: Observed) -> "list[_Pair]":
        import numpy as np

        # A prompt does not end where some tokenizers end every text.
        beginning = self._affixes[0]
        prompts = [beginning + ids for ids in self._ids([row["prompt"] for row in rows])]
        wholes = self._encode_plain([row["prompt"] + row["completion"] for row in rows])
        pairs: list[_Pair] = []
        for prompt, whole in zip(prompts, wholes, strict=True):
            prompt = self._single_bos(prompt)
            num_given = common_prefix_length(prompt, whole)
            observed.num_straddling += num_given < len(prompt)
            pairs.append((_array(whole), None if self._all else np.arange(len(whole)) >= num_given))
        return pairs

    def _given_tokens(self, row: Row, place: str) -> "_Pair":
        """The tokens that a row brings along."""
        largest = max(row["input_ids"])
        if largest >= len(self._tokenizer):
            problem = f"{place}: input_ids contain {largest}, but the tokenizer has {len(self._tokenizer):,} tokens"
            raise DataError(problem, hint="tokenize the rows with the tokenizer of the model")
        return _array(row["input_ids"]), None if self._all else _array(row["labels"]) != IGNORED

    def _encode_plain(self, texts: list[str]) -> list[list[int]]:
        """Texts as a model reads them: with the tokenizer's own first token, if it has one, and one end token."""
        beginning, end = self._affixes
        eos = self._tokenizer.eos_token_id
        encoded = []
        for ids in self._ids(texts):
            whole = self._single_bos(beginning + ids) + end
            encoded.append(whole if whole[-1:] == [eos] else [*whole, eos])
        return encoded

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts as they stand, no special token added."""
        encoded = [None if self._words is None else self._words.encode(text) for text in texts]
        remaining = [i for i, ids in enumerate(encoded) if ids is None]
        if remaining:
            encoding = self._tokenizer(
                [texts[i] for i in remaining], add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            for i, ids in zip(remaining, encoding["input_ids"], strict=True):
                encoded[i] = ids
        return [ids for ids in encoded if ids is not None]

    def _single_bos(self, ids: list[int]) -> list[int]:
        # A text that spells the first token itself would otherwise begin with two of them.
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def _affixes(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and behind a text."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a", add_special_tokens=True)["input_ids"]
    start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def _in_bytes(rendered: Rendered) -> tuple[Sequence[tuple[int, int]], int]:
    """The spans of a text as ranges of its bytes in UTF-8, and how many bytes it has."""
    text = rendered.text
    if text.isascii():
        return rendered.spans, len(text)
    spans, num_bytes, position = [], 0, 0
    for start, end in rendered.spans:
        begin = num_bytes + len(text[position:start].encode())
        num_bytes, position = begin + len(text[start:end].encode()), end
        spans.append((begin, num_bytes))
    return spans, num_bytes + len(text[position:].encode())


def _array(ids: list[int]) -> "np.ndarray":
    import numpy as np

    return np.fromiter(ids, dtype=np.int32, count=len(ids))


def _flat(pairs: "Sequence[_Pair]", observed: Observed) -> Encoded:
    """Rows as flat arrays."""
    import numpy as np

    lengths = np.array([len(ids) for ids, _ in pairs], dtype=np.int32)
    marks = [np.ones(len(ids), dtype=np.bool_) if mark is None else mark for ids, mark in pairs]
    return Encoded(np.concatenate([ids for ids, _ in pairs]), np.concatenate(marks), lengths, observed)


def _conversation(row: Row) -> list[Row]:
    """The whole conversation of a row of messages, or of a prompt and a completion made of messages."""
    whole: list[Row] = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
    return whole
