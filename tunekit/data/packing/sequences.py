"""Token sequences: stored on disk, mixed by source, packed, and held out for evaluation.

Token sequences on disk, with a mark for each token that counts in the loss.

Three flat files in a folder: the token ids of all sequences one behind the other (four bytes each), a byte for each
token that says whether it counts, and the lengths of the sequences. Beside them the lengths of the rows that they were
made of, and which row each was made of. A sequence is read when it is asked for, so any number of them takes little
memory.

Several sources in one: how much of each, and in which order.

Without weights everything is taken once. With weights, the shares of the sources are as the weights; the names are
those of `datasets.interleave_datasets`. With `first_exhausted` no sequence is taken twice: the source that is scarcest
for its weight is taken wholly, and of the others as much as belongs to it. With `all_exhausted` every sequence is taken
at least once: the source that is largest for its weight is taken once, and the others are repeated. What part of a
source is taken is drawn by lot, from a seed.

Several short sequences in one long one.

Padding short sequences to the longest of a batch wastes most of a batch's work. Packing fills sequences of `max_length`
tokens with whole ones instead: best fit decreasing (arXiv 2404.10830), the longest first, each put where it leaves the
least room. The lengths are kept beside the tokens: from those come the positions that restart with every document,
by which attention keeps the documents apart.

Only lengths are looked at. The rooms that packs have left are the bits of one number, so the smallest room that is
large enough is found by a shift: a million sequences take about a second.

Rows held out for evaluation, chosen by what they say.

A row is held out if the digest of its content, read as a fraction, is below the wanted share. So the choice of a row
depends on that row alone: it stays when the file grows, shrinks or is put into another order, equal rows always
stand on the same side, and a larger share holds out the rows of a smaller one and more. There is no seed, because
another seed would move rows that a model was trained on into its evaluation.
"""

import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from tunekit.data.formats.row_formats import Row, counted
from tunekit.data.sources.rows import Rows
from tunekit.errors import DataError

if TYPE_CHECKING:
    import numpy as np


IGNORED = -100
"""Label of a token that does not count in the loss (PyTorch's `ignore_index`)."""

_FILES = ("ids.bin", "counted.bin", "lengths.bin", "row_lengths.bin", "rows.bin")
_INT_BYTES = 4


@dataclass(frozen=True)
class Batch:
    """Some sequences as flat arrays.

    Attributes:
        ids: Token ids of all sequences, int32, `(tokens,)`.
        counted: For each token whether it counts in the loss, bool, `(tokens,)`.
        lengths: Tokens of each sequence, int32, `(sequences,)`.
    """

    ids: "np.ndarray"
    counted: "np.ndarray"
    lengths: "np.ndarray"

    @property
    def labels(self) -> "np.ndarray":
        """Each token's id where it counts in the loss, else -100; int32, `(tokens,)`."""
        import numpy as np

        return np.where(self.counted, self.ids, np.int32(IGNORED))


