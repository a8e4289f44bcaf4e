"""Files as numbered records: JSON lines, JSON lists, CSV, TSV, Parquet, Arrow and plain text.

Every reader gives each record the line where it starts in the file, as an editor counts lines, so that a bad row
can be found. Records are read one at a time and checked here for syntax only; `formats` judges what they say.
A record that cannot be read is a `Fault` among the records, so that one pass reports all of them; what makes
the rest of a file unreadable (another encoding, a binary file) stops at once with a `DataError`. Text may be
compressed with gzip or zstd; its lines are counted as they stand in the text.
"""

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol, cast

from tunekit.data.formats.row_formats import counted, listed
from tunekit.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class File(Protocol):
    """A file of rows, on this machine or another one."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def suffix(self) -> str:
        """Suffix of its own name, one of `DATA_SUFFIXES`."""

    def open(self) -> BinaryIO:
        """Its bytes from the start."""


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine, and its name in messages."""

    path: Path
    name: str

    @property
    def suffix(self) -> str:
        """Suffix of its own name, one of `DATA_SUFFIXES`."""
        return suffix_of(self.path.name)

    def open(self) -> BinaryIO:
        """Its bytes from the start."""
        return self.path.open("rb")


@dataclass(frozen=True)
class Fault:
    """A record that cannot be read, and why.

    Attributes:
        what: What is wrong.
        column: Where in its line, counted from 1, if that is known.
        ends: Nothing can be read behind it: more than one row may be lost.
        text: The record itself, where it is a line.
    """

    what: str
    column: int | None = None
    ends: bool = False
    text: str = ""


@dataclass(frozen=True)
class Record:
    """One record of a file: the line (or row) where it starts, counted from 1, and what stands there."""

    number: int
    value: object


@dataclass(frozen=True)
class Table:
    """A source opened for reading.

    Attributes:
        columns: Names of the columns, or None where each record brings its own.
        read: From the names of the wanted columns to the records; columns that cost nothing to read may come too.
        unit: What `Record.number` counts.
    """

    columns: tuple[str, ...] | None
    read: Callable[[Sequence[str]], Iterator[Record]]
    unit: Literal["line", "row"] = "line"


def open_jsonl(file: File) -> Table:
    """JSON lines: one object per line; blank lines are allowed."""

    def read(_: Sequence[str]) -> Iterator[Record]:
        for number, line in _lines(file):
            if not line.strip():
                continue
            value = _parse(line.removesuffix("\n"))
            if isinstance(value, Fault) and line.strip() in ("[", "{"):
                problem = f"{file.name}:{number}: a JSON value spans several lines; .jsonl needs one object per line"
                raise DataError(problem, hint="put each object on one line, or save a JSON list as a .json file")
            if isinstance(value, Fault):
                value = replace(value, text=line.strip())
            yield Record(number, value)

    return Table(columns=None, read=read)


def open_json(file: File) -> Table:
    """A JSON list of objects, or JSON lines under the wrong suffix."""
    text = "".join(line for _, line in _lines(file))
    start = _skip_space(text, 0)
    if text[start : start + 1] == "{":
        first_line = text[start:].split("\n", 1)[0]
        if isinstance(_parse(first_line), dict):
            return open_jsonl(file)
        _refuse_single_object(text, file.name)

    def read(_: Sequence[str]) -> Iterator[Record]:
        yield from _list_items(text, start)

    return Table(columns=None, read=read)


def open_cells(file: File, delimiter: str, spoken: str) -> Table:
    """Values separated by commas or tabs, with a header; cells in quotes may hold such marks and line breaks."""
    header = next(_csv_records(file, delimiter), None)
    if header is None:
        raise DataError(f"{file.name}: no rows")
    names = header.value
    if isinstance(names, Fault):
        raise DataError(f"{file.name}:{header.number}: {names.what}")
    assert isinstance(names, list)
    doubled = sorted(column for column, times in Counter(names).items() if column and times > 1)
    if doubled:
        problem = f"{file.name}:{header.number}: duplicate columns {listed(doubled)} in the header"
        raise DataError(problem, hint="rename one of them")
    separators = ((";", "semicolons", f"save the file with {spoken}s"), ("\t", "tabs", "rename the file to .tsv"))
    for mark, meaning, advice in separators:
        if len(names) == 1 and mark in names[0]:
            raise DataError(f"{file.name}:{header.number}: columns separated by {meaning}", hint=advice)

    def read(_: Sequence[str]) -> Iterator[Record]:
        records = _csv_records(file, delimiter)
        next(records)
        for record in records:
            cells = record.value
            if isinstance(cells, list) and len(cells) != len(names):
                advice = f"; quote cells that contain a {spoken}" if len(cells) > len(names) else ""
                what = f"{counted(len(cells), 'cell')}, but the header has {len(names)}{advice}"
                yield Record(record.number, Fault(what))
            elif isinstance(cells, list):
                yield Record(record.number, dict(zip(names, cells, strict=True)))
            else:
                yield record

    return Table(columns=tuple(names), read=read)


