"""Rows as token ids with labels, and an account of what became of them.

A label is the token itself where it counts in the loss and -100 where it does not. Which tokens count follows from
where their characters stand in the text, never from what they are: a model whose padding token is its
end-of-sequence token still learns to end its answers.

- `messages` go through the tokenizer's chat template. The template writes every special token, so none is added:
  no text begins twice.
- `prompt` and `completion` as strings are plain text, joined as they stand, with the end-of-sequence token behind
  them; no chat template is applied. They are tokenised together, as they will be read, and the loss begins at the
  first token that the completion changes. As lists of messages they are one conversation whose prompt is given.
  Both as in TRL.
- `text` is tokenised wholly, with the end-of-sequence token behind it, and all of it counts. Where it is longer than
  `max_length` it goes on in the next sequence; a sequence begins with the last token of the one before, so that
  every token is predicted exactly once.

Conversations and completions longer than `max_length` are cut at the end. Nothing stands before the first token of
a sequence to predict it from, so it never counts, and packed behind another sequence it must not. A sequence in
which no token counts teaches nothing; it is dropped, and counted.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tunekit.data.chat import ChatRenderer, common_prefix_length, in_loss, offsets_of
from tunekit.data.formats import Row, counted
from tunekit.data.rows import Rows
from tunekit.errors import DataError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Label of a token that does not count in the loss (PyTorch's `ignore_index`)."""

LossOn = Literal["assistant", "last", "all"]
"""Which tokens of a conversation count in the loss."""

_BATCH_ROWS = 500

_ROWS_LOOKED_AT = 100
"""So many conversations are searched for what the chat template left out."""


@dataclass(frozen=True)
class TokenReport:
    """What became of the rows of one source.

    Attributes:
        num_rows: Rows read.
        num_sequences: Sequences made of them.
        num_truncated: Rows cut at `max_length`.
        num_split: Texts that were longer than `max_length` and became several sequences.
        num_dropped: Rows left out because no token of theirs would count in the loss.
        num_tokens: Tokens of all sequences.
        num_trainable_tokens: Those that count in the loss.
        longest_tokens: Tokens of the longest row before it was cut.
        notes: What the user should know about how the rows were read, a sentence each.
    """

    num_rows: int
    num_sequences: int
    num_truncated: int
    num_split: int
    num_dropped: int
    num_tokens: int
    num_trainable_tokens: int
    longest_tokens: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Tokenised:
    """Sequences ready to train on.

    Attributes:
        dataset: Columns `input_ids` and `labels`, lists of the same length per sequence.
        report: What became of the rows.
    """

    dataset: "datasets.Dataset"
    report: TokenReport


@dataclass(frozen=True)
class _Encoded:
    """A row as tokens, before it is cut: token ids, and for each whether it counts."""

    ids: list[int]
    counts: list[bool]


def tokenize(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    loss_on: LossOn,
) -> Tokenised:
    """Turn rows into token ids and labels.

    Args:
        rows: Valid rows of one source.
        tokenizer: Tokenizer of the model, with its chat template for rows of messages.
        max_length: Longest sequence, in tokens.
        loss_on: Whether the assistant's turns and completions count, only its last turn, or every token.

    Raises:
        DataError: A row cannot go through the chat template, the tokenizer lacks what the format needs, or no token
            at all would count in the loss.
    """
    encoder = _Encoder(rows, tokenizer, loss_on)
    builder = _Builder(max_length, splits=rows.format == "text")
    for start in range(0, len(rows), _BATCH_ROWS):
        for encoded in encoder.encode(range(start, min(start + _BATCH_ROWS, len(rows)))):
            builder.add(encoded)
        builder.flush()
    if builder.num_trainable_tokens == 0:
        raise _nothing_to_learn(rows, builder, max_length)
    return Tokenised(dataset=builder.dataset(), report=builder.report(encoder.notes()))


