"""A few rows as a model will see them: what counts in the loss, what is cut, and what is left out and why.

Rows of supervised fine-tuning go through the same encoder and the same cut as before a run, rows of answers through
the same measuring as TRL's trainers apply. A row that cannot be learned from stands among the others with its reason.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.row_formats import BadRow, Row
from tunekit.data.media.answers import PictureAnswers
from tunekit.data.media.clips import Clip, excerpt
from tunekit.data.media.expand import MediaTokens, MediumTokens
from tunekit.data.media.kinds import Medium, media_of, nouns_of
from tunekit.data.media.pictures import thumbnail
from tunekit.data.media.videos import Video, first_frame
from tunekit.data.packing.sequences import IGNORED
from tunekit.data.reports.look import Column, FormatColumns, briefly
from tunekit.data.reports.measure import sample
from tunekit.data.reports.report import Sample
from tunekit.data.sources.rows import Rows, RowStore, Skipped
from tunekit.data.tokenization.alignment import ANSWERS, Room, check_calls, longest_prompt, prompt_tokens, tokens_of
from tunekit.data.tokenization.classes import LabeledTokens
from tunekit.data.tokenization.encode import Encoder
from tunekit.data.tokenization.tokenize import TokenReport
from tunekit.errors import DataError
from tunekit.recipe.sections.data import Format, TooLong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEAD_TOKENS, TAIL_TOKENS, CUT_TOKENS = 600, 200, 60
"""Tokens shown of the start of a sequence, of its end, and of its truncated part."""

ROW_BYTES = 2**20
"""Largest row that becomes tokens here, as JSON; of a longer text its beginning does."""

_TEXT_LENGTH = 2**16
_FIELD_LENGTH = 2000
_SEQUENCES = 3
_THUMBNAILS = 16
_ANSWERED = ("prompt", "chosen", "rejected", "completion", "label", "tools")


@dataclass(frozen=True)
class Problem:
    """Something that the user can mend."""

    what: str
    hint: str | None = None


@dataclass(frozen=True)
class ShownSequence:
    """A sequence of a row as it is trained on; of a long one its beginning and its end.

    Attributes:
        name: What it is: `sequence`, `prompt`, or the column of an answer with its prompt.
        num_tokens: Tokens that are trained on.
        num_trained: Those of them that count in the loss.
        num_cut: Tokens that lie beyond `data.max_length`.
        head: Its first tokens.
        num_hidden: Tokens between the first and the last that are not shown.
        tail: Its last tokens, where some are not shown.
        cut: The first of the tokens that are cut off.
    """

    name: str
    num_tokens: int
    num_trained: int
    num_cut: int
    head: Sample
    num_hidden: int
    tail: Sample
    cut: Sample


@dataclass(frozen=True)
class RowPreview:
    """A row as a model will see it.

    Attributes:
        place: Where it stands: `chats.jsonl:17`.
        sequences: What is trained on.
        num_more: Sequences of it beyond those, of a long text.
        fields: What else stands in the row, by column, each shortened.
        label: Whether its answer is a good one, where rows say so.
        left_out: Why it is not trained on, if it is not.
        source: The row as JSON, under our names, shortened.
        thumbnails: Its pictures and first frames of videos as small data URLs, and the beginnings of its clips, by
            their digests.
    """

    place: str
    sequences: tuple[ShownSequence, ...]
    num_more: int
    fields: dict[str, str]
    label: bool | None
    left_out: str | None
    source: str
    thumbnails: dict[str, str]


@dataclass(frozen=True)
class DataPreview:
    """The first rows of a source, or some that follow.

    Attributes:
        key: The recipe's key of the source.
        sources: Every source of the recipe: its key, and its name.
        method: The method that is to learn from it.
        max_length: Longest sequence, in tokens.
        format: The format that the source has, where it is known.
        columns: Its columns.
        formats: The formats that the method learns from, for those who are to say what the columns mean.
        rows: Some rows.
        start: The first of them, counted from 0 among the good ones.
        num_rows: Good rows among the records that were read.
        num_records: Records that were read.
        is_whole: Whether there are no others.
        bad: Bad rows among those records, where they stand and what is wrong.
        max_bad_rows: So many of them a run would leave out; with more it is refused.
        notes: What was found and decided, a sentence each.
        problem: Why the source cannot be learned from, if it cannot.
        model_problem: Why no tokens are shown, if there are none.
        reads: Columns that rewards read, by the names of the rewards.
    """

    key: str
    sources: tuple[tuple[str, str], ...]
    method: str
    max_length: int
    format: str | None
    columns: tuple[Column, ...]
    formats: tuple[FormatColumns, ...]
    rows: tuple[RowPreview, ...]
    start: int
    num_rows: int
    num_records: int
    is_whole: bool
    bad: tuple[Skipped, ...]
    max_bad_rows: int
    notes: tuple[str, ...]
    problem: Problem | None
    model_problem: Problem | None
    reads: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The preview as plain data, for JSON."""
        return asdict(self)


