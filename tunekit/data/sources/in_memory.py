"""Rows that a caller holds in memory, written as JSON lines.

A list of dicts, a `datasets.Dataset`, a pandas or polars DataFrame, or any iterable of dicts becomes a file in the
user's cache folder that is named by its content. From there on it is a file like any other: plans, runs, fingerprints
and messages know no second kind of source. A row of the caller is a line of the file.

pandas, polars and datasets are recognized by the modules of the object's class, and imported by nobody.
"""

import base64
import hashlib
import io
import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Protocol

import platformdirs

from tunekit.data.sources.files import without_nested_nulls
from tunekit.data.sources.rows import cache_folder, clear_folder
from tunekit.errors import DataError


class Frame(Protocol):
    """A DataFrame of pandas or polars."""

    @property
    def columns(self) -> Any:
        """Names of its columns."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of its rows and columns."""


RowData = Iterable[Mapping[str, Any]] | Frame
"""Rows that a caller holds: dicts, a `datasets.Dataset`, or a DataFrame."""

FOLDER = "rows"
"""Folder of these files, in the user's cache folder."""

CHUNK_ROWS = 1000
"""Rows of a pandas DataFrame that are converted together."""

PNG_MODES = ("1", "I;16", "L", "LA", "P", "RGB", "RGBA")
"""Modes of pictures that PNG holds without loss."""


_MISSING = "drop the row, or pass None for a missing value: frame.astype(object).where(frame.notna(), None)"


class _UnwritableError(Exception):
    """A value that JSON does not hold: where in its row, what is wrong, and the remedy."""

    def __init__(self, what: str, hint: str, where: str = "") -> None:
        super().__init__(what)
        self.what, self.hint, self.where = what, hint, where


def write_rows(data: Any, name: str) -> Path:
    """Write rows as JSON lines, and return the file, which is named by its content.

    Args:
        data: The rows.
        name: The argument that has them, for messages.

    Raises:
        DataError: It holds no rows, a row is not a dict, or JSON cannot hold a value; or the file cannot be written.
    """
    rows = _rows_of(data, name)
    folder = cache_folder() / FOLDER
    draft = folder / f".{uuid.uuid4().hex}"
    digest, num_rows = hashlib.sha256(), 0
    try:
        folder.mkdir(exist_ok=True)
        with draft.open("xb") as file:
            for row in rows:
                line = _line(row, f"{name}[{num_rows}]")
                digest.update(line)
                file.write(line)
                num_rows += 1
        if not num_rows:
            raise DataError(f"{name}: no rows", hint="pass at least one row; a generator yields its rows only once")
        path = folder / f"{name}-{digest.hexdigest()[:16]}.jsonl"
        draft.replace(path)
    except OSError as error:
        problem = f"cannot write the rows of {name} to {folder}: {error.strerror}"
        raise DataError(problem, hint="free some space, or set XDG_CACHE_HOME") from error
    finally:
        draft.unlink(missing_ok=True)
    return path


def as_row(row: Any, place: str) -> dict[str, Any]:
    """Return a row as it would be read from the file that `write_rows` writes.

    Args:
        row: The row.
        place: Where it stands, for messages.

    Raises:
        DataError: It is not a dict, or JSON cannot hold a value of it.
    """
    read: dict[str, Any] = json.loads(_line(row, place))
    return read


def list_rows() -> list[Path]:
    """List these files."""
    return sorted((platformdirs.user_cache_path("tunekit") / FOLDER).glob("*.jsonl"))


def clear_rows() -> int:
    """Delete these files; return the bytes that were freed. Runs keep their own."""
    return clear_folder(platformdirs.user_cache_path("tunekit") / FOLDER)


