"""From rows to sequences that can be trained on, on all cores, and an account of what became of the rows.

Conversations and completions longer than `max_length` are cut at the end. A text goes on in the next sequence; a
sequence begins with the last token of the one before, so that every token is predicted exactly once. Nothing stands
before the first token of a sequence to predict it from, so it never counts, and packed behind another sequence it
must not. A sequence in which no token counts teaches nothing; it is dropped, and counted.

Many rows are shared out in batches to as many processes as there are cores. The batches come back in the order of the
rows, and only a few are under way at a time, so the result is the same, and the memory does not grow with the rows.
"""

import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import TYPE_CHECKING

from tunekit.data.formats.row_formats import counted
from tunekit.data.media.expand import MediaTokens
from tunekit.data.media.kinds import counts_of, nouns_of
from tunekit.data.packing.sequences import Batch, SequenceWriter
from tunekit.data.sources.rows import Rows
from tunekit.data.tokenization.encode import Encoded, Encoder, Observed
from tunekit.errors import DataError
from tunekit.recipe.sections.data import MediaKind, TooLong

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


BATCH_ROWS = 500
BATCH_BYTES = 4 * 2**20
"""A batch has so many rows at most, and so many bytes of JSON unless it is one row."""

FEW_ROWS = 2000
"""Number of rows that are tokenized before worker processes would have started."""

Progress = Callable[[int, int], None]
"""Called with how many rows are done, and how many there are."""


@dataclass
class TokenReport:
    """Outcome of tokenizing the rows of one source, counted batch by batch.

    Attributes:
        num_rows: Rows read.
        num_sequences: Sequences made of them.
        num_truncated: Rows cut at `max_length`.
        num_split: Texts that were longer than `max_length` and became several sequences.
        num_dropped: Rows left out because no token of theirs would count in the loss, or because they are too long.
        num_tokens: Tokens of all sequences.
        num_trainable_tokens: Those that count in the loss.
        longest_tokens: Tokens of the longest row before it was cut.
        num_media: Media of the rows, by kind.
        num_media_tokens: Their tokens.
        num_pixel_values: Values of the pixels of all pictures that are trained on.
        num_too_long: Rows longer than `max_length` that are left out: those with media, or all by `data.too_long`.
        notes: What the user should know about how the rows were read, a sentence each.
    """

    num_rows: int = 0
    num_sequences: int = 0
    num_truncated: int = 0
    num_split: int = 0
    num_dropped: int = 0
    num_tokens: int = 0
    num_trainable_tokens: int = 0
    longest_tokens: int = 0
    num_media: Mapping[MediaKind, int] = field(default_factory=dict)
    num_media_tokens: Mapping[MediaKind, int] = field(default_factory=dict)
    num_pixel_values: int = 0
    num_too_long: int = 0
    notes: tuple[str, ...] = ()

    def cut(
        self, encoded: Encoded, max_length: int, *, splits: bool, too_long: TooLong = "truncate"
    ) -> "tuple[Batch, np.ndarray]":
        """Cut, split or leave out rows, and keep the sequences that something can be learned from.

        Args:
            encoded: The rows as tokens.
            max_length: Longest sequence, in tokens.
            splits: Continue long rows in the next sequence.
            too_long: Treatment of other long rows; those with media are never cut.

        Returns:
            The sequences, and which of the rows each was made of, int32, `(sequences,)`.
        """
        import numpy as np

        ids, counts, lengths = encoded.ids, encoded.counted, encoded.lengths
        is_too_long = lengths > max_length
        dropped = None
        if too_long in ("drop", "refuse") and not splits:
            dropped = is_too_long
        elif encoded.has_media is not None:
            # What is left of a medium whose tokens are cut is none.
            dropped = is_too_long & encoded.has_media
        if dropped is not None:
            self.num_too_long += int(dropped.sum())
            counts = counts & ~np.repeat(dropped, lengths)
            is_too_long &= ~dropped
        num_cut = int(is_too_long.sum())
        kept = lengths
        if num_cut and too_long == "truncate_turns" and not splits:
            keeps = _shortened(counts, lengths, is_too_long, max_length)
            kept = np.add.reduceat(np.append(keeps, False), np.cumsum(lengths) - lengths, dtype=lengths.dtype)
            kept[lengths == 0] = 0
            ids, counts = ids[keeps], counts[keeps]
        rows = np.flatnonzero(kept)
        starts = (np.cumsum(kept) - kept)[rows]
        sizes = kept[rows]
        if num_cut and splits:
            rows, starts, sizes = _split(rows, starts, sizes, max_length)
        is_cut = int(sizes.max(initial=0)) > max_length
        sizes = np.minimum(sizes, max_length)
        firsts = np.cumsum(sizes) - sizes
        if is_cut or num_cut:
            places = np.arange(sizes.sum()) + np.repeat(starts - firsts, sizes)
            ids, counts = ids[places], counts[places]
        counts = counts.copy()
        counts[firsts] = False
        num_counted = np.add.reduceat(counts, firsts, dtype=np.int64) if len(firsts) else np.zeros(0, np.int64)
        learned = num_counted > 0
        if not learned.all():
            of_kept = np.repeat(learned, sizes)
            ids, counts, sizes = ids[of_kept], counts[of_kept], sizes[learned]
        self.num_rows += len(lengths)
        self.num_sequences += len(sizes)
        self.num_split += num_cut if splits else 0
        self.num_truncated += 0 if splits else num_cut
        self.num_dropped += len(lengths) - len(np.unique(rows[learned]))
        self.num_tokens += len(ids)
        self.num_trainable_tokens += int(num_counted.sum())
        self.longest_tokens = max(self.longest_tokens, int(lengths.max(initial=0)))
        observed = encoded.observed
        # Plain ones: `asdict` makes no Counter again.
        self.num_media = dict(Counter(self.num_media) + observed.num_media)
        self.num_media_tokens = dict(Counter(self.num_media_tokens) + observed.num_media_tokens)
        if encoded.pixel_values is not None:
            values = encoded.pixel_values[rows[learned]]
            self.num_pixel_values += int(values.sum())
        return Batch(ids, counts, sizes.astype(np.int32)), rows[learned].astype(np.int32)

    def notes_of_rows(self, source: str, max_length: int, too_long: TooLong) -> list[str]:
        """Return what the user should know about rows that are too long, and media, a sentence each."""
        if too_long == "drop" and self.num_too_long:
            rows = f"{counted(self.num_too_long, 'row')} of {self.num_rows:,}"
            limit = f"longer than data.max_length={max_length:,} (data.too_long=drop)"
            return [f"{source}: {rows} dropped: {limit}", *self._notes_of_media(source)]
        notes = self._notes_of_media(source)
        if self.num_too_long:
            nouns = nouns_of(self.num_media)
            notes.append(
                f"{source}: {counted(self.num_too_long, 'row')} with {nouns} skipped: longer than "
                f"data.max_length={max_length:,}, and {nouns} are never truncated"
            )
        return notes

    def check_none_too_long(self, source: str, max_length: int) -> None:
        """Check that no row is longer than `max_length`.

        Raises:
            DataError: Some are.
        """
        if self.num_too_long:
            longest = f"{counted(self.num_too_long, 'row')} longer than data.max_length={max_length:,}"
            problem = f"{source}: {longest}, the longest with {self.longest_tokens:,} tokens (data.too_long=refuse)"
            raise DataError(problem, hint="raise data.max_length, or set data.too_long to truncate or drop")

    def _notes_of_media(self, source: str) -> list[str]:
        means = {kind: self.num_media_tokens.get(kind, 0) / num for kind, num in self.num_media.items()}
        return [
            f"{source}: {counts_of({kind: self.num_media[kind]})}, {mean:,.0f} tokens each on average"
            for kind, mean in means.items()
        ]