def open_parquet(file: File) -> Table:
    """A Parquet file; only the wanted columns are read."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        columns = tuple(pq.ParquetFile(file.open()).schema_arrow.names)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{file.name}: not a Parquet file ({_first_line(error)})") from error
    except OSError as error:
        raise DataError(f"{file.name}: cannot read the file ({_first_line(error)})") from error

    def batches(wanted: list[str]) -> Iterator[Any]:
        parquet = pq.ParquetFile(file.open())
        yield from parquet.iter_batches(batch_size=_rows_at_once(parquet.metadata, wanted), columns=wanted)

    return _open_batches(file, columns, batches, "Parquet file is truncated or damaged")


def _open_batches(
    file: File, columns: tuple[str, ...], batches: Callable[[list[str]], Iterator[Any]], broken: str
) -> Table:
    """A table whose rows come in batches of Arrow.

    Args:
        file: The file.
        columns: Its columns.
        batches: From the wanted columns to the batches.
        broken: What is wrong where they end too early, for messages.
    """
    import pyarrow as pa

    def read(wanted: Sequence[str]) -> Iterator[Record]:
        number = 0
        try:
            for batch in batches(list(wanted)):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(number, without_nested_nulls(value))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.name} row {number + 1}: the {broken} ({_first_line(error)})") from error

    return Table(columns=columns, read=read, unit="row")


def _rows_at_once(metadata: Any, wanted: Sequence[str]) -> int:
    """Return how many rows may be read together: a value that all rows share is stored in the file once.

    No value is larger than what its column takes in a group of rows.
    """
    largest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = (group.column(column) for column in range(group.num_columns))
        read = (chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in wanted)
        largest = max(largest, sum(chunk.total_uncompressed_size for chunk in read))
    return int(min(1000, max(1, BATCH_BYTES // largest)))


def open_arrow(file: File) -> Table:
    """An Arrow file or stream (IPC), also called Feather; only the wanted columns are read."""
    import pyarrow as pa

    try:
        columns = tuple(next(_arrow_batches(file)).schema.names)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file.name}: not an Arrow file ({_first_line(error)})") from error
    except StopIteration:
        raise DataError(f"{file.name}: no rows") from None

    def batches(wanted: list[str]) -> Iterator[Any]:
        for batch in _arrow_batches(file):
            chosen = batch.select(wanted)
            yield from (chosen.slice(start, 1000) for start in range(0, len(chosen), 1000))

    return _open_batches(file, columns, batches, "Arrow file is damaged")


def _arrow_batches(file: File) -> Iterator[Any]:
    """The batches of an Arrow file, or of a stream, which begins without the name of the format."""
    import pyarrow as pa

    assert isinstance(file, LocalFile)  # on another machine it would not be mapped but read whole; it is fetched
    with pa.memory_map(str(file.path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(mapped)
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)
        else:
            mapped.seek(0)
            yield from pa.ipc.open_stream(mapped)


def without_nested_nulls(value: Any) -> Any:
    """A row of a table without what its messages, tools and calls do not have.

    A table gives every object in a column the keys of all objects in it, as nulls; an object that has no such key
    cannot be told from one whose key is null.
    """
    return {name: _without_nulls(item) for name, item in value.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(nested) for key, nested in value.items() if nested is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def open_text(file: File) -> Table:
    """Plain text: documents parted by two or more blank lines; a single blank line only ends a paragraph.

    A text without such a gap is one document. To train on every line by itself, or on documents that hold gaps,
    write JSON lines with a column `text`.
    """

    def read(_: Sequence[str]) -> Iterator[Record]:
        lines: list[str] = []
        start = num_blank = 0
        for number, line in _lines(file):
            if not line.strip():
                num_blank += 1
                continue
            if lines and num_blank >= 2:
                yield Record(start, {"text": "".join(lines).rstrip()})
                lines = []
            if not lines:
                start, num_blank = number, 0
            lines.append("\n" * num_blank + line)
            num_blank = 0
        if lines:
            yield Record(start, {"text": "".join(lines).rstrip()})

    return Table(columns=("text",), read=read)


OPENERS: dict[str, Callable[[File], Table]] = {
    ".jsonl": open_jsonl,
    ".json": open_json,
    ".csv": partial(open_cells, delimiter=",", spoken="comma"),
    ".tsv": partial(open_cells, delimiter="\t", spoken="tab"),
    ".parquet": open_parquet,
    ".arrow": open_arrow,
    ".feather": open_arrow,
    ".txt": open_text,
}
"""Reader of each kind of file."""

MAX_LINE_BYTES = 2**27
"""Longest line that is read, in bytes: a row of a few hundred million letters is none to train on."""

FREE_BYTES, MAX_RATIO = 2**28, 200
"""Bytes that any file may decompress to, and the largest ratio beyond that; text compresses 3 to 20 times."""

BATCH_BYTES = 2**29
"""Most bytes that rows of a Parquet file take which are read together."""

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_COMPRESSIBLE = (".jsonl", ".json", ".csv", ".tsv", ".txt")

DATA_SUFFIXES = (*OPENERS, *(kind + ending for ending in _COMPRESSIONS for kind in _COMPRESSIBLE))
"""Every suffix of a file that is read."""


STREAMED = (".jsonl", ".csv", ".tsv", ".txt", ".parquet")
"""Kinds that are read from another machine as they come."""


def kind_of(name: str) -> str | None:
    """The kind of a file by its name (`.jsonl` for `chats.jsonl.gz`), or None if it is not read."""
    suffix = suffix_of(name)
    return "." + suffix.split(".")[1] if suffix else None


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name (`.jsonl.gz` for `chats.jsonl.gz`); empty if the format is not supported."""
    lowered = name.lower()
    return next((suffix for suffix in DATA_SUFFIXES if lowered.endswith(suffix)), "")