class SequenceWriter(ExitStack):
    """Writes sequences into a folder, in their order; a context manager.

    Args:
        folder: An existing folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._files: list[BinaryIO] = [self.enter_context((folder / name).open("wb")) for name in _FILES]

    def add(self, batch: Batch, row_lengths: "np.ndarray", rows: "np.ndarray") -> None:
        """Add sequences.

        Args:
            batch: The sequences.
            row_lengths: Tokens of the rows that they were made of, before anything was cut, int32.
            rows: Which row of the source each was made of, int32.
        """
        arrays = (batch.ids, batch.counted, batch.lengths, row_lengths, rows)
        for file, values in zip(self._files, arrays, strict=True):
            file.write(values.tobytes())


class Sequences(Sequence[dict[str, list[int]]]):
    """The sequences of a folder that a `SequenceWriter` wrote.

    Attributes:
        lengths: Tokens of each sequence, int32, `(sequences,)`.
        row_lengths: Tokens of each row before anything was cut, int32, `(rows,)`.
        rows: Which row each sequence was made of, int32, `(sequences,)`.
    """

    def __init__(self, folder: Path) -> None:
        import numpy as np

        # Open as long as there is someone to read them, also when the folder is removed meanwhile.
        self._ids, self._counted = (os.open(folder / name, os.O_RDONLY) for name in _FILES[:2])
        for descriptor in (self._ids, self._counted):
            weakref.finalize(self, os.close, descriptor)
        self.lengths, self.row_lengths, self.rows = (np.fromfile(folder / name, dtype=np.int32) for name in _FILES[2:])
        self._starts = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=self._starts[1:])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:  # type: ignore[override]  # no slices
        """A sequence as `input_ids` and `labels`."""
        position = range(len(self))[index]
        batch = self.take([position])
        return {"input_ids": batch.ids.tolist(), "labels": batch.labels.tolist()}

    def take(self, indices: "Sequence[int] | np.ndarray") -> Batch:
        """Some of the sequences, in the order in which they are asked for."""
        import numpy as np

        requested = np.asarray(indices, dtype=np.int64)
        # Neighbours are read at once.
        first = np.flatnonzero(np.diff(requested, prepend=-2) != 1)
        last = np.append(first, len(requested))[1:] - 1
        starts, stops = self._starts[requested[first]].tolist(), self._starts[requested[last] + 1].tolist()
        ids, counted = bytearray(), bytearray()
        for start, stop in zip(starts, stops, strict=True):
            ids += _read(self._ids, start * _INT_BYTES, stop * _INT_BYTES)
            counted += _read(self._counted, start, stop)
        return Batch(np.frombuffer(ids, np.int32), np.frombuffer(counted, np.bool_), self.lengths[requested])


def _read(descriptor: int, start: int, stop: int) -> bytes:
    chunk = b""
    while len(chunk) < stop - start:  # a read gives two gigabytes at most
        chunk += os.pread(descriptor, stop - start - len(chunk), start + len(chunk))
    return chunk


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many items two sequences (characters, tokens) share at their start."""
    for i, (left, other) in enumerate(zip(first, second, strict=False)):
        if left != other:
            return i
    return min(len(first), len(second))


MIXING_SEED = 0
"""Seed of the lots by which a part of a source is drawn."""


@dataclass(frozen=True)
class Mixing:
    """Settings of a mixture of sources.

    Attributes:
        weights: The weight of each source, or None to take everything once.
        weight_by: What the weights count: sequences (a row, or a part of a long text) or their tokens.
        stopping_strategy: Whether scarce sources end the mixture or are repeated.
        mixing: Whether the sources take turns in proportion, or follow one another.
        curriculum: Order of all sequences in place of that: by their length in tokens, or by a column of their rows.
    """

    weights: tuple[float, ...] | None = None
    weight_by: Literal["rows", "tokens"] = "rows"
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    mixing: Literal["interleave", "concatenate"] = "interleave"
    curriculum: Literal["length", "column"] | None = None


@dataclass(frozen=True)
class Mixture:
    """Sequences of a mixture, in order.

    Attributes:
        source: The number of the source of each, int64, `(sequences,)`.
        index: Its index in that source, int64, `(sequences,)`.
    """

    source: "np.ndarray"
    index: "np.ndarray"


def mix(lengths: "Sequence[np.ndarray]", mixing: Mixing) -> Mixture:
    """Choose from several sources.

    Args:
        lengths: For each source the tokens of its sequences; none is empty.
        mixing: How.
    """
    import numpy as np

    taken_indices = [np.arange(len(of_source)) for of_source in lengths]
    if mixing.weights is not None:
        amounts = [of_source.sum() if mixing.weight_by == "tokens" else len(of_source) for of_source in lengths]
        totals = [amount / weight for amount, weight in zip(amounts, mixing.weights, strict=True)]
        total = min(totals) if mixing.stopping_strategy == "first_exhausted" else max(totals)
        taken_indices = [
            _take(of_source, weight * total, mixing.weight_by, i)
            for i, (of_source, weight) in enumerate(zip(lengths, mixing.weights, strict=True))
        ]
    source = np.repeat(np.arange(len(taken_indices)), [len(indices) for indices in taken_indices])
    index = np.concatenate(taken_indices)
    if mixing.mixing == "concatenate" or len(taken_indices) == 1:
        return Mixture(source, index)
    # The k-th of n stands at (k + 1/2) / n of the way.
    way = np.concatenate([(np.arange(len(indices)) + 0.5) / max(1, len(indices)) for indices in taken_indices])
    order = np.argsort(way, kind="stable")
    return Mixture(source[order], index[order])


