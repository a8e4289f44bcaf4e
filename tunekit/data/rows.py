"""Valid rows in little memory, each with the place it came from.

A million short conversations as Python objects take several gigabytes, most of it overhead. Here a row is kept as
the bytes of its JSON and decoded when it is asked for, so the rows take about as much memory as the file they came
from. They no longer need that file: it may change or vanish while a run uses them.
"""

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, overload

from tunekit.data.formats import Format, Row, SourceFormat


class RowStore(Sequence[Row]):
    """A sequence of rows kept as JSON in one block of bytes; rows can only be added at the end."""

    def __init__(self) -> None:
        self._block = bytearray()
        self._ends = array("Q", [0])

    def append(self, row: Row) -> None:
        """Add a row."""
        self._block += json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()
        self._ends.append(len(self._block))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return cast(Row, json.loads(self._block[self._ends[position] : self._ends[position + 1]]))


@dataclass(frozen=True)
class Skipped:
    """A bad row that was left out: where it stands, and what is wrong with it."""

    place: str
    reason: str


@dataclass(frozen=True)
class Part:
    """One of several files that rows come from: its name, and the index of its first row."""

    first: int
    name: str


@dataclass(frozen=True)
class Rows:
    """The valid rows of one source.

    Attributes:
        format: The shape that all rows have; a row holds the columns of that format and no others.
        rows: The rows, in the order of the source.
        source: The source as the recipe names it.
        numbers: For each row the line, or the row of a table without lines, where it starts, counted from 1.
        unit: What `numbers` count: `line` or `row`.
        notes: What was found while reading, a sentence each.
        read_as: The format that the source has, where its rows were converted.
        parts: The files of the source, in order, where it is a folder or a pattern.
        skipped: Bad rows that were left out.
    """

    format: Format
    rows: Sequence[Row]
    source: str
    numbers: Sequence[int]
    unit: Literal["line", "row"] = "line"
    notes: tuple[str, ...] = ()
    read_as: SourceFormat | None = None
    parts: tuple[Part, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        """Where a row stands: `chats.jsonl:17`, or `chats.parquet row 17`."""
        if not self.parts:
            return place(self.source, self.unit, self.numbers[index])
        position = index + len(self) if index < 0 else index
        part = self.parts[bisect_right(self.parts, position, key=lambda part: part.first) - 1]
        return place(part.name, self.unit, self.numbers[position])

    def select(self, indices: Iterable[int]) -> "Rows":
        """Some of the rows, which keep their places.

        Args:
            indices: Which rows, in rising order.
        """
        chosen = list(indices)
        store = RowStore()
        for index in chosen:
            store.append(self.rows[index])
        numbers = array("Q", (self.numbers[index] for index in chosen))
        parts = tuple(Part(bisect_left(chosen, part.first), part.name) for part in self.parts)
        return replace(self, rows=store, numbers=numbers, parts=parts)


def place(source: str, unit: Literal["line", "row"], number: int) -> str:
    """Where a record stands in its source, as editors and terminals link it."""
    return f"{source}:{number}" if unit == "line" else f"{source} {unit} {number}"
