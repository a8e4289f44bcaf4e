"""From the data section of a recipe to valid rows.

A source is a local file, several of them (a folder or a pattern), a file that ships with tunekit (`example:NAME`) or
a dataset of the hub; `sources` tells which from its name. Its format is recognised from its columns, every row is
checked, and all that is wrong is told together, each fault with its place. Rows that come out of here can be trained
on.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from tunekit.data.formats.convert import Findings, conversion, convert_row
from tunekit.data.formats.messages import HoldsMediaError, looks_like_weights, media_kind
from tunekit.data.formats.row_formats import (
    BECOMES,
    COLUMNS,
    KNOWN,
    OPTIONAL_COLUMNS,
    BadRow,
    Learner,
    Row,
    check_columns,
    check_mapping,
    check_same_reading,
    counted,
    listed,
    missing_columns,
    recognise,
    renamed,
)
from tunekit.data.packing.sequences import hold_out
from tunekit.data.sources import hub
from tunekit.data.sources.files import OPENERS, Fault, Table
from tunekit.data.sources.find_files import find_files
from tunekit.data.sources.remote import shown
from tunekit.data.sources.rows import LeftOut, Part, Rows, RowStore, Skipped, converted, place
from tunekit.errors import DataError
from tunekit.recipe.functions import find_function
from tunekit.recipe.sections.data import CompleteSource, DataFormat, DataSection, DataSource, SourceFormat

__all__ = ["LoadedData", "Rows", "load_data", "load_rows"]

HEAD_ROWS = 1000
"""So many rows of a stream are looked at before training."""

_FAULTS_SHOWN = 5
_SKIPPED_SHOWN = 3


@dataclass(frozen=True)
class LoadedData:
    """The rows of a recipe.

    Attributes:
        train: Rows to train on, a source after the other; the first rows of each where they are streamed.
        eval: Rows to evaluate on.
        notes: What was found and decided on the way, a sentence each.
    """

    train: tuple[Rows, ...]
    eval: tuple[Rows, ...]
    notes: list[str]

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Bad rows that were left out, as `data.max_bad_rows` allows."""
        # Rows held out of a source carry what was skipped in it a second time.
        return tuple(dict.fromkeys(bad for rows in (*self.train, *self.eval) for bad in rows.skipped))


def load_data(section: DataSection, learner: Learner | None = None) -> LoadedData:
    """Read and check the rows of a recipe.

    Args:
        section: The sources, and how they are read.
        learner: The method that is to learn from them; None takes rows of every format.

    Raises:
        DataError: A source cannot be found or read, a row is not valid, or the method does not learn from such rows.
    """
    if section.streaming:
        train = tuple(_head(source, learner, section.max_bad_rows) for source in section.sources)
    else:
        train = _load(section.sources, learner, max_bad_rows=section.max_bad_rows, default_split="train")
    notes = [note for rows in train for note in rows.notes]
    if section.eval_size is not None:
        parted = [hold_out(rows, section.eval_size) for rows in train]
        notes += (
            f"{train_rows.source}: {len(held_out):,} of {counted(len(train_rows) + len(held_out), 'row')} "
            "held out for evaluation, "
            f"chosen by their content (data.eval_size={section.eval_size:g}); {len(train_rows):,} left to train on"
            for train_rows, held_out in parted
        )
        return LoadedData(
            tuple(train_rows for train_rows, _ in parted), tuple(held_out for _, held_out in parted), notes
        )
    evaluated = _load(section.eval_sources, learner, max_bad_rows=section.max_bad_rows, default_split="eval")
    notes += (note for rows in evaluated for note in rows.notes)
    return LoadedData(train, evaluated, notes)


def _load(
    sources: Sequence[CompleteSource],
    learner: Learner | None,
    *,
    max_bad_rows: int,
    default_split: Literal["train", "eval"],
) -> tuple[Rows, ...]:
    loaded = []
    for source in sources:
        check_mapping(source.columns)
        rows = load_rows(
            source,
            learner,
            key=source.key,
            format=source.format,
            columns=source.columns,
            max_bad_rows=max_bad_rows,
            default_split=default_split,
        )
        loaded.append(replace(rows, loss_on=source.loss_on))
    return tuple(loaded)


def _head(source: CompleteSource, learner: Learner | None, max_bad_rows: int) -> Rows:
    """The first rows of a stream."""
    head = next(stream_rows(source, learner, max_bad_rows=max_bad_rows, num_rows=HEAD_ROWS), None)
    if head is None:
        raise DataError(f"{source.key}: '{shown(source.path)}' has no row to train on")
    note = f"{head.source}: a stream, of which these are the first rows; the others are read while training"
    return replace(head, notes=(*head.notes, note))