def tokenize(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    *,
    max_length: int,
    too_long: TooLong = "truncate",
    media: MediaTokens | None = None,
    on_progress: Progress | None = None,
) -> TokenReport:
    """Turn rows into token ids and loss marks.

    Args:
        rows: Valid rows of one source, with what counts in them.
        tokenizer: Tokenizer of the model, with its chat template for rows of messages.
        folder: Where the sequences are written; it exists.
        max_length: Longest sequence, in tokens.
        too_long: Treatment of longer rows.
        media: The tokens of media, for rows that have some.
        on_progress: Told after every batch.

    Raises:
        DataError: A row cannot go through the chat template or is refused for its length, the tokenizer lacks what the
            format needs, or no token at all would count in the loss.
    """
    encoder = Encoder(rows, tokenizer, media)
    encoder.check_media(rows)
    report = TokenReport()
    observed = Observed()
    batches = list(rows.rows.batches(num_rows=BATCH_ROWS, num_bytes=BATCH_BYTES))
    with SequenceWriter(folder) as writer:
        for encoded in _encode_all(encoder, rows, batches):
            num_before = report.num_rows
            batch, made_of = report.cut(encoded, max_length, splits=rows.format == "text", too_long=too_long)
            observed.add(encoded.observed)
            writer.add(batch, encoded.lengths, made_of + num_before)
            if on_progress is not None:
                on_progress(report.num_rows, len(rows))
    if too_long == "refuse":
        report.check_none_too_long(rows.source, max_length)
    if report.num_trainable_tokens == 0:
        raise _nothing_to_learn(rows, report, max_length)
    notes_of_rows = report.notes_of_rows(rows.source, max_length, too_long)
    report.notes = (*encoder.notes, *observed.notes(rows.source), *notes_of_rows)
    return report


