"""From the data section of a recipe to valid rows.

A source is a local file, a file that ships with tunekit (`example:NAME`) or a dataset of the hub; what kind it is
follows from its name. Its format is recognised from its columns, every row is checked, and all that is wrong is
told together, each fault with its place. Rows that come out of here can be trained on.
"""

from array import array
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from tunekit.data import hub
from tunekit.data.files import OPENERS, Fault, Table
from tunekit.data.formats import COLUMNS, BadRow, Format, Row, check_columns, check_row, counted, listed, recognise
from tunekit.data.rows import Rows, RowStore, place
from tunekit.errors import DataError
from tunekit.recipe.library import find_example
from tunekit.recipe.schema import DataSection, DataSource

__all__ = ["LoadedData", "Rows", "find_file", "load_data", "load_rows"]

EXAMPLE_PREFIX = "example:"
"""Marks a file that ships with tunekit."""

_FAULTS_SHOWN = 5


@dataclass(frozen=True)
class LoadedData:
    """The rows of a recipe.

    Attributes:
        train: Rows to train on.
        eval: Rows to evaluate on, of the same format.
        notes: What was found and decided on the way, a sentence each.
    """

    train: Rows
    eval: Rows | None
    notes: list[str]


def load_data(section: DataSection) -> LoadedData:
    """Read and check the rows of a recipe.

    Raises:
        DataError: A source cannot be found or read, a row is not valid, or train and eval differ in format.
    """
    train = load_rows(section.train, key="data.train", format=section.format, default_split="train")
    if section.eval is None:
        return LoadedData(train=train, eval=None, notes=list(train.notes))
    held_out = load_rows(section.eval, key="data.eval", format=section.format, default_split="eval")
    if held_out.format != train.format:
        raise DataError(
            f"data.eval: '{held_out.source}' holds rows of {held_out.format}, "
            f"but '{train.source}' holds rows of {train.format}",
            hint="give both the same columns",
        )
    return LoadedData(train=train, eval=held_out, notes=[*train.notes, *held_out.notes])


def load_rows(
    source: DataSource,
    *,
    key: str,
    format: Literal["auto", "messages", "prompt_completion", "text"],
    default_split: Literal["train", "eval"],
) -> Rows:
    """Read and check the rows of one source.

    Args:
        source: The source as the recipe gives it.
        key: The recipe's key of the source (`data.train`), for messages.
        format: The format that the rows must have; `auto` recognises it from the columns.
        default_split: What is wanted of a hub dataset where the source names no split.

    Raises:
        DataError: The source cannot be found or read, or rows are not valid; the message names the first of them.
    """
    path = find_file(source, key=key)
    if path is None:
        table = hub.open_hub(source, key=key, default_split=default_split)
    else:
        table = OPENERS[path.suffix.lower()](path, source.path)
    first = _first_row(table, source.path)
    # Where no row is an object there is nothing to recognise; reading then reports what the rows are instead.
    known: Format = "messages" if format == "auto" else format
    try:
        if format == "auto" and first is not None:
            known = recognise(first.columns)
        elif table.columns is not None:
            check_columns(table.columns, known)
    except BadRow as error:
        where = source.path if first is None or first.number is None else f"{source.path}:{first.number}"
        raise DataError(f"{where}: {error}") from None
    return _read(table, source.path, known, recognised=format == "auto")


def find_file(source: DataSource, *, key: str) -> Path | None:
    """The file that a source names, or None if it names a dataset of the hub.

    Raises:
        DataError: It names a file that is not there, a folder, or a kind of file that is not read.
    """
    name = source.path
    if name.startswith(EXAMPLE_PREFIX):
        path = find_example(name.removeprefix(EXAMPLE_PREFIX))
    else:
        path = Path(name).expanduser()
        if not _looks_like_file(name) and not path.exists():
            return None
    _check_file(path, name, key)
    for part, given in (("name", source.name), ("split", source.split), ("revision", source.revision)):
        if given is not None:
            raise DataError(f"{key}.{part}: only a hub dataset has one, and '{name}' is a file", hint="leave it out")
    return path


def _looks_like_file(name: str) -> bool:
    """Whether a name that is no existing file was meant as one rather than as a dataset of the hub."""
    if Path(name).suffix.lower() in OPENERS or hub.NAME.fullmatch(name) is None:
        return True
    # A dot in a hub name is common behind its owner (org/v1.5) and unknown without one (chats.tsv).
    return "/" not in name and "." in name