def load_rows(
    source: DataSource,
    learner: Learner | None = None,
    *,
    key: str,
    format: DataFormat,
    default_split: Literal["train", "eval"],
    columns: Mapping[str, str] = {},
    max_bad_rows: int = 0,
) -> Rows:
    """Read and check the rows of one source.

    Args:
        source: The source as the recipe gives it.
        learner: The method that is to learn from them; None takes rows of every format.
        key: The recipe's key of the source (`data.train`), for messages.
        format: The format that the rows must have; `auto` recognises it from the columns, and `module:function` from
            those of the rows that the function makes.
        default_split: What is wanted of a hub dataset where the source names no split.
        columns: From our names of columns to those of the source, where they differ.
        max_bad_rows: So many bad rows are left out.

    Raises:
        DataError: The source cannot be found or read, or rows are not valid; the message names the first of them.
        RecipeError: There is no such function.
    """
    files = find_files(source, key=key)
    reader = Reader(shown(source.path), key, format, columns, max_bad_rows, learner)
    if files is None:
        deque(reader.read(source.path, hub.open_hub(source, key=key, default_split=default_split)), maxlen=0)
        return reader.rows(num_files=1, is_text=False)
    for file in files.found:
        deque(reader.read(file.name, OPENERS[files.kind](file)), maxlen=0)
    rows = reader.rows(num_files=len(files.found), is_text=files.kind == ".txt")
    return replace(rows, notes=rows.notes + files.notes)


def stream_rows(
    source: CompleteSource, learner: Learner | None = None, *, max_bad_rows: int, num_rows: int
) -> Iterator[Rows]:
    """The rows of one source in batches, read as they come and kept nowhere.

    Args:
        source: The source.
        learner: The method that is to learn from them; None takes rows of every format.
        max_bad_rows: So many bad rows are left out; each batch has those so far.
        num_rows: Rows of a batch.

    Raises:
        DataError: The source cannot be found or read on, or rows are not valid.
    """
    check_mapping(source.columns)
    reader = Reader(shown(source.path), source.key, source.format, source.columns, max_bad_rows, learner)
    for name, table in _tables(source):
        for _ in reader.read(name, table):
            if reader.num_held == num_rows:
                yield replace(reader.take(), loss_on=source.loss_on)
        remainder = reader.take()
        if len(remainder):
            yield replace(remainder, loss_on=source.loss_on)


def _tables(source: CompleteSource) -> Iterator[tuple[str, Table]]:
    files = find_files(source, key=source.key, streaming=True)
    if files is None:
        yield source.path, hub.open_hub(source, key=source.key, default_split="train", streaming=True)
        return
    for file in files.found:
        yield file.name, OPENERS[files.kind](file)


@dataclass(frozen=True)
class FirstRow:
    """The names by which a format is recognised: a table's header, or the keys of the first object."""

    columns: tuple[str, ...]
    number: int | None


def first_row(table: Table) -> FirstRow | None:
    """The header of a table or its first row that is an object; None if no row is one."""
    if table.columns is not None:
        return FirstRow(table.columns, number=1 if table.unit == "line" else None)
    for record in table.read(()):
        if isinstance(record.value, dict):
            return FirstRow(tuple(record.value), number=record.number)
    return None