Show = Callable[[int], tuple[tuple[ShownSequence, ...], int, str | None]]
"""From the index of a row to its sequences, how many more it has, and why it is left out, if it is."""


def show_rows(rows: Rows, indices: range, show: Show | None) -> Iterator[RowPreview]:
    """Some rows, as tokens where there is a way to make them.

    Args:
        rows: The rows.
        indices: Which of them.
        show: Makes tokens of a row; None where there is no tokenizer.
    """
    for index in indices:
        row = rows.rows[index]
        sequences: tuple[ShownSequence, ...] = ()
        num_more, left_out = 0, None
        thumbnails: dict[str, str] = {}
        if show is not None:
            try:
                thumbnails = _thumbnails(row) if rows.media else {}
                sequences, num_more, left_out = show(index)
            except DataError as error:
                left_out = str(error).removeprefix(f"{rows.place(index)}: ")
        yield RowPreview(
            place=rows.place(index),
            sequences=sequences,
            num_more=num_more,
            fields={name: briefly(row[name], _FIELD_LENGTH) for name in _shown_columns(row, rows.format)},
            label=row.get("label") if rows.format == "unpaired_preference" else None,
            left_out=left_out,
            source=briefly(json.dumps(row, ensure_ascii=False, indent=2), 2 * _FIELD_LENGTH + 1),
            thumbnails=thumbnails,
        )


def _shown_columns(row: Row, format: Format) -> list[str]:
    """Return the columns of a row that are shown beside its tokens."""
    if format == "classification":
        return ["label"]
    return [name for name in row if name not in _ANSWERED] if format == "prompts" else []


def trained_sequences(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    media: MediaTokens | None = None,
    *,
    too_long: TooLong = "truncate",
) -> tuple[Show, Encoder]:
    """Return the tokenization of rows for supervised fine-tuning, with its encoder.

    Args:
        rows: The rows.
        tokenizer: Tokenizer of the model.
        max_length: Longest sequence, in tokens.
        media: The tokens of media, for rows that have some.
        too_long: Treatment of longer rows.

    Raises:
        DataError: The first row does not fit the chat template, or the tokenizer lacks what the format needs.
    """
    encoder = Encoder(rows, tokenizer, media)

    def show(index: int) -> tuple[tuple[ShownSequence, ...], int, str | None]:
        row = rows.select([index])
        if rows.format == "text":
            text = rows.rows[index]["text"]
            if len(text) > _TEXT_LENGTH:
                row = replace(row, rows=RowStore([{"text": text[:_TEXT_LENGTH]}]))
        else:
            _check_size(rows, index)
        encoded = encoder.encode(row, range(1))
        batch, _ = TokenReport().cut(encoded, max_length, splits=rows.format == "text", too_long=too_long)
        ids, labels, of_row = batch.ids.tolist(), batch.labels.tolist(), encoder.media_of(rows, index)
        if not len(batch.lengths):
            whole = encoded.ids.tolist()
            # A row with media is never cut, nor one that is left out or refused.
            is_whole = bool(of_row) or too_long in ("drop", "refuse")
            length = len(whole) if is_whole else max_length
            visible, cut = whole[:length], whole[length:]
            sequence = _shown("sequence", visible, [IGNORED] * len(visible), cut, tokenizer, of_row)
            if is_whole and len(whole) > max_length:
                nouns = nouns_of(part.medium.kind for part in of_row)
                why = f"{nouns} are never truncated" if of_row else f"data.too_long={too_long}"
                return (sequence,), 0, f"longer than data.max_length={max_length:,}, and {why}"
            return (sequence,), 0, "no token is included in the loss"
        cut = [] if rows.format == "text" or too_long == "truncate_turns" else encoded.ids.tolist()[max_length:]
        sequences, start = [], 0
        for length in batch.lengths.tolist()[:_SEQUENCES]:
            part = slice(start, start + length)
            sequences.append(_shown("sequence", ids[part], labels[part], cut, tokenizer, of_row))
            start += length
        return tuple(sequences), len(batch.lengths) - len(sequences), None

    return show, encoder