def _rows_of(data: Any, name: str) -> Iterator[Any]:
    """Return the rows, one by one.

    Raises:
        DataError: It is no collection of rows.
    """
    kinds = {(base.__module__.partition(".")[0], base.__name__) for base in type(data).__mro__}
    if ("pandas", "DataFrame") in kinds:
        return _rows_of_pandas(data, name)
    if ("polars", "DataFrame") in kinds:
        return map(without_nested_nulls, data.iter_rows(named=True))
    if ("datasets", "Dataset") in kinds or ("datasets", "IterableDataset") in kinds:
        # Formats such as torch's would make tensors of its columns.
        rows = data.with_format(None)
        if "Audio(" in repr(data.features):
            # It is decoded while training, and by another package. Streams alone leave columns as they are.
            rows = (rows.to_iterable_dataset() if ("datasets", "Dataset") in kinds else rows).decode(False)
        return map(without_nested_nulls, rows)
    if ("polars", "LazyFrame") in kinds:
        raise DataError(f"{name}: a LazyFrame has no rows yet", hint=f"pass {name}=frame.collect()")
    if isinstance(data, str | bytes | PurePath):
        key = f"data.{name.removesuffix('_dataset')}"
        raise DataError(f"{name}: takes rows, got a path", hint=f"set {key} to the file or dataset")
    if isinstance(data, Mapping):
        if all(isinstance(value, Iterable) and not isinstance(value, str) for value in data.values()) and data:
            split = next(iter(data))
            hint = f"pass a split, such as dataset[{split!r}], or rows: [{{...}}, {{...}}]"
        else:
            hint = "pass a list of rows: [{...}]"
        raise DataError(f"{name}: takes rows, got a {type(data).__name__}", hint=hint)
    if not isinstance(data, Iterable):
        hint = "pass a list of dicts, a datasets.Dataset or a DataFrame"
        raise DataError(f"{name}: takes rows, got {type(data).__name__}", hint=hint)
    return iter(data)


def _rows_of_pandas(frame: Any, name: str) -> Iterator[Any]:
    columns = list(frame.columns)
    twice = [column for column in columns if columns.count(column) > 1]
    if twice:
        raise DataError(f"{name}: two columns are named {twice[0]!r}", hint="rename one of them")
    chunks = (frame.iloc[start : start + CHUNK_ROWS] for start in range(0, len(frame), CHUNK_ROWS))
    return (row for chunk in chunks for row in chunk.to_dict("records"))


def _line(row: Any, place: str) -> bytes:
    """Return a row as a line of JSON.

    Raises:
        DataError: It is not a dict, or JSON cannot hold a value of it.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: must be a dict, got {_named(row)}", hint="pass rows as dicts of columns")
    try:
        return json.dumps(_plain(row, ""), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except _UnwritableError as error:
        raise DataError(f"{place}{error.where}: {error.what}", hint=error.hint) from None
    except RecursionError:
        raise DataError(f"{place}: nested too deeply", hint="shorten the row, or break its cycle") from None
    except UnicodeEncodeError as error:
        what = f"holds half a character ({error.object[error.start]!r})"
        raise DataError(f"{place}: {what}", hint="decode the text with errors='replace'") from None


def _plain(value: Any, where: str) -> Any:
    """Return a value in the types of JSON.

    Raises:
        _UnwritableError: It has none.
    """
    if value is None or isinstance(value, bool | int | str):
        # A class derived from these is written as what it derives from.
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _UnwritableError(f"{value} is not a JSON value", _MISSING, where)
        return value
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes) and value.keys() <= {"bytes", "path"}:
            return f"data:;base64,{base64.b64encode(value['bytes']).decode()}"
        for key in value:
            if not isinstance(key, str):
                raise _UnwritableError(f"a key must be a string, got {_named(key)}", "rename it", where)
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{position}]") for position, item in enumerate(value)]
    for package, converted in _CONVERSIONS.items():
        if any(base.__module__.partition(".")[0] == package for base in type(value).__mro__):
            return converted(value, where)
    raise _unwritable(value, where)


def _of_numpy(value: Any, where: str) -> Any:
    plain = value.tolist()  # of scalars too
    if type(plain) is type(value):
        raise _unwritable(value, where)
    return _plain(plain, where)


def _of_picture(value: Any, where: str) -> str:
    """Return a picture as a data URL of the same pixels."""
    if value.mode not in PNG_MODES:
        what = f"an image of mode {value.mode}, which PNG does not support"
        raise _UnwritableError(what, "convert it: picture.convert('RGB')", where)
    png = io.BytesIO()
    value.save(png, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


_CONVERSIONS: dict[str, Callable[[Any, str], Any]] = {"numpy": _of_numpy, "PIL": _of_picture}
"""Conversions of values, by the package of their class."""


def _unwritable(value: Any, where: str) -> _UnwritableError:
    hint = "convert it to text or a number"
    if type(value).__name__ in ("NAType", "NaTType"):
        hint = _MISSING
    if isinstance(value, bytes | bytearray):
        hint = "decode it to text; of an image, pass a PIL image or its path"
    elif type(value).__module__.partition(".")[0] == "torch":
        hint = "convert it: tensor.tolist()"
    return _UnwritableError(f"{_named(value)} is not a JSON value", hint, where)


def _named(value: Any) -> str:
    return "None" if value is None else type(value).__name__
