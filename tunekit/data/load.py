"""From the data section of a recipe to valid rows.

A source is a local file, several of them (a folder or a pattern), a file that ships with tunekit (`example:NAME`) or
a dataset of the hub; `sources` tells which from its name. Its format is recognised from its columns, every row is
checked, and all that is wrong is told together, each fault with its place. Rows that come out of here can be trained
on.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tunekit.data import hub
from tunekit.data.columns import check_mapping, missing_columns, name_in_file, renamed
from tunekit.data.convert import Findings, conversion, convert_row
from tunekit.data.files import OPENERS, Fault, Table
from tunekit.data.formats import (
    BECOMES,
    COLUMNS,
    OPTIONAL_COLUMNS,
    BadRow,
    Row,
    SourceFormat,
    check_columns,
    counted,
    listed,
    recognise,
)
from tunekit.data.holdout import hold_out
from tunekit.data.remote import shown
from tunekit.data.rows import Part, Rows, RowStore, Skipped, place
from tunekit.data.sources import find_files
from tunekit.errors import DataError
from tunekit.recipe.schema import DataSection, DataSource

__all__ = ["LoadedData", "Rows", "load_data", "load_rows"]

_FAULTS_SHOWN = 5
_SKIPPED_SHOWN = 3

AnyFormat = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]
"""A format, or that it is to be recognised."""


@dataclass(frozen=True)
class LoadedData:
    """The rows of a recipe.

    Attributes:
        train: Rows to train on.
        eval: Rows to evaluate on, of the same format.
        notes: What was found and decided on the way, a sentence each.
        skipped: Bad rows that were left out, as `data.max_bad_rows` allows.
    """

    train: Rows
    eval: Rows | None
    notes: list[str]
    skipped: tuple[Skipped, ...] = ()


def load_data(section: DataSection) -> LoadedData:
    """Read and check the rows of a recipe.

    Raises:
        DataError: A source cannot be found or read, a row is not valid, or train and eval differ in format.
    """
    check_mapping(section.columns)
    train = _load(section, section.train, key="data.train", default_split="train")
    if section.eval_size is not None:
        kept, held_out = hold_out(train, section.eval_size)
        note = (
            f"{train.source}: {len(held_out):,} of {counted(len(train), 'row')} held out for evaluation, chosen by "
            f"their content (data.eval_size={section.eval_size:g}); {len(kept):,} left to train on"
        )
        return LoadedData(train=kept, eval=held_out, notes=[*train.notes, note], skipped=train.skipped)
    if section.eval is None:
        return LoadedData(train=train, eval=None, notes=list(train.notes), skipped=train.skipped)
    evaluated = _load(section, section.eval, key="data.eval", default_split="eval")
    if evaluated.format != train.format:
        raise DataError(
            f"data.eval: '{evaluated.source}' holds rows of {evaluated.format}, "
            f"but '{train.source}' holds rows of {train.format}",
            hint="give both the same columns",
        )
    return LoadedData(
        train=train,
        eval=evaluated,
        notes=[*train.notes, *evaluated.notes],
        skipped=train.skipped + evaluated.skipped,
    )


def _load(section: DataSection, source: DataSource, *, key: str, default_split: Literal["train", "eval"]) -> Rows:
    return load_rows(
        source,
        key=key,
        format=section.format,
        columns=section.columns,
        max_bad_rows=section.max_bad_rows,
        default_split=default_split,
    )


def load_rows(
    source: DataSource,
    *,
    key: str,
    format: AnyFormat,
    default_split: Literal["train", "eval"],
    columns: Mapping[str, str] = {},
    max_bad_rows: int = 0,
) -> Rows:
    """Read and check the rows of one source.

    Args:
        source: The source as the recipe gives it.
        key: The recipe's key of the source (`data.train`), for messages.
        format: The format that the rows must have; `auto` recognises it from the columns.
        default_split: What is wanted of a hub dataset where the source names no split.
        columns: From our names of columns to those of the source, where they differ.
        max_bad_rows: So many bad rows are left out.

    Raises:
        DataError: The source cannot be found or read, or rows are not valid; the message names the first of them.
    """
    files = find_files(source, key=key)
    if files is None:
        reader = _Reader(source.path, format, columns, max_bad_rows)
        reader.read(source.path, hub.open_hub(source, key=key, default_split=default_split))
        return reader.rows(num_files=1, is_text=False)
    reader = _Reader(shown(source.path), format, columns, max_bad_rows)
    for file in files.found:
        reader.read(file.name, OPENERS[files.kind](file))
    rows = reader.rows(num_files=len(files.found), is_text=files.kind == ".txt")
    return replace(rows, notes=rows.notes + files.notes)


@dataclass(frozen=True)
class _FirstRow:
    """The names by which a format is recognised: a table's header, or the keys of the first object."""

    columns: tuple[str, ...]
    number: int | None


