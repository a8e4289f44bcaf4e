"""Rows of a file without the invalid ones, and those to be corrected, with all their columns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunekit.data.formats.row_formats import Learner
from tunekit.data.sources.files import OPENERS, Fault, File, Record, Table
from tunekit.data.sources.load import find_files, image_folder
from tunekit.data.sources.reader import Reader
from tunekit.data.sources.rows import place, shown
from tunekit.errors import DataError
from tunekit.recipe.sections.data import CompleteSource

_ALL = 2**31


@dataclass(frozen=True)
class CopiedRows:
    """Rows that were copied.

    Attributes:
        path: The new file.
        num_rows: Rows in it.
        num_bad: Rows that were left out.
    """

    path: Path
    num_rows: int
    num_bad: int


@dataclass(frozen=True)
class InvalidRow:
    """A row that cannot be learned from.

    Attributes:
        number: Number of its line, or of the row in a table, counted from 1.
        place: The same with the name of its file.
        reason: What is wrong.
        text: The row as JSON, with all its columns; a line that is no JSON as it is.
    """

    number: int
    place: str
    reason: str
    text: str


def copy_good_rows(
    source: CompleteSource, learner: Learner, path: Path, corrected: Mapping[int, Any] | None = None
) -> CopiedRows:
    """Copy the rows of a file that a method can learn from, as JSON lines.

    Args:
        source: The source: one file.
        learner: The method that is to learn from it.
        path: The new file.
        corrected: Rows in place of those of the file, by their numbers. They are copied where they are good.

    Raises:
        DataError: The source is not one file, no row of it is good, a value cannot be written as JSON, or the file
            exists or cannot be written.
    """
    file, folder, passing, reader = _opened(source, learner, corrected or {})
    num_rows = 0
    try:
        with path.open("x", encoding="utf-8") as stream:
            for _ in reader.read(file.name, passing.table, folder):
                # It stops after each good row, which is the last that has passed.
                stream.write(json.dumps(passing.since_good[-1].value, ensure_ascii=False) + "\n")
                passing.since_good.clear()
                num_rows += 1
    except OSError as error:
        hint = "name a new file" if isinstance(error, FileExistsError) else None
        raise DataError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    except (TypeError, ValueError) as error:
        path.unlink()
        raise DataError(f"{file.name}: a row cannot be written as JSON: {error}") from error
    except DataError:
        path.unlink()
        raise
    if not num_rows:
        path.unlink()
        first = reader.so_far(is_text=False).skipped[0]
        raise DataError(f"{file.name} has no good row; the first: {first.place}: {first.reason}")
    return CopiedRows(path, num_rows, passing.num_records - num_rows)


def invalid_rows(source: CompleteSource, learner: Learner, most: int) -> list[InvalidRow]:
    """Return the first rows of a file that a method cannot learn from.

    Args:
        source: The source: one file.
        learner: The method that is to learn from it.
        most: So many of them at most.

    Raises:
        DataError: The source is not one file, or cannot be read.
    """
    file, folder, passing, reader = _opened(source, learner, {})
    for _ in reader.read(file.name, passing.table, folder):
        passing.since_good.pop()
        if len(passing.since_good) >= most:
            break
    skipped = iter(reader.so_far(is_text=False).skipped)
    bad, rows = next(skipped, None), []
    for record in passing.since_good:
        where = place(file.name, passing.table.unit, record.number)
        if bad is not None and (bad.place == where or bad.place.startswith(f"{where}:")):
            rows.append(InvalidRow(record.number, bad.place, bad.reason, _text_of(record.value)))
            bad = next(skipped, None)
    return rows[:most]


def _text_of(value: object) -> str:
    if isinstance(value, Fault):
        return value.text
    return json.dumps(value, ensure_ascii=False, default=str)


def _opened(
    source: CompleteSource, learner: Learner, corrected: Mapping[int, Any]
) -> tuple[File, Path | None, "_Passing", Reader]:
    """Return the file of a source, the folder of its media, its records as they pass, and the reader of its rows."""
    files = find_files(source, key=source.key)
    if files is None or len(files.found) != 1:
        raise DataError(f"{source.key}: '{shown(source.path)}' is not one file", hint="copy its files one by one")
    (file,) = files.found
    passing = _Passing(OPENERS[files.kind](file), corrected)
    return file, image_folder(source, file), passing, Reader(source, _ALL, learner)


class _Passing:
    """A table whose records are remembered as they pass, with all their columns.

    Attributes:
        num_records: Records that have passed.
        since_good: The last of them, until they are taken away.
    """

    def __init__(self, table: Table, corrected: Mapping[int, Any]) -> None:
        self.num_records = 0
        self.since_good: list[Record] = []

        def read(wanted: Sequence[str]) -> Iterator[Record]:
            self.num_records = 0  # a reader begins anew when it knows the columns
            self.since_good.clear()
            for passed in table.read(table.columns or wanted):
                record = replace(passed, value=corrected[passed.number]) if passed.number in corrected else passed
                self.num_records += 1
                self.since_good.append(record)
                yield record

        self.table = replace(table, read=read)