class Reader:
    """Reads the rows of the files of one source, or gathers what is wrong with them."""

    def __init__(
        self,
        source: str,
        key: str,
        format: DataFormat,
        columns: Mapping[str, str],
        max_bad_rows: int,
        learner: Learner | None,
    ) -> None:
        self._source, self._key = source, key
        self._function = format if ":" in format else None
        self._recognised = format == "auto" or self._function is not None
        self.format = None if self._recognised else cast(SourceFormat, format)
        """The format of the source, once it is known."""
        self._columns = columns
        self._max_bad_rows = max_bad_rows
        self._learner = learner
        self._store, self._numbers = RowStore(), array("Q")
        self._parts: list[Part] = []
        self._unit: Literal["line", "row"] = "line"
        self._findings = Findings()
        self._bad: list[Skipped] = []
        self._num_bad = 0
        self._ignored: set[str] = set()
        self._references: dict[str, None] = {}
        self._seen: set[str] = set()
        self._passed_on: set[str] = set()
        self._read_alike: set[frozenset[str]] = set()
        self._prompts_are_chats: bool | None = None
        self._num_left_out = self._num_weightless = 0
        self._cut_short = False

    def read(self, name: str, table: Table) -> Iterator[None]:
        """Read the rows of one file into the store, and stop after each."""
        if self._function is not None:
            table = converted(table, find_function(self._function))
        format = self._settle_format(name, table)
        self._parts.append(Part(len(self._store), name))
        self._unit = table.unit
        mapped = self._note_columns(table.columns, format) if table.columns is not None else ()
        num_records = 0
        for record in table.read(mapped):
            num_records += 1
            where = place(name, table.unit, record.number)
            if isinstance(record.value, LeftOut):
                self._num_left_out += 1
                continue
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
                if isinstance(error, HoldsMediaError) and self._max_bad_rows == 0:
                    raise DataError("\n".join(self._faults())) from None  # and not read all images to say so
                continue
            self._store.append(row)
            self._numbers.append(record.number)
            if table.columns is None and isinstance(record.value, dict):
                self._note_columns(tuple(record.value), format)
            for message in _messages(row, format):
                self._passed_on.update(message.keys())
                self._num_weightless += message.get("weight") == 0
            yield
        if num_records == 0:
            raise DataError(f"{name}: there are no rows in it")

    @property
    def num_held(self) -> int:
        """Rows in the store."""
        return len(self._store)

    def take(self) -> Rows:
        """The rows in the store, of the file that is being read, and an empty store for those that follow.

        Raises:
            DataError: More rows are bad than may be.
        """
        format = self.format or "messages"
        if self._num_bad > self._max_bad_rows or self._cut_short:
            raise DataError("\n".join(self._faults()))
        notes = (self._note(format, 1, is_text=False),)
        rows = self._held(format, notes, parts=(Part(0, self._parts[-1].name),))
        self._store, self._numbers = RowStore(), array("Q")
        return rows

    def so_far(self, *, num_files: int = 1, is_text: bool = False) -> Rows:
        """The good rows that were read, and the bad ones, however many there are."""
        format = self.format or "messages"
        notes = (self._note(format, num_files, is_text=is_text),) if self.format is not None else ()
        return self._held(format, notes, parts=tuple(self._parts))

    def rows(self, *, num_files: int, is_text: bool) -> Rows:
        """All rows that were read.

        Raises:
            DataError: More rows are bad than may be, or none is good.
        """
        format = self.format or "messages"
        if self._num_bad > self._max_bad_rows or self._cut_short or (self._num_bad and not self._store):
            raise DataError("\n".join(self._faults()))
        if not self._store:
            raise DataError(f"{self._source}: {self._function} leaves out every row ({self._num_left_out:,})")
        unread = [theirs for theirs in self._columns.values() if theirs not in self._seen]
        if unread:
            raise DataError(f"data.columns: '{self._source}' has no column {listed(unread)} in any row")
        notes = [self._note(format, num_files, is_text=is_text)]
        if self._bad:
            notes.append(self._note_of_bad_rows())
        parts = tuple(self._parts) if self._parts[0].name != self._source else ()
        return self._held(format, tuple(notes), parts)

    def _held(self, format: SourceFormat, notes: tuple[str, ...], parts: tuple[Part, ...]) -> Rows:
        """The rows in the store."""
        return Rows(
            format=BECOMES[format],
            rows=self._store,
            source=self._source,
            numbers=self._numbers,
            unit=self._unit,
            notes=notes,
            read_as=format,
            parts=parts,
            skipped=tuple(self._bad),
        )

    def _settle_format(self, name: str, table: Table) -> SourceFormat:
        """The format of the source, told from its first file; the columns of every file are checked."""
        first = first_row(table)
        if first is None:
            # Where no row is an object there is nothing to recognise; reading then reports what the rows are instead.
            return self.format or "messages"
        where = name if first.number is None else f"{name}:{first.number}"
        missing = missing_columns(first.columns, self._columns, only_needed=table.columns is None)
        if missing is not None:
            raise DataError(f"{where}: {missing}")
        columns = tuple(renamed(dict.fromkeys(first.columns), self._columns))
        try:
            if self.format is None:
                self.format = recognise(columns)
            elif table.columns is not None:
                self._check_reading(columns, self.format)
        except BadRow as error:
            raise DataError(f"{where}: {error}") from None
        refusal = None if self._learner is None else self._learner.refusal(self.format, columns)
        if refusal is not None:
            raise DataError(f"{self._key}: '{self._source}' {refusal[0]}", hint=refusal[1])
        return self.format

    def _check_reading(self, columns: Sequence[str], format: SourceFormat) -> None:
        """Check that columns are those of the format, and, where it was recognised, of no other."""
        read = frozenset(column for column in columns if column in KNOWN)
        if read in self._read_alike:
            return
        check_columns(columns, format)
        if self._recognised:
            check_same_reading(columns, format)
        self._read_alike.add(read)

    def _row(self, value: object, format: SourceFormat) -> Row:
        if isinstance(value, dict):
            for ours in COLUMNS[format]:
                if ours in self._columns and self._columns[ours] not in value:
                    raise BadRow(f"no column {listed([self._columns[ours]])}, which data.columns reads as {ours}")
            value = renamed(value, self._columns)
            self._check_reading(tuple(value), format)
        row = convert_row(value, format, self._findings)
        if "prompt" in row:
            self._check_kind(row["prompt"])
        return row

    def _check_kind(self, prompt: object) -> None:
        """Prompts are all strings or all lists of messages: they become tokens in different ways."""
        is_chat = isinstance(prompt, list)
        if self._prompts_are_chats is None:
            self._prompts_are_chats = is_chat
        if is_chat != self._prompts_are_chats:
            here, there = ("a list of messages", "a string") if is_chat else ("a string", "a list of messages")
            raise BadRow(f"the prompt is {here}, but in the first row it is {there}")

    def _note_columns(self, columns: tuple[str, ...], format: SourceFormat) -> list[str]:
        """Those of the columns that are read, by their names in the file; the others are noted."""
        named = (self._columns.get(column, column) for column in (*COLUMNS[format], *OPTIONAL_COLUMNS[format]))
        read = [column for column in named if column in columns]
        unread = [column for column in columns if column not in read]
        if format == "prompts":
            unmapped = [column for column in unread if column not in self._columns]
            self._references.update(dict.fromkeys(unmapped))
            read, unread = read + unmapped, [column for column in unread if column not in unmapped]
        self._seen.update(columns)
        self._ignored.update(unread)
        # What is ignored may yet say that a row is none of text, or which of its words are not to be learned.
        return read + [column for column in unread if looks_like_weights(column) or media_kind(column)]

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
        """Describe what was read, in a sentence."""
        of_files = "" if num_files == 1 else f" in {num_files:,} files"
        if is_text:
            documents = counted(len(self._store), "document")
            return f"{self._source}: {documents} of plain text{of_files} (two blank lines begin a new one)"
        note = f"{self._source}: {counted(len(self._store), 'row')}{of_files} of {format}"
        if self._function is not None:
            left_out = f", which leaves out {self._num_left_out:,}" if self._num_left_out else ""
            note += f", made by {self._function}{left_out}"
        sentence = conversion(format, self._findings)
        columns = [self._columns.get(column, column) for column in COLUMNS[format]]
        if sentence:
            note += f": {sentence}"
        elif self._recognised:
            *most, last = columns
            named = f"columns {', '.join(most)} and {last}" if most else f"column {last}"
            aside = "; data.format=prompt_completion leaves label aside" if format == "unpaired_preference" else ""
            note += f" (recognised from the {named}{aside})"
        if self._references:
            note += f"; kept for rewards: {listed(self._references)}"
        if self._columns:
            note += "; data.columns: " + ", ".join(f"{theirs} -> {ours}" for ours, theirs in self._columns.items())
        if self._ignored:
            note += f"; ignored: {listed(sorted(self._ignored))}"
        also = (["the tools"] if "tools" in self._findings.columns else []) + (
            [f"{listed(sorted(keys))} of the messages"]
            if (keys := self._passed_on - {"role", "content", "weight"})
            else []
        )
        if self._num_weightless:
            note += f"; {counted(self._num_weightless, 'assistant turn')} of weight 0 left out of the loss"
        return note + (f"; the chat template also gets {' and '.join(also)}" if also else "")

    def _note_of_bad_rows(self) -> str:
        examples = "; ".join(f"{bad.place}: {bad.reason}" for bad in self._bad[:_SKIPPED_SHOWN])
        more = f"; and {self._num_bad - _SKIPPED_SHOWN:,} more" if self._num_bad > _SKIPPED_SHOWN else ""
        left_out = f"{counted(self._num_bad, 'bad row')} left out (data.max_bad_rows={self._max_bad_rows})"
        return f"{self._source}: {left_out}: {examples}{more}"


def _messages(row: Row, format: SourceFormat) -> Iterator[Row]:
    """All messages of a row, whichever columns hold them."""
    # Beside a prompt of `prompts`, a column of any name may hold anything.
    columns = ("prompt",) if format == "prompts" else ("messages", "prompt", "completion", "chosen", "rejected")
    for column in columns:
        if isinstance(row.get(column), list):
            yield from row[column]
