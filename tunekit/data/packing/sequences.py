"""Token sequences on disk, with a mark for each token that counts in the loss.

Three flat files in a folder: the token ids of all sequences one behind the other (four bytes each), a byte for each
token that says whether it counts, and the lengths of the sequences. Beside them the lengths of the rows that they were
made of, and which row each was made of. A sequence is read when it is asked for, so any number of them takes little
memory.
"""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

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


class SequenceWriter:
    """Writes sequences into a folder, in their order; a context manager.

    Args:
        folder: An existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self._files: list[BinaryIO] = [(folder / name).open("wb") for name in _FILES]

    def add(self, batch: Batch, row_lengths: "np.ndarray", rows: "np.ndarray") -> None:
        """Add sequences.

        Args:
            batch: The sequences.
            row_lengths: Tokens of the rows that they were made of, before anything was cut, int32.
            rows: Which row of the source each was made of, int32.
        """
        arrays = (batch.ids, batch.counted, batch.lengths, row_lengths, rows)
        for file, array in zip(self._files, arrays, strict=True):
            file.write(array.tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()


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