class _Encoder:
    """Encodes rows of one format with one tokenizer."""

    def __init__(self, rows: Rows, tokenizer: "PreTrainedTokenizerBase", loss_on: LossOn) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._all = loss_on == "all"
        self._last_only = loss_on == "last"
        self._chat: ChatRenderer | None = None
        self._notes: list[str] = []
        self._num_straddling = 0
        self._num_looked_at = 0
        self._num_left_out: Counter[str] = Counter()
        self._ends_by_itself = False
        first = rows.rows[0]
        if rows.format == "messages" or isinstance(first.get("prompt"), list):
            self._prepare_chat(first)
        else:
            self._prepare_plain()

    def encode(self, indices: range) -> Iterator[_Encoded]:
        """Encode some rows; in batches, because fast tokenizers use all cores for a batch."""
        rows = [self._rows.rows[i] for i in indices]
        places = [self._rows.place(i) for i in indices]
        if self._chat is not None:
            return self._encode_chats(self._chat, rows, places)
        if self._rows.format == "prompt_completion":
            return self._encode_completions(rows)
        return (_Encoded(ids, [True] * len(ids)) for ids in self._encode_plain([row["text"] for row in rows]))

    def notes(self) -> tuple[str, ...]:
        """What the user should know, after all rows were encoded."""
        notes = list(self._notes)
        if self._num_straddling:
            notes.append(
                f"{self._rows.source}: in {counted(self._num_straddling, 'row')} the end of the prompt and the start "
                "of the completion fall into one token, which counts in the loss; end prompts on a line break or a "
                "full stop"
            )
        notes += (
            f"{self._rows.source}: in {number:,} of {counted(self._num_looked_at, 'row')} looked at, the chat "
            f"template leaves out {kind}, which the model never reads"
            for kind, number in sorted(self._num_left_out.items())
        )
        return tuple(notes)

    def _prepare_chat(self, first: Row) -> None:
        self._chat = ChatRenderer(self._tokenizer, last_only=self._last_only)
        if self._all:
            return
        if not self._tokenizer.is_fast:
            raise DataError(
                "the tokenizer does not tell which characters a token stands for, so the assistant's words cannot "
                "be found among the tokens",
                hint="use a model with a tokenizer.json, or set data.loss_on=all",
            )
        self._notes += self._chat.prepare(_conversation(first), self._rows.place(0), tools=first.get("tools"))

    def _prepare_plain(self) -> None:
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so the model cannot learn where a text ends",
                hint="set eos_token in the model's tokenizer_config.json",
            )
        # Some tokenizers end every text with the end token; a prompt does not end there.
        self._ends_by_itself = self._ids(["a"], add_special_tokens=True)[0][-1] == self._tokenizer.eos_token_id
        if self._rows.format == "prompt_completion":
            note = f"{self._rows.source}: prompt and completion are joined as plain text"
            if self._tokenizer.chat_template is not None:
                note += ", without the model's chat template; for a chat model, write rows of messages"
            self._notes.append(note)

    def _encode_chats(self, chat: ChatRenderer, rows: list[Row], places: list[str]) -> Iterator[_Encoded]:
        if self._all:
            texts = [
                chat.text(_conversation(row), place, tools=row.get("tools"))
                for row, place in zip(rows, places, strict=True)
            ]
            self._look_for_losses(chat, rows, places, texts)
            for ids in self._ids(texts, add_special_tokens=False):
                yield _Encoded(ids, [True] * len(ids))
            return
        rendered = [
            chat.render(_conversation(row), place, num_prompt=len(row.get("prompt", ())), tools=row.get("tools"))
            for row, place in zip(rows, places, strict=True)
        ]
        self._look_for_losses(chat, rows, places, [r.text for r in rendered])
        encoding = self._tokenizer(
            [r.text for r in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        for ids, offsets, r in zip(encoding["input_ids"], offsets_of(encoding), rendered, strict=True):
            yield _Encoded(ids, in_loss(offsets, r.spans))

    def _look_for_losses(self, chat: ChatRenderer, rows: list[Row], places: list[str], texts: list[str]) -> None:
        num_left = _ROWS_LOOKED_AT - self._num_looked_at
        for row, place, text in zip(rows[:num_left], places, texts, strict=False):
            self._num_looked_at += 1
            self._num_left_out.update(chat.left_out(_conversation(row), place, row.get("tools"), text))

    def _encode_completions(self, rows: list[Row]) -> Iterator[_Encoded]:
        prompts = self._ids([row["prompt"] for row in rows], add_special_tokens=True)
        wholes = self._encode_plain([row["prompt"] + row["completion"] for row in rows])
        for prompt, whole in zip(prompts, wholes, strict=True):
            prompt = self._single_bos(prompt)[: -1 if self._ends_by_itself else None]
            num_given = common_prefix_length(prompt, whole)
            self._num_straddling += num_given < len(prompt)
            yield _Encoded(whole, [self._all or i >= num_given for i in range(len(whole))])

    def _encode_plain(self, texts: list[str]) -> Iterator[list[int]]:
        """Texts as a model reads them: with the tokenizer's own first token, if it has one, and one end token."""
        for ids in self._ids(texts, add_special_tokens=True):
            ids = self._single_bos(ids)
            yield ids if ids[-1] == self._tokenizer.eos_token_id else [*ids, self._tokenizer.eos_token_id]

    def _ids(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        encoding = self._tokenizer(
            texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )
        ids: list[list[int]] = encoding["input_ids"]
        return ids

    def _single_bos(self, ids: list[int]) -> list[int]:
        # A text that spells the first token itself would otherwise begin with two of them.
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


class _Builder:
    """Collects sequences into Arrow columns and counts what happens to the rows."""

    def __init__(self, max_length: int, *, splits: bool) -> None:
        self._max_length = max_length
        self._splits = splits
        self._batch: list[tuple[list[int], list[int]]] = []
        self._chunks: list[Any] = []
        self.num_rows = self.num_sequences = self.num_truncated = self.num_split = self.num_dropped = 0
        self.num_tokens = self.num_trainable_tokens = self.longest_tokens = 0

    def add(self, encoded: _Encoded) -> None:
        """Cut or split a row, and keep what can be learned from."""
        num_tokens = len(encoded.ids)
        self.num_rows += 1
        self.longest_tokens = max(self.longest_tokens, num_tokens)
        starts = [0]
        if num_tokens > self._max_length:
            self.num_split += self._splits
            self.num_truncated += not self._splits
            if self._splits:
                starts = list(range(0, num_tokens - 1, self._max_length - 1))
        kept = 0
        for start in starts:
            ids = encoded.ids[start : start + self._max_length]
            counts = [False, *encoded.counts[start + 1 : start + self._max_length]]
            num_trainable = sum(counts)
            if num_trainable:
                kept += 1
                self.num_tokens += len(ids)
                self.num_trainable_tokens += num_trainable
                labels = [token if counted else IGNORED for token, counted in zip(ids, counts, strict=True)]
                self._batch.append((ids, labels))
        self.num_sequences += kept
        self.num_dropped += kept == 0

    def flush(self) -> None:
        """Move the collected sequences from Python lists into Arrow, which takes four bytes a token."""
        import pyarrow as pa  # type: ignore[import-untyped]

        kind = pa.list_(pa.int32())
        columns = [pa.array([pair[k] for pair in self._batch], type=kind) for k in (0, 1)]
        self._chunks.append(pa.table(columns, names=["input_ids", "labels"]))
        self._batch.clear()

    def dataset(self) -> "datasets.Dataset":
        """All sequences."""
        import datasets
        import pyarrow as pa

        # Left to itself, Dataset would pickle the whole table to name it, in several times its memory.
        name = datasets.fingerprint.generate_random_fingerprint()
        return datasets.Dataset(pa.concat_tables(self._chunks), fingerprint=name)

    def report(self, notes: tuple[str, ...]) -> TokenReport:
        """The account of all rows."""
        return TokenReport(
            num_rows=self.num_rows,
            num_sequences=self.num_sequences,
            num_truncated=self.num_truncated,
            num_split=self.num_split,
            num_dropped=self.num_dropped,
            num_tokens=self.num_tokens,
            num_trainable_tokens=self.num_trainable_tokens,
            longest_tokens=self.longest_tokens,
            notes=notes,
        )


def _conversation(row: Row) -> list[Row]:
    """The whole conversation of a row of messages, or of a prompt and a completion made of messages."""
    whole: list[Row] = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
    return whole


def _nothing_to_learn(rows: Rows, builder: _Builder, max_length: int) -> DataError:
    problem = f"{rows.source}: zero trainable tokens in {counted(len(rows), 'row')}"
    if builder.num_truncated:
        return DataError(
            f"{problem}: the part that counts lies beyond data.max_length={max_length} "
            f"(the longest row has {builder.longest_tokens:,} tokens)",
            hint="raise data.max_length",
        )
    return DataError(
        f"{problem}: the chat template marks nothing as the assistant's",
        hint="put {% generation %} around the assistant's words (model.chat_template), or set data.loss_on=all",
    )