_BINARY_STARTS = {
    b"\x1f\x8b": ("compressed with gzip", "rename it to end in .gz"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "rename it to end in .zst"),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "extract it, or export it as CSV"),
    b"PAR1": ("a Parquet file", "rename it to .parquet"),
    b"ARROW1": ("an Arrow file", "rename it to .arrow"),
    b"SQLite format 3": ("a SQLite database", "export it as CSV or JSON Lines"),
    codecs.BOM_UTF16_LE: ("encoded as UTF-16", "save it as UTF-8"),
    codecs.BOM_UTF16_BE: ("encoded as UTF-16", "save it as UTF-8"),
}


_SPACE = re.compile(r"[ \t\n\r]*")  # what JSON counts as white space


def _lines(file: File) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers; a byte-order mark and carriage returns are taken off.

    Lines end at line feeds only: `str.splitlines` would also split at characters that may stand in a JSON string.
    """
    with opened(file) as lines:
        for number, raw in enumerate(_raw_lines(lines, file.name), start=1):
            if number == 1:
                for start, (kind, advice) in _BINARY_STARTS.items():
                    if raw.startswith(start):
                        raise DataError(f"{file.name}: the file is {kind}, not UTF-8 text", hint=advice)
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if b"\0" in raw:
                problem = f"{file.name}:{number}:{raw.index(0) + 1}: NUL byte in a text file"
                raise DataError(problem, hint="check whether it is a binary file, or save it as UTF-8")
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                problem = (
                    f"{file.name}:{number}: not UTF-8 (byte 0x{raw[error.start]:02x} at position {error.start + 1})"
                )
                raise DataError(problem, hint="save the file as UTF-8") from error
            yield number, line[:-2] + "\n" if line.endswith("\r\n") else line


def opened(file: File) -> BinaryIO:
    """The bytes of a file of text from the start, no longer compressed."""
    compression = next((_COMPRESSIONS[ending] for ending in _COMPRESSIONS if file.suffix.endswith(ending)), None)
    if compression is None:
        return file.open()
    import pyarrow as pa

    unpacked = pa.input_stream(file.open(), compression=compression)
    return cast(BinaryIO, io.BufferedReader(_Unpacked(unpacked, file)))


class ByteStream(io.RawIOBase):
    """Bytes that come in parts, for `io.BufferedReader`."""

    def part(self, num_bytes: int) -> bytes:
        """The next bytes, so many at most; none at the end."""
        raise NotImplementedError

    def readable(self) -> bool:
        """Return True: that is what it is for."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Read the next part into a buffer, and return how long it is."""
        view = memoryview(buffer).cast("B")
        part = self.part(len(view))
        view[: len(part)] = part
        return len(part)


class _Unpacked(ByteStream):
    """The bytes of a compressed file, up to a limit: a small file can unpack to more than any memory or disk holds."""

    def __init__(self, stream: Any, file: File) -> None:
        self._stream, self._name = stream, file.name
        size = file.path.stat().st_size if isinstance(file, LocalFile) else vars(file).get("size_bytes")
        self._left = max(FREE_BYTES, MAX_RATIO * int(size or 0))

    def part(self, num_bytes: int) -> bytes:
        part: bytes = self._stream.read(num_bytes)
        self._left -= len(part)
        if self._left < 0:
            problem = f"{self._name}: the file decompresses to more than {MAX_RATIO} times its size"
            raise DataError(problem, hint="if this is expected, decompress it and use the result")
        return part

    def close(self) -> None:
        self._stream.close()
        super().close()