def _check_file(path: Path, name: str, key: str) -> None:
    """Refuse what is not a file that can be read."""
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix.lower() in OPENERS)
        hint = f"name a file in it: {listed(inside[:5])}" if inside else f"name a file ({listed(OPENERS)})"
        raise DataError(f"{key}.path: '{name}' is a folder", hint=hint)
    if not path.exists():
        there = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, there, n=1, cutoff=0.6)
        if not path.parent.is_dir():
            raise DataError(f"{key}.path: no file '{name}'", hint=f"there is no folder '{path.parent}'")
        where = "the working directory" if path.parent == Path() else str(path.parent)
        raise DataError(
            f"{key}.path: no file '{name}' in {where}",
            hint=f"did you mean '{path.with_name(near[0])}'?" if near else None,
        )
    if path.suffix.lower() not in OPENERS:
        kind = f"the suffix '{path.suffix}' is not known" if path.suffix else "the file has no suffix"
        raise DataError(f"{key}.path: '{name}': {kind}", hint=f"known are {listed(OPENERS)}")
    if not path.is_file():
        raise DataError(f"{key}.path: '{name}' is not a regular file")
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{key}.path: cannot read '{name}': {error.strerror}") from error
    if path.stat().st_size == 0:
        raise DataError(f"{key}.path: '{name}' is empty")


@dataclass(frozen=True)
class _FirstRow:
    """The names by which a format is recognised: a table's header, or the keys of the first object."""

    columns: tuple[str, ...]
    number: int | None


def _first_row(table: Table, source: str) -> _FirstRow | None:
    """The header of a table or its first row that is an object; None if no row is one."""
    if table.columns is not None:
        return _FirstRow(table.columns, number=1 if table.unit == "line" else None)
    record = None
    for record in table.read(()):
        if isinstance(record.value, dict):
            return _FirstRow(tuple(record.value), number=record.number)
    if record is None:
        raise DataError(f"{source}: there are no rows in it")
    return None


def _read(table: Table, source: str, format: Format, *, recognised: bool) -> Rows:
    """Read all rows, or report what is wrong with them."""
    store, numbers = RowStore(), array("Q")
    faults: list[str] = []
    num_bad = 0
    ignored = set(table.columns or ()) - set(COLUMNS[format])
    passed_on: set[str] = set()
    for record in table.read(COLUMNS[format]):
        where = place(source, table.unit, record.number)
        try:
            if isinstance(record.value, Fault):
                where += f":{record.value.column}" if record.value.column else ""
                raise BadRow(record.value.what)
            row = check_row(record.value, format)
            if format == "prompt_completion":
                _check_kind(row, store)
        except BadRow as error:
            num_bad += 1
            if num_bad <= _FAULTS_SHOWN:
                faults.append(f"{where}: {error}")
            continue
        store.append(row)
        numbers.append(record.number)
        if table.columns is None and isinstance(record.value, dict):
            ignored.update(record.value.keys() - row.keys())
        if format == "messages":
            passed_on.update(*(message.keys() for message in row["messages"]))
    if num_bad > len(faults):
        faults.append(f"{source}: and {counted(num_bad - len(faults), 'more bad row')}")
    if faults:
        raise DataError("\n".join(faults))
    if not store:
        raise DataError(f"{source}: there are no rows in it")
    note = _note(source, len(store), format, recognised=recognised, ignored=sorted(ignored))
    passed_on -= {"role", "content"}
    if passed_on:
        note += f"; the chat template also gets {listed(sorted(passed_on))} of the messages"
    return Rows(format=format, rows=store, source=source, numbers=numbers, unit=table.unit, notes=(note,))


def _check_kind(row: Row, before: RowStore) -> None:
    """Prompts are all strings or all lists of messages: they become tokens in different ways."""
    if before and isinstance(row["prompt"], list) != isinstance(before[0]["prompt"], list):
        here, there = ("lists of messages", "strings") if isinstance(row["prompt"], list) else ("strings", "lists")
        raise BadRow(f"prompt and completion are {here}, but in the first row they are {there}")


def _note(source: str, num_rows: int, format: Format, *, recognised: bool, ignored: list[str]) -> str:
    """What was read, in a sentence."""
    if source.lower().endswith(".txt"):
        return f"{source}: {counted(num_rows, 'document')} of plain text (two blank lines begin a new one)"
    note = f"{source}: {counted(num_rows, 'row')} of {format}"
    if recognised:
        columns = COLUMNS[format]
        note += f" (recognised from the {'column' if len(columns) == 1 else 'columns'} {' and '.join(columns)})"
    if ignored:
        note += f"; ignored: {listed(ignored)}"
    return note