def _first_row(table: Table) -> _FirstRow | None:
    """The header of a table or its first row that is an object; None if no row is one."""
    if table.columns is not None:
        return _FirstRow(table.columns, number=1 if table.unit == "line" else None)
    for record in table.read(()):
        if isinstance(record.value, dict):
            return _FirstRow(tuple(record.value), number=record.number)
    return None


class _Reader:
    """Reads the rows of the files of one source, or gathers what is wrong with them."""

    def __init__(self, source: str, format: AnyFormat, columns: Mapping[str, str], max_bad_rows: int) -> None:
        self._source = source
        self._recognised = format == "auto"
        self._format: SourceFormat | None = None if format == "auto" else format
        self._columns = columns
        self._max_bad_rows = max_bad_rows
        self._store, self._numbers = RowStore(), array("Q")
        self._parts: list[Part] = []
        self._unit: Literal["line", "row"] = "line"
        self._findings = Findings()
        self._bad: list[Skipped] = []
        self._num_bad = 0
        self._ignored: set[str] = set()
        self._seen: set[str] = set()
        self._passed_on: set[str] = set()
        self._cut_short = False

    def read(self, name: str, table: Table) -> None:
        """Read all rows of one file."""
        format = self._settle_format(name, table)
        self._parts.append(Part(len(self._store), name))
        self._unit = table.unit
        ours = (*COLUMNS[format], *OPTIONAL_COLUMNS[format])
        theirs = [name_in_file(column, self._columns) for column in ours]
        if table.columns is not None:
            self._note_columns(table.columns, theirs)
        wanted = [column for column in theirs if table.columns is None or column in table.columns]
        num_records = 0
        for record in table.read(wanted):
            num_records += 1
            where = place(name, table.unit, record.number)
            try:
                if isinstance(record.value, Fault):
                    where += f":{record.value.column}" if record.value.column else ""
                    self._cut_short |= record.value.ends
                    raise BadRow(record.value.what)
                row = self._row(record.value, format)
            except (BadRow, RecursionError) as error:
                # JSON in a string of the row, or what was read just within the limit, may be too deep to be written.
                self._num_bad += 1
                if len(self._bad) < max(_FAULTS_SHOWN, self._max_bad_rows):
                    self._bad.append(Skipped(where, str(error) if isinstance(error, BadRow) else "nested too deeply"))
                continue
            self._store.append(row)
            self._numbers.append(record.number)
            if table.columns is None and isinstance(record.value, dict):
                self._note_columns(tuple(record.value), theirs)
            if "messages" in row:
                self._passed_on.update(*(message.keys() for message in row["messages"]))
        if num_records == 0:
            raise DataError(f"{name}: there are no rows in it")

    def rows(self, *, num_files: int, is_text: bool) -> Rows:
        """All rows that were read.

        Raises:
            DataError: More rows are bad than may be, or none is good.
        """
        format = self._format or "messages"
        if self._num_bad > self._max_bad_rows or self._cut_short or (self._num_bad and not self._store):
            raise DataError("\n".join(self._faults()))
        unread = [theirs for theirs in self._columns.values() if theirs not in self._seen]
        if unread:
            raise DataError(f"data.columns: '{self._source}' has no column {listed(unread)} in any row")
        notes = [self._note(format, num_files, is_text=is_text)]
        if self._bad:
            notes.append(self._note_of_bad_rows())
        return Rows(
            format=BECOMES[format],
            rows=self._store,
            source=self._source,
            numbers=self._numbers,
            unit=self._unit,
            notes=tuple(notes),
            read_as=format,
            parts=tuple(self._parts) if self._parts[0].name != self._source else (),
            skipped=tuple(self._bad),
        )

    def _settle_format(self, name: str, table: Table) -> SourceFormat:
        """The format of the source, told from its first file; the columns of every file are checked."""
        first = _first_row(table)
        if first is None:
            # Where no row is an object there is nothing to recognise; reading then reports what the rows are instead.
            return self._format or "messages"
        where = name if first.number is None else f"{name}:{first.number}"
        missing = missing_columns(first.columns, self._columns, only_needed=table.columns is None)
        if missing is not None:
            raise DataError(f"{where}: {missing}")
        columns = tuple(renamed(dict.fromkeys(first.columns), self._columns))
        try:
            if self._format is None:
                self._format = recognise(columns)
            elif table.columns is not None:
                check_columns(columns, self._format)
        except BadRow as error:
            raise DataError(f"{where}: {error}") from None
        return self._format

    def _row(self, value: object, format: SourceFormat) -> Row:
        if isinstance(value, dict):
            for ours in COLUMNS[format]:
                if ours in self._columns and self._columns[ours] not in value:
                    raise BadRow(f"no column {listed([self._columns[ours]])}, which data.columns reads as {ours}")
            value = renamed(value, self._columns)
        row = convert_row(value, format, self._findings)
        if format == "prompt_completion":
            _check_kind(row, self._store)
        return row

    def _note_columns(self, columns: tuple[str, ...], read: list[str]) -> None:
        self._seen.update(columns)
        self._ignored.update(column for column in columns if column not in read)

    def _faults(self) -> list[str]:
        faults = [f"{bad.place}: {bad.reason}" for bad in self._bad[:_FAULTS_SHOWN]]
        if self._num_bad > len(faults):
            faults.append(f"{self._source}: and {counted(self._num_bad - len(faults), 'more bad row')}")
        if self._max_bad_rows == 0:
            return faults
        if self._num_bad > self._max_bad_rows:
            why = f"{counted(self._num_bad, 'bad row')}, and data.max_bad_rows={self._max_bad_rows} allows no more"
        elif self._cut_short:
            why = "what stands behind a fault like this cannot be read, so data.max_bad_rows does not apply"
        else:
            why = "no good row is left"
        return [*faults, f"{self._source}: {why}"]

    def _note(self, format: SourceFormat, num_files: int, *, is_text: bool) -> str:
        """What was read, in a sentence."""
        of_files = "" if num_files == 1 else f" in {num_files:,} files"
        if is_text:
            documents = counted(len(self._store), "document")
            return f"{self._source}: {documents} of plain text{of_files} (two blank lines begin a new one)"
        note = f"{self._source}: {counted(len(self._store), 'row')}{of_files} of {format}"
        said = conversion(format, self._findings)
        columns = [name_in_file(column, self._columns) for column in COLUMNS[format]]
        if said:
            note += f": {said}"
        elif self._recognised:
            note += f" (recognised from the {'column' if len(columns) == 1 else 'columns'} {' and '.join(columns)})"
        if self._columns:
            note += "; data.columns: " + ", ".join(f"{theirs} -> {ours}" for ours, theirs in self._columns.items())
        if self._ignored:
            note += f"; ignored: {listed(sorted(self._ignored))}"
        also = (["the tools"] if "tools" in self._findings.columns else []) + (
            [f"{listed(sorted(keys))} of the messages"] if (keys := self._passed_on - {"role", "content"}) else []
        )
        return note + (f"; the chat template also gets {' and '.join(also)}" if also else "")

    def _note_of_bad_rows(self) -> str:
        shown = "; ".join(f"{bad.place}: {bad.reason}" for bad in self._bad[:_SKIPPED_SHOWN])
        more = f"; and {self._num_bad - _SKIPPED_SHOWN:,} more" if self._num_bad > _SKIPPED_SHOWN else ""
        left_out = f"{counted(self._num_bad, 'bad row')} left out (data.max_bad_rows={self._max_bad_rows})"
        return f"{self._source}: {left_out}: {shown}{more}"


def _check_kind(row: Row, before: RowStore) -> None:
    """Prompts are all strings or all lists of messages: they become tokens in different ways."""
    if before and isinstance(row["prompt"], list) != isinstance(before[0]["prompt"], list):
        here, there = ("lists of messages", "strings") if isinstance(row["prompt"], list) else ("strings", "lists")
        raise BadRow(f"prompt and completion are {here}, but in the first row they are {there}")