def _raw_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    number = 0
    try:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                problem = f"{name}:{number}: line longer than {MAX_LINE_BYTES:,} bytes"
                raise DataError(problem, hint="write one row per line")
            yield line
    except OSError as error:
        raise DataError(f"{name}: cannot read the whole file ({_first_line(error)})") from error


def _parse(text: str) -> object:
    """One JSON value, or a Fault."""
    if text.startswith("\ufeff"):
        return Fault("byte-order mark (U+FEFF) not at the start of the file", column=1)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        what, position = _broken_json(error)
        return Fault(what, column=None if position is None else position + 1)


def _broken_json(error: ValueError | RecursionError) -> tuple[str, int | None]:
    """Return the problem with a JSON text and the position of the offending character, where it is one.

    From 3.13 on Python names a trailing comma; until then it names what it expected behind it.
    """
    if isinstance(error, RecursionError):
        return "JSON is nested too deeply", None
    if not isinstance(error, json.JSONDecodeError):  # a number of more than 4300 digits
        return f"invalid JSON: {_lowered(_first_line(error))}", None
    text, position = error.doc, error.pos
    comma = position if error.msg.startswith("Illegal trailing comma") else len(text[:position].rstrip()) - 1
    if error.msg.startswith(("Illegal trailing comma", "Expecting value", "Expecting property name")):
        behind = _skip_space(text, comma + 1)
        if text[comma : comma + 1] == "," and text[behind : behind + 1] in ("]", "}"):
            return f"invalid JSON: trailing comma before {text[behind]}", comma
    return f"invalid JSON: {_lowered(error.msg)}", position


def _list_items(text: str, start: int) -> Iterator[Record]:
    """The items of a JSON list, each with the line where it begins; a syntax error ends it with a Fault."""
    if not text[start:]:
        return
    if text[start] != "[":
        yield _end_of_list(text, start, "a .json file must hold a list of objects: [{...}, {...}]", has_column=False)
        return
    decoder = json.JSONDecoder()
    position = _skip_space(text, start + 1)
    counted, line = 0, 1
    closed = text[position : position + 1] == "]"
    while not closed:
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            what, at = _broken_json(error)
            yield _end_of_list(text, position if at is None else at, what, has_column=at is not None)
            return
        yield Record(line, value)
        position = _skip_space(text, position)
        closed = text[position : position + 1] == "]"
        if not closed and text[position : position + 1] != ",":
            what = "the list is not closed" if position >= len(text) else "expecting ',' or ']'"
            yield _end_of_list(text, position, f"invalid JSON: {what}")
            return
        if not closed:
            position = _skip_space(text, position + 1)
    behind = _skip_space(text, position + 1)
    if behind < len(text):
        yield _end_of_list(text, behind, "invalid JSON: text after the end of the list", has_column=False)


def _end_of_list(text: str, position: int, what: str, *, has_column: bool = True) -> Record:
    """The fault at a position of a JSON list, behind which nothing can be read."""
    column = position - text.rfind("\n", 0, position) if has_column else None
    return Record(text.count("\n", 0, position) + 1, Fault(what, column=column, ends=True))


def _refuse_single_object(text: str, name: str) -> None:
    """A .json file that holds one object: say so, and which of its keys the rows may be under."""
    value = _parse(text)
    if not isinstance(value, dict):
        return
    lists = [key for key, item in value.items() if isinstance(item, list)]
    hint = f"save the list under key '{lists[0]}' as a separate file" if lists else "write [{...}, {...}]"
    raise DataError(f"{name}:1: the file holds one object, not a list of objects", hint=hint)


def _csv_records(file: File, delimiter: str) -> Iterator[Record]:
    """The rows of a CSV or TSV file as lists of cells, each with the line where it starts; blank lines are left out."""
    reader = csv.reader((line for _, line in _lines(file)), delimiter=delimiter, strict=True)
    while True:
        start = reader.line_num + 1
        # The csv module's limit of 128 KiB a cell is one setting for the whole process: put it back after each row.
        limit = csv.field_size_limit(2**31 - 1)
        value: list[str] | Fault
        try:
            value = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            unclosed = "unexpected end of data" in str(error)
            value = Fault("unclosed quote" if unclosed else f"invalid CSV: {error}", ends=unclosed)
        finally:
            csv.field_size_limit(limit)
        if value:
            yield Record(start, value)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]