def _encode_all(encoder: Encoder, rows: Rows, batches: Iterable[range]) -> Iterator[Encoded]:
    """The batches in their order, encoded in this process or, where that is worth it, in one process a core."""
    # Elsewhere a process that is forked is not safe, and a new one would need a guard in the user's script. One that
    # is to end with its parent may have no children.
    may_fork = sys.platform == "linux" and not current_process().daemon
    num_processes = len(os.sched_getaffinity(0)) if may_fork else 1
    if num_processes == 1 or len(rows) <= FEW_ROWS:
        yield from (encoder.encode(rows, batch) for batch in batches)
        return
    # Forked processes have the rows and the tokenizer at once.
    pool = ProcessPoolExecutor(num_processes, get_context("fork"), initializer=_begin, initargs=(encoder, rows))
    under_way: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            under_way.append(pool.submit(_encode, batch))
            if len(under_way) > 2 * num_processes:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        problem = "a data preparation worker was killed"
        raise DataError(problem, hint="check whether the machine is out of memory") from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Given:
    """Inputs of a worker process that tokenizes rows."""

    encoder: Encoder
    rows: Rows


def _begin(encoder: Encoder, rows: Rows) -> None:
    # Every core has such a process: threads of the tokenizer's own would only stand in their way. An interrupt from
    # the keyboard reaches them all, and it is for the process that waits for them to end them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Given.encoder, _Given.rows = encoder, rows


def _encode(batch: range) -> Encoded:
    return _Given.encoder.encode(_Given.rows, batch)


def _shortened(counts: "np.ndarray", lengths: "np.ndarray", is_too_long: "np.ndarray", max_length: int) -> "np.ndarray":
    """Which tokens are kept of rows whose turns are cut one by one: all of the others, bool, `(tokens,)`."""
    import numpy as np

    keeps = np.ones(len(counts), dtype=np.bool_)
    ends = np.cumsum(lengths)
    for row in np.flatnonzero(is_too_long):
        part = slice(int(ends[row] - lengths[row]), int(ends[row]))
        keeps[part] = False
        position = part.start
        for question, answer, num_asked, num_answered in _turns(counts[part], max_length):
            keeps[position : position + num_asked] = True
            position += question
            keeps[position : position + num_answered] = True
            position += answer
    return keeps


def _turns(counts: "np.ndarray", max_length: int) -> Iterator[tuple[int, int, int, int]]:
    """Tokens before each answer and of it, and how many of them are kept until the row has its length."""
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate([[False], counts, [False]])))
    total = position = 0
    for start, end in edges.reshape(-1, 2).tolist():
        question, answer = start - position, end - start
        position = end
        if total >= max_length:
            return
        num_asked, num_answered = shares_of(question, answer, max_length - total)
        total += num_asked + num_answered
        yield question, answer, num_asked, num_answered


def shares_of(asked: int, answered: int, room: int) -> tuple[int, int]:
    """Return how many tokens of a question and of its answer are kept in a room.

    The longer one is cut where the other takes less than half of the room, and both in proportion otherwise.
    """
    if 2 * answered < room:
        most = room
    elif 2 * asked < room:
        most = room - asked
    else:
        most = int(room * (answered / (asked + answered)))
    num_answered = min(most, answered)
    return min(max(room - num_answered, 0), asked), num_answered


def _split(
    rows: "np.ndarray", starts: "np.ndarray", sizes: "np.ndarray", max_length: int
) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """Sequences of texts, the longer ones in several that share a token with the one before."""
    import numpy as np

    pieces = [
        (row, start + offset, size - offset)
        for row, start, size in zip(rows.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        for offset in (range(0, size - 1, max_length - 1) if size > max_length else (0,))
    ]
    split = np.array(pieces, dtype=np.int64)
    return split[:, 0], split[:, 1], split[:, 2]


def _nothing_to_learn(rows: Rows, report: TokenReport, max_length: int) -> DataError:
    problem = f"{rows.source}: zero trainable tokens in {counted(len(rows), 'row')}"
    if report.num_too_long:
        which = f"rows with {nouns_of(report.num_media)}" if report.num_media else "rows"
        return DataError(
            f"{problem}: all {which} are longer than data.max_length={max_length} "
            f"(longest row: {report.longest_tokens:,} tokens)",
            hint="raise data.max_length",
        )
    if report.num_truncated:
        return DataError(
            f"{problem}: all tokens in the loss lie beyond data.max_length={max_length} "
            f"(longest row: {report.longest_tokens:,} tokens)",
            hint="raise data.max_length",
        )
    return DataError(
        f"{problem}: the chat template marks no assistant tokens",
        hint="put {% generation %} around the assistant's content (model.chat_template), or set data.loss_on=all",
    )
