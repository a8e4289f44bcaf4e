"""Valid rows in little memory, each with the place it came from.

A million short conversations as Python objects take several gigabytes, most of it overhead. Here a row is kept as
the bytes of its JSON and decoded when it is asked for. The first megabytes of them stay in memory, the rest goes to a
file without a name, which is gone when the process ends: however many rows there are, they take little more than eight
bytes each. They no longer need the file that they came from: it may change or vanish while a run uses them.

Locations, in the user's files, of the rows that are trained on, stored beside them.

What a trainer reads has lost it: rows are mixed, cut, split and packed. When something goes wrong with a few of them,
a user wants to open the file at the line.

Rows that a user's own function makes of the rows of a source.

`data.format: my_rows:convert` names it. It gets each row with all its columns, as a plain dict, and returns a row of
one of the known formats, or None to leave the row out. What it returns must be what JSON can hold.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self, cast, overload

import platformdirs

from tunekit.data.formats.row_formats import Row, described
from tunekit.data.sources.files import Fault, Record, Table
from tunekit.errors import DataError
from tunekit.recipe.sections.data import Format, LossOn, MediaKind, SourceFormat

if TYPE_CHECKING:
    import numpy as np


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
WEB = ("http", "https")
"""Protocols of the web."""


def is_url(name: str) -> bool:
    """Return whether a source is named by a URL."""
    return _URL.match(name) is not None


def protocol_of(url: str) -> str:
    """The protocol of a URL, in small letters."""
    return url.partition("://")[0].lower()


def without_user(url: str) -> str:
    """A URL without the user and the password in it; any other name as it is."""
    protocol, _, remainder = url.partition("://")
    if not is_url(url) or protocol == "github":  # github://OWNER:REPOSITORY@COMMIT/FILE
        return url
    host, slash, path = remainder.partition("/")
    return f"{protocol}://{host.rpartition('@')[2]}{slash}{path}"


def shown(url: str) -> str:
    """A URL as messages name it: without user, password and query; any other name as it is."""
    named = without_user(url)
    return re.split(r"[?#]", named, maxsplit=1)[0] if protocol_of(url) in WEB else named


IN_MEMORY_BYTES = 32 * 2**20
"""Bytes of a row store kept in memory; the rest goes to a file."""


def cache_folder() -> Path:
    """Folder for what can be made again, on a disk rather than in memory: the user's cache folder, made if missing.

    Raises:
        DataError: It cannot be written.
    """
    folder = platformdirs.user_cache_path("tunekit")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error.strerror}", hint="set XDG_CACHE_HOME") from error
    return folder


def clear_folder(folder: Path) -> int:
    """Remove a folder of what can be made again; return the bytes that were freed.

    Another process may write to it or clear it at the same time.
    """
    freed = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                freed += Path(parent, name).lstat().st_size
    shutil.rmtree(folder, ignore_errors=True)
    return freed


class RowStore(Sequence[Row]):
    """A sequence of rows kept as JSON, in memory or, where they are many, in a file; rows are added at the end.

    Args:
        rows: The first rows.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._held = bytearray()
        self._file: BinaryIO | None = None
        self._num_filed = 0
        self._ends = array("Q", [0])
        self._digest = hashlib.sha256()
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        """Add a row."""
        self._append(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode())

    def select(self, indices: Iterable[int]) -> "RowStore":
        """Some of the rows, as a store of its own."""
        chosen = RowStore()
        for index in indices:
            chosen._append(self._raw(index))
        return chosen

    def batches(self, *, num_rows: int, num_bytes: int) -> Iterator[range]:
        """The indices of all rows in batches, each of so many rows at most, and of so many bytes unless it is one."""
        start = 0
        while start < len(self):
            fitting = bisect_right(self._ends, self._ends[start] + num_bytes) - 1
            stop = min(max(fitting, start + 1), start + num_rows, len(self))
            yield range(start, stop)
            start = stop

    @property
    def sizes_bytes(self) -> "np.ndarray":
        """Bytes of the JSON of each row, int64, `(rows,)`."""
        import numpy as np

        return np.diff(np.array(self._ends, dtype=np.int64))

    @property
    def digest(self) -> str:
        """SHA-256 of all rows, in their order."""
        return self._digest.hexdigest()

    def digest_of(self, index: int) -> bytes:
        """BLAKE2b of a row, 16 bytes: equal rows have equal ones."""
        return hashlib.blake2b(self._raw(index), digest_size=16).digest()

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
        return cast(Row, json.loads(self._raw(position)))

    def _append(self, raw: bytes) -> None:
        self._held += raw
        self._digest.update(raw)
        self._ends.append(self._ends[-1] + len(raw))
        if len(self._held) > IN_MEMORY_BYTES:
            self._move_to_file()

    def _move_to_file(self) -> None:
        # Not in the system's folder for temporary files: that is often memory.
        folder = cache_folder()
        try:
            if self._file is None:
                self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
            with memoryview(self._held) as view:
                written = 0
                while written < len(view):
                    written += self._file.write(view[written:])
        except OSError as error:
            problem = f"cannot store the rows in {folder}: {error.strerror}"
            raise DataError(problem, hint="free some space, or set XDG_CACHE_HOME") from error
        self._num_filed += len(self._held)
        self._held.clear()

    def _raw(self, position: int) -> bytes:
        start, end = self._ends[position], self._ends[position + 1]
        if self._file is None or start >= self._num_filed:
            return bytes(self._held[start - self._num_filed : end - self._num_filed])
        # A positioned read is the same for every process that shares the file.
        return os.pread(self._file.fileno(), end - start, start)


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
        loss_on: Which of their tokens count in the loss.
        media: Kinds of media of the rows; a row has them in a column `__media__`.
        ranks: For each row its number in `data.curriculum_column`, where there is one.
    """

    format: Format
    rows: RowStore
    source: str
    numbers: Sequence[int]
    unit: Literal["line", "row"] = "line"
    notes: tuple[str, ...] = ()
    read_as: SourceFormat | None = None
    parts: tuple[Part, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    loss_on: LossOn = "assistant"
    media: tuple[MediaKind, ...] = ()
    ranks: "array[float] | None" = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_conversational(self) -> bool:
        """True if rows, or their prompts, are messages that the chat template formats."""
        return self.format == "messages" or isinstance(self.rows[0].get("prompt"), list)

    def place(self, index: int) -> str:
        """Return the location of a row: `chats.jsonl:17`, or `chats.parquet row 17`."""
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
        numbers = array("Q", (self.numbers[index] for index in chosen))
        parts = tuple(Part(bisect_left(chosen, part.first), part.name) for part in self.parts)
        ranks = None if self.ranks is None else array("d", (self.ranks[index] for index in chosen))
        return replace(self, rows=self.rows.select(chosen), numbers=numbers, parts=parts, ranks=ranks)


def place(source: str, unit: Literal["line", "row"], number: int) -> str:
    """Return the location of a record in its source, as editors and terminals link it."""
    return f"{source}:{number}" if unit == "line" else f"{source} {unit} {number}"


@dataclass(frozen=True)
class Places:
    """Locations of many rows.

    Attributes:
        files: The files, by name.
        units: What `number` counts in each of them: `line` or `row`.
        file: Which of the files each row is in, int32, `(rows,)`.
        number: Where it starts there, counted from 1, int32, `(rows,)`.
    """

    files: tuple[str, ...]
    units: tuple[str, ...]
    file: "np.ndarray"
    number: "np.ndarray"

    @classmethod
    def of(
        cls,
        sources: Sequence[Rows],
        rows_of: "Sequence[np.ndarray | Sequence[int]]",
        source: "np.ndarray",
        index: "np.ndarray",
    ) -> Self:
        """The places of the rows that sequences of some sources were made of.

        Args:
            sources: The sources.
            rows_of: For each source, the index of the row that each of its sequences was made of.
            source: Which of the sources each sequence is from.
            index: Its index there.
        """
        import numpy as np

        files: list[str] = []
        units: list[str] = []
        file = np.empty(len(index), dtype=np.int32)
        number = np.empty(len(index), dtype=np.int32)
        for position, rows in enumerate(sources):
            here = source == position
            row = np.asarray(rows_of[position])[index[here]]
            parts = rows.parts or (Part(0, rows.source),)
            firsts = np.array([part.first for part in parts])
            file[here] = len(files) + np.searchsorted(firsts, row, side="right") - 1
            number[here] = np.asarray(rows.numbers)[row]
            files += [part.name for part in parts]
            units += [rows.unit] * len(parts)
        return cls(tuple(files), tuple(units), file, number)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read locations that `save` wrote."""
        import numpy as np

        with np.load(path) as archive:
            files, units = (tuple(archive[name].tolist()) for name in ("files", "units"))
            return cls(files, units, archive["in_file"], archive["number"])

    def save(self, path: Path) -> None:
        """Write them to an `.npz` file."""
        import numpy as np

        files, units = np.array(self.files), np.array(self.units)
        np.savez(path, files=files, units=units, in_file=self.file, number=self.number)

    def __getitem__(self, row: int) -> str:
        """Return the location of a row: `chats.jsonl:17`, or `chats.parquet row 17`."""
        file = int(self.file[row])
        return place(self.files[file], cast(Literal["line", "row"], self.units[file]), int(self.number[row]))


@dataclass(frozen=True)
class LeftOut:
    """Stands for a row that the function left out."""


def converted(table: Table, function: Callable[[Any], Any]) -> Table:
    """A source whose records are what the function makes of those of another."""

    def read(_: Sequence[str]) -> Iterator[Record]:
        for record in table.read(table.columns or ()):
            value = _called(function, record.value) if isinstance(record.value, dict) else record.value
            yield Record(record.number, value)

    return Table(columns=None, read=read, unit=table.unit)


def _called(function: Callable[[Any], Any], row: dict[str, Any]) -> object:
    try:
        result = function(row)
    except Exception as error:  # noqa: BLE001  (the function is the user's: it may raise anything, and the row is bad)
        message = " ".join(str(error).split())
        return Fault(f"the row function raised {type(error).__name__}" + (f": {message[:200]}" if message else ""))
    if result is None:
        return LeftOut()
    if not isinstance(result, dict):
        return Fault(f"the row function must return a row (a dict) or None, got {described(result)}")
    try:
        return json.loads(json.dumps(result))  # its own objects, and lists where it has tuples
    except (TypeError, ValueError) as error:
        return Fault(f"the row function returned a value that JSON cannot represent: {error}")