def answered_sequences(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    room: Room,
    pictures: PictureAnswers | None = None,
    labeled: LabeledTokens | None = None,
) -> Show:
    """Return the tokenization of rows of answers, or of prompts alone.

    Args:
        rows: The rows.
        tokenizer: Tokenizer of the model.
        room: The longest prompt, and the longest prompt with an answer.
        pictures: Tokenizes rows, where some have pictures.
        labeled: Tokenizes rows, where they have labels.
    """
    if labeled is not None:
        return _with_labels(rows, labeled, room)
    columns = ANSWERS[rows.format]

    def show(index: int) -> tuple[tuple[ShownSequence, ...], int, str | None]:
        _check_size(rows, index)
        try:
            row, place = rows.rows[index], rows.place(index)
            if pictures is None:
                check_calls(row, columns, tokenizer, place)
                num_given, answered = tokens_of(row, columns, tokenizer)
                num_given = longest_prompt(row, num_given, room, tokenizer)
                prompt = list(prompt_tokens(row, tokenizer, "a prompt")) if not columns else []
                places: list[list[MediumTokens]] = [[] for _ in columns or (None,)]
            else:
                num_given, answered, _ = pictures.tokens(row, columns, place)
                prompt = pictures.prompt_ids(row, place) if not columns else []
                places = pictures.places(row, columns, place)
        except DataError:
            raise
        except Exception as error:  # a template is the model's or the user's: it may raise anything
            raise DataError(f"the chat template cannot render the row: {error}") from error
        left_out = None if room.has(num_given, [len(answer) for answer in answered]) else room.too_long
        sequences = [
            _shown(
                name,
                list(answer[: room.max_length]),
                [IGNORED] * min(num_given, room.max_length) + list(answer[num_given : room.max_length]),
                list(answer[room.max_length :]),
                tokenizer,
                [part for part in parts if part.stop <= room.max_length],
            )
            for name, answer, parts in zip(columns, answered, places if columns else [], strict=True)
        ]
        if not columns:
            sequences = [_shown("prompt", prompt, [IGNORED] * len(prompt), [], tokenizer, places[0])]
        return tuple(sequences), 0, left_out

    return show


def _with_labels(rows: Rows, labeled: LabeledTokens, room: Room) -> Show:
    def show(index: int) -> tuple[tuple[ShownSequence, ...], int, str | None]:
        _check_size(rows, index)
        try:
            num_given, ids, labels = labeled.of_row(rows.rows[index])
        except DataError:
            raise
        except BadRow as error:
            raise DataError(str(error)) from None
        except Exception as error:  # a template is the model's or the user's: it may raise anything
            raise DataError(f"the chat template cannot render the row: {error}") from error
        sequence = _shown(labeled.column, ids, labels, [], labeled.tokenizer)
        return (sequence,), 0, None if room.has(num_given, [len(ids)]) else room.too_long

    return show


def is_encoded(format: Format) -> bool:
    """Return whether rows of a format are for supervised fine-tuning, which are tokenized before a run."""
    return format not in ANSWERS


def _small(medium: Medium) -> str:
    if isinstance(medium, Video):
        return first_frame(medium)
    return excerpt(medium) if isinstance(medium, Clip) else thumbnail(medium)


def _thumbnails(row: Row) -> dict[str, str]:
    return {medium.digest: _small(medium) for medium in media_of(row)[:_THUMBNAILS]}


def _shown(
    name: str,
    ids: list[int],
    labels: list[int],
    cut: list[int],
    tokenizer: "PreTrainedTokenizerBase",
    pictures: Sequence[MediumTokens] = (),
) -> ShownSequence:
    # A picture takes the room of one token.
    offsets = [token for token in range(len(ids)) if not any(part.start < token < part.stop for part in pictures)]
    is_long = len(offsets) > HEAD_TOKENS + TAIL_TOKENS
    start = offsets[HEAD_TOKENS] if is_long else len(ids)
    end = offsets[-TAIL_TOKENS] if is_long else len(ids)
    behind = [replace(part, start=part.start - end, stop=part.stop - end) for part in pictures if part.start >= end]
    few = cut[:CUT_TOKENS]
    return ShownSequence(
        name=name,
        num_tokens=len(ids),
        num_trained=sum(label != IGNORED for label in labels),
        num_cut=len(cut),
        head=sample(ids[:start], labels[:start], tokenizer, [part for part in pictures if part.stop <= start]),
        num_hidden=end - start,
        tail=sample(ids[end:], labels[end:], tokenizer, behind),
        cut=sample(few, [IGNORED] * len(few), tokenizer),
    )


def _check_size(rows: Rows, index: int) -> None:
    size = int(rows.rows.sizes_bytes[index])
    if size > ROW_BYTES:
        raise DataError(f"the row has {size:,} bytes, too large to show as tokens")