def ordered(mixture: Mixture, ranks: "Sequence[np.ndarray]") -> Mixture:
    """Order a mixture by numbers, ascending; equal ones stay in their order.

    Args:
        mixture: The mixture.
        ranks: For each source the number of each of its sequences.
    """
    import numpy as np

    values = np.empty(len(mixture.index))
    for number, of_source in enumerate(ranks):
        here = mixture.source == number
        values[here] = of_source[mixture.index[here]]
    order = np.argsort(values, kind="stable")
    return Mixture(mixture.source[order], mixture.index[order])


def _take(lengths: "np.ndarray", amount: float, weight_by: str, number: int) -> "np.ndarray":
    """Indices of so many sequences or tokens of a source, in its order: all of it as often as it goes in, and a lot."""
    import numpy as np

    whole = float(lengths.sum()) if weight_by == "tokens" else float(len(lengths))
    times = int(amount / whole + 1e-9)
    remainder = amount - times * whole
    drawn = np.random.default_rng((MIXING_SEED, number)).permutation(len(lengths))
    sizes = lengths[drawn] if weight_by == "tokens" else np.ones(len(drawn))
    # As many as come nearest to the rest, and at least one sequence of every source.
    num_drawn = int(np.searchsorted(np.cumsum(sizes) - sizes / 2, remainder - 1e-9))
    num_drawn = max(num_drawn, int(times == 0))
    return np.concatenate([np.tile(np.arange(len(lengths)), times), np.sort(drawn[:num_drawn])])


def best_fit(lengths: "np.ndarray", max_length: int) -> tuple["np.ndarray", "np.ndarray"]:
    """Put sequences into packs of at most `max_length` tokens.

    Args:
        lengths: Tokens of each sequence, from 1 to `max_length`, `(sequences,)`.
        max_length: Most tokens of a pack.

    Returns:
        The indices of all sequences, those of a pack one behind the other, `(sequences,)`, and how many sequences
        each pack holds, `(packs,)`.
    """
    import numpy as np

    longest_first = np.argsort(-lengths.astype(np.int64), kind="stable")
    packs_with_room: dict[int, list[int]] = {}
    rooms = 0
    num_packs = 0
    pack_of = array("q")
    for length in lengths[longest_first].tolist():
        large_enough = rooms >> length
        if large_enough:
            room = length + (large_enough & -large_enough).bit_length() - 1
            packs = packs_with_room[room]
            pack = packs.pop()
            if not packs:
                rooms ^= 1 << room
        else:
            room, pack = max_length, num_packs
            num_packs += 1
        pack_of.append(pack)
        free = room - length
        if free:
            packs_with_room.setdefault(free, []).append(pack)
            rooms |= 1 << free
    assigned = np.frombuffer(pack_of, dtype=np.int64) if pack_of else np.zeros(0, np.int64)
    order = longest_first[np.argsort(assigned, kind="stable")]
    return order, np.bincount(assigned, minlength=num_packs)


def hold_out(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Part rows into those to train on and those held out.

    Args:
        rows: All rows of a source.
        share: The share to hold out, between 0 and 1; the number held out comes near it when the rows are many.

    Raises:
        DataError: One side would be empty.
    """
    is_held_out = [fraction(row) < share for row in rows.rows]
    num_held_out = sum(is_held_out)
    if num_held_out in (0, len(rows)):
        which = "no row" if num_held_out == 0 else "every row"
        raise DataError(
            f"data.eval_size={share:g}: {which} of the {counted(len(rows), 'row')} of '{rows.source}' "
            "would be held out for evaluation",
            hint="set another share, or set data.eval",
        )
    train = rows.select(i for i, held_out in enumerate(is_held_out) if not held_out)
    return train, rows.select(i for i, held_out in enumerate(is_held_out) if held_out)


def fraction(row: Row) -> float:
    """A number from 0 to 1 that follows from the content of a row: the first 8 bytes of the BLAKE2b of its JSON."""
    content = json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
