"""The first rows of a source, at once: whatever is wrong with it, what can be read is shown beside the reason.

Training reads a source whole and refuses it for one bad row. To look at it, a bounded part is enough: so many records,
so many bytes, and no line longer than a page could show. A source that no format fits has its columns still, which is
what somebody needs who is to say what they mean.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from tunekit.data.formats.row_formats import BECOMES, COLUMNS, OPTIONAL_COLUMNS, Learner, check_mapping, shortened
from tunekit.data.sources import hub
from tunekit.data.sources.files import OPENERS, File, Record, Table, opened
from tunekit.data.sources.load import find_files, image_folder
from tunekit.data.sources.reader import Reader
from tunekit.data.sources.rows import Rows, Skipped, shown
from tunekit.errors import DataError, TunekitError
from tunekit.recipe.sections.data import CompleteSource, SourceFormat

LOOK_RECORDS = 1000
"""Minimum number of records to check."""

LOOK_BYTES = 64 * 2**20
"""Bytes of a text that are read; the limit of a JSON list, which is read whole."""

LINE_BYTES = 8 * 2**20
"""Longest line of a text, but for a JSON list."""

EXAMPLE_LENGTH = 200
"""Letters of a value that stands for its column."""

_COLUMNS_FROM = 50
_MOST_COLUMNS = 200
_ALL = 2**31
_WHOLE = (".parquet", ".arrow", ".feather")


@dataclass(frozen=True)
class Column:
    """A column of a source.

    Attributes:
        name: What the source calls it.
        read_as: Our name of it, where it is read.
        example: What stands there in the first row that has it, shortened.
    """

    name: str
    read_as: str | None
    example: str


@dataclass(frozen=True)
class FormatColumns:
    """Columns of a format, under tunekit's names.

    Attributes:
        format: Its name in `data.format`.
        needed: Columns that make a row.
        optional: Columns that it may have beside those.
    """

    format: SourceFormat
    needed: tuple[str, ...]
    optional: tuple[str, ...]


@dataclass(frozen=True)
class Look:
    """Contents of the first records of a source.

    Attributes:
        format: The format that it has, where it is known.
        columns: Its columns.
        rows: The good rows; None where there is none.
        bad: The bad ones.
        num_records: Records that were read, good and bad.
        is_whole: Whether there are no others.
        problem: What is wrong with the source itself.
    """

    format: SourceFormat | None
    columns: tuple[Column, ...]
    rows: Rows | None
    bad: tuple[Skipped, ...]
    num_records: int
    is_whole: bool
    problem: TunekitError | None


def formats_for(learner: Learner) -> tuple[FormatColumns, ...]:
    """The formats that a method learns from, and their columns."""
    return tuple(
        FormatColumns(format, needed, OPTIONAL_COLUMNS[format])
        for format, needed in COLUMNS.items()
        if BECOMES[format] in learner.formats
    )


def look_at(
    source: CompleteSource, learner: Learner, *, num_records: int, default_split: Literal["train", "eval"]
) -> Look:
    """Read the first records of a source.

    Args:
        source: The source.
        learner: The method that is to learn from it.
        num_records: Records to read at most.
        default_split: What is wanted of a hub dataset where the source names no split.

    Raises:
        DataError: The source cannot be found.
    """
    check_mapping(source.columns)
    reader = Reader(source, _ALL, learner)
    gate = _Gate(num_records)
    problem: TunekitError | None = None
    kinds: list[str] = []
    try:
        for name, kind, table, folder in _tables(source, default_split, gate):
            kinds.append(kind)
            for _ in reader.read(name, gate.through(table), folder):
                pass
            if gate.is_shut:
                break
    except TunekitError as error:
        if not kinds:
            raise
        problem = error
    content = reader.so_far(is_text=kinds[-1:] == [".txt"])
    format = reader.format
    return Look(
        format=format,
        columns=gate.columns(format, reader.columns),
        rows=content if len(content) else None,
        bad=content.skipped,
        num_records=gate.num_passed,
        is_whole=not gate.is_shut and problem is None,
        problem=problem,
    )


def _tables(
    source: CompleteSource, default_split: Literal["train", "eval"], gate: "_Gate"
) -> Iterator[tuple[str, str, Table, Path | None]]:
    """The files of a source, opened so that no more is read than can be shown, and the folder of pictures."""
    files = find_files(source, key=source.key, streaming=True)
    if files is None:
        # A part of a split cannot be streamed.
        is_part = source.split is not None and "[" in source.split
        table = hub.open_hub(source, key=source.key, default_split=default_split, streaming=not is_part)
        yield shown(source.path), "", table, image_folder(source)
        return
    for file in files.found:
        bounded = file if files.kind in _WHOLE else _Start(file, files.kind, gate)
        yield file.name, files.kind, OPENERS[files.kind](bounded), image_folder(source, file)


class _Gate:
    """Lets so many records of a source pass, and remembers the columns of the first."""

    def __init__(self, num_records: int) -> None:
        self._left = num_records
        self._names: dict[str, None] = {}
        self._first: dict[str, object] = {}
        self.num_passed = 0
        self.is_shut = False

    def through(self, table: Table) -> Table:
        """The table up to as many records as are left."""
        names = table.columns
        self._names.update(dict.fromkeys((names or ())[:_MOST_COLUMNS]))
        with suppress(DataError):  # whoever reads the rows is told
            for record in islice(table.read(names or ()), _COLUMNS_FROM if names is None else 1):
                self._note(record)

        before = self._left, self.num_passed

        def read(wanted: Sequence[str]) -> Iterator[Record]:
            self._left, self.num_passed = before  # a reader begins anew when it knows the columns
            for record in table.read(wanted):
                if self._left == 0:
                    self.is_shut = True
                    return
                self._left -= 1
                self.num_passed += 1
                yield record

        return replace(table, read=read)

    def _note(self, record: Record) -> None:
        if isinstance(record.value, dict):
            for name, value in islice(record.value.items(), _MOST_COLUMNS):
                self._names.setdefault(str(name))
                self._first.setdefault(str(name), value)

    def columns(self, format: SourceFormat | None, mapping: Mapping[str, str]) -> tuple[Column, ...]:
        """Describe the columns that were seen."""
        ours = {theirs: name for name, theirs in mapping.items()}
        format_columns = () if format is None else (*COLUMNS[format], *OPTIONAL_COLUMNS[format])
        named = {name: ours.get(name, None if name in mapping else name) for name in self._names}
        return tuple(
            Column(name, read if read in format_columns else None, briefly(self._first.get(name)))
            for name, read in islice(named.items(), _MOST_COLUMNS)
        )


def briefly(value: object, length: int = EXAMPLE_LENGTH) -> str:
    """A value of a row in a few letters: a text as it stands, anything else as JSON."""
    if value is None:
        return ""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, default=str)
        except (RecursionError, ValueError):  # deeper than JSON is written, or a key that is no text
            value = shortened(type(value).__name__)
    return value if len(value) <= length else value[: length - 1] + "…"


@dataclass(frozen=True)
class _Start:
    """A file of text up to as many bytes as are looked at, no longer compressed."""

    file: File
    suffix: str
    gate: _Gate

    @property
    def name(self) -> str:
        return self.file.name

    def open(self) -> BinaryIO:
        return cast(BinaryIO, _Lines(opened(self.file), self.name, None if self.suffix == ".json" else self.gate))


class _Lines(io.BufferedReader):
    """The lines of a file, which end where the file has been read far enough.

    A list in JSON is no list without its end: one that is too long is refused.

    Args:
        raw: The file.
        name: What messages call it.
        gate: What is shut where the lines end too early; None for a list.
    """

    def __init__(self, raw: BinaryIO, name: str, gate: _Gate | None) -> None:
        super().__init__(cast(Any, raw))
        self._name, self._gate = name, gate
        self._number, self._left = 0, LOOK_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line, whatever size is asked for; nothing where the file has been read far enough."""
        if self._left <= 0 and self._gate is not None:
            self._gate.is_shut = True
            return b""
        most = LOOK_BYTES if self._gate is None else LINE_BYTES
        line = super().readline(most + 1)
        if not line:
            return line
        self._number += 1
        self._left -= len(line)
        if self._gate is None and self._left < 0:
            problem = f"{self._name}: .json file larger than {LOOK_BYTES // 2**20} MiB, too large to preview"
            raise DataError(problem, hint="save it as .jsonl, one object per line")
        if len(line) > most:
            raise DataError(
                f"{self._name}:{self._number}: line longer than {LINE_BYTES // 2**20} MiB, too long to preview"
            )
        return line
