"""The good rows of a file copied into a new one, with all their columns."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunekit.data.formats.row_formats import Learner
from tunekit.data.sources.files import OPENERS, Record, Table
from tunekit.data.sources.load import find_files, image_folder
from tunekit.data.sources.reader import Reader
from tunekit.data.sources.rows import shown
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


def copy_good_rows(source: CompleteSource, learner: Learner, path: Path) -> CopiedRows:
    """Copy the rows of a file that a method can learn from, as JSON lines.

    Args:
        source: The source: one file.
        learner: The method that is to learn from it.
        path: The new file.

    Raises:
        DataError: The source is not one file, no row of it is good, a value cannot be written as JSON, or the file
            exists or cannot be written.
    """
    files = find_files(source, key=source.key)
    if files is None or len(files.found) != 1:
        raise DataError(f"{source.key}: '{shown(source.path)}' is not one file", hint="copy its files one by one")
    (file,) = files.found
    passing = _Passing(OPENERS[files.kind](file))
    reader = Reader(source, _ALL, learner)
    num_rows = 0
    try:
        with path.open("x", encoding="utf-8") as stream:
            for _ in reader.read(file.name, passing.table, image_folder(source, file)):
                # It stops after each good row, which is the last that has passed.
                stream.write(json.dumps(passing.last, ensure_ascii=False) + "\n")
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


class _Passing:
    """A table whose records are remembered as they pass, with all their columns."""

    def __init__(self, table: Table) -> None:
        self.last: object = None
        self.num_records = 0

        def read(wanted: Sequence[str]) -> Iterator[Record]:
            self.num_records = 0  # a reader begins anew when it knows the columns
            for record in table.read(table.columns or wanted):
                self.last = record.value
                self.num_records += 1
                yield record

        self.table = replace(table, read=read)
