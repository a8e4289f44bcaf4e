"""The rows of a source, checked, and made into rows that a method can learn from.

The format is recognised from the columns, every row is checked, and all that is wrong is told together, each fault with
its place. What was found on the way is gathered into one sentence.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from tunekit.data.formats import convert, messages, preferences, row_formats
from tunekit.data.formats.convert import AS_GIVEN, Findings, Wording, replaced, with_default_system
from tunekit.data.formats.row_formats import (
    BECOMES,
    COLUMNS,
    BadRow,
    Learner,
    Row,
    counted,
    described,
    listed,
    shortened,
)
from tunekit.data.media.in_rows import BOXES, with_caption, with_media
from tunekit.data.media.kinds import COLUMN, KINDS, MEDIA_COLUMNS, counts_of
from tunekit.data.sources.files import Fault, Table
from tunekit.data.sources.rows import LeftOut, Part, Rows, RowStore, Skipped, converted, place, shown
from tunekit.errors import DataError
from tunekit.recipe.functions import find_function
from tunekit.recipe.sections.data import CompleteSource, MediaKind, SourceFormat

_FAULTS_SHOWN = 5
_SKIPPED_SHOWN = 3

_WITH_MEDIA: tuple[SourceFormat, ...] = (
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "captions",
    "preference",
    "unpaired_preference",
    "prompts",
)
"""Formats whose texts may have media."""

_MASKED: tuple[SourceFormat, ...] = ("messages", "sharegpt", "prompt_completion", "text", "tokens")
"""Formats of which some tokens count in the loss and others do not, so that a column could say which."""


def convert_row(value: object, format: SourceFormat, findings: Findings, wording: Wording = AS_GIVEN) -> Row:
    """Check one row and make it a row that can be learned from.

    Args:
        value: The row as it was read.
        format: The format that the source has.
        findings: What was found in the rows so far; this row's is added.
        wording: Texts that the recipe puts around those of rows.

    Raises:
        BadRow: The row is not one of this format.
    """
    columns = row_formats.of_type(value, dict, "a row must be an object")
    row_formats.check_columns(list(columns), format)
    messages.check_no_media(columns)
    if format in _MASKED:
        messages.check_no_mask(columns, (*COLUMNS[format], *row_formats.OPTIONAL_COLUMNS[format]))
    row = _converted(columns, format, findings, wording)
    if wording.system is not None:
        row = with_default_system(row, wording.system)
    if format in ("text", "tokens", "alpaca"):
        return row
    row = messages.with_tools(row, columns)
    if "tools" in row:
        findings.columns.add("tools")
    return row


_PLAIN: dict[SourceFormat, Callable[[Row], Row]] = {
    "prompt_completion": convert.prompt_completion,
    "tokens": convert.check_tokens,
    "ranking": preferences.best_and_worst,
    "unpaired_preference": preferences.rated,
    "stepwise_supervision": preferences.with_labelled_steps,
    "classification": preferences.with_label,
    "prompts": convert.prompt_with_references,
}
_NOTED: dict[SourceFormat, Callable[[Row, Findings], Row]] = {
    "sharegpt": convert.sharegpt,
    "preference": convert.preference,
}
"""Converters of rows by format, those with something to note apart."""


def _converted(row: Row, format: SourceFormat, findings: Findings, wording: Wording) -> Row:
    """Convert a row, without its tools."""
    if format == "alpaca":
        return convert.alpaca(row, findings, wording)
    if format == "messages":
        return {"messages": messages.conversation(row["messages"], "messages")}
    if format == "text":
        return {"text": messages.text(row["text"], "text")}
    return _NOTED[format](row, findings) if format in _NOTED else _PLAIN[format](row)


def conversion(format: SourceFormat, findings: Findings, wording: Wording = AS_GIVEN) -> str:
    """Describe the conversion of the columns in a few words; empty for a format that stays as it is."""
    if format == "preference" and "messages" in findings.columns:
        sentence = "messages -> prompt"
    elif format == "sharegpt" or (format == "preference" and "conversations" in findings.columns):
        sentence = "conversations -> messages" if format == "sharegpt" else "conversations -> prompt"
        renames = [f"{name} -> {role}" for name, role in findings.speakers.items() if name != role]
        sentence += f" ({', '.join(renames)})" if renames else ""
    elif format == "alpaca":
        asked = "instruction" if "input" not in findings.columns else "instruction + input"
        sentence = f"{asked} -> user, output -> assistant"
        if wording.is_plain_text:
            sentence = f"{asked} -> prompt, output -> completion"
        sentence += ", history -> earlier messages" if "history" in findings.columns else ""
    elif format == "preference" and findings.implicit_prompts:
        sentence = "common prefix of chosen and rejected -> prompt"
    elif format == "captions":
        sentence = "image -> user, caption -> assistant"
    elif format == "ranking":
        sentence = "completion with the highest score -> chosen, with the lowest -> rejected (ties: the first)"
    else:
        return ""
    return sentence + (", system -> system" if "system" in findings.columns else "")


def first_row(table: Table) -> tuple[tuple[str, ...], int | None] | None:
    """The names by which a format is recognised, and where they stand: a table's header, or its first row's keys.

    None if no row is an object.
    """
    if table.columns is not None:
        return table.columns, 1 if table.unit == "line" else None
    objects = ((record.value, record.number) for record in table.read(()) if isinstance(record.value, dict))
    return next(((tuple(row), number) for row, number in objects), None)


class Reader:
    """Reads the rows of the files of one source, or gathers what is wrong with them."""

    def __init__(self, source: CompleteSource, max_bad_rows: int, learner: Learner | None) -> None:
        self._source, self._key = shown(source.path), source.key
        self._function = source.format if ":" in source.format else None
        self._recognised = source.format == "auto" or self._function is not None
        self.format = None if self._recognised else cast(SourceFormat, source.format)
        """The format of the source, once it is known."""
        self.columns: Mapping[str, str] = source.columns
        """From our names of columns to those of the source, with those of captions where they were recognized."""
        self._loss_on = source.loss_on
        self._wording = Wording(source.prompt_style, source.system)
        self._replace = source.replace
        self._ranked_by, self._ranks = source.curriculum_column, array("d")
        self._max_bad_rows = max_bad_rows
        self._learner = learner
        self._learned = () if learner is None else learner.formats
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
        self._num_media: Counter[MediaKind] = Counter()
        self._num_left_out = self._num_weightless = self._num_developers = 0
        self._cut_short = False

    def read(self, name: str, table: Table, folder: Path | None = None) -> Iterator[None]:
        """Read the rows of one file into the store, and stop after each.

        Args:
            name: The file, as messages name it.
            table: Its rows.
            folder: Folder that paths of media start from; None where the file is not of this machine.
        """
        if self._function is not None:
            table = converted(table, find_function(self._function))
        self._parts.append(Part(len(self._store), name))
        format = self._settle_format(name, table)
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
                row = self._row(record.value, format, folder)
                if self._ranked_by is not None:
                    cells = table.columns is not None and table.unit == "line"
                    self._ranks.append(_rank(record.value, self._ranked_by, cells=cells))
            except (BadRow, RecursionError) as error:
                # JSON in a string of the row, or what was read just within the limit, may be too deep to be written.
                self._num_bad += 1
                if len(self._bad) < max(_FAULTS_SHOWN, self._max_bad_rows):
                    self._bad.append(Skipped(where, str(error) if isinstance(error, BadRow) else "nested too deeply"))
                if isinstance(error, messages.HoldsMediaError) and self._max_bad_rows == 0:
                    raise self._refusal() from None  # and not read all images to say so
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
            raise DataError(f"{name}: no rows")

    @property
    def num_held(self) -> int:
        """Rows in the store."""
        return len(self._store)

    def take(self) -> Rows:
        """The rows in the store, of the file that is being read, and an empty store for those that follow.

        Raises:
            DataError: More rows are bad than may be.
        """
        if self._num_bad > self._max_bad_rows or self._cut_short:
            raise self._refusal()
        rows = self._held([self._note(1, is_text=False)], parts=(Part(0, self._parts[-1].name),))
        self._store, self._numbers, self._ranks = RowStore(), array("Q"), array("d")
        return rows

    def so_far(self, *, is_text: bool) -> Rows:
        """The good rows that were read, and the bad ones, however many there are."""
        notes = [self._note(len(self._parts), is_text=is_text)] if self.format is not None else []
        return self._held(notes, parts=tuple(self._parts))

    def rows(self, *, is_text: bool) -> Rows:
        """All rows that were read.

        Raises:
            DataError: More rows are bad than may be, or none is good.
        """
        if self._num_bad > self._max_bad_rows or self._cut_short or (self._num_bad and not self._store):
            raise self._refusal()
        if not self._store:
            raise DataError(f"{self._source}: {self._function} skips every row ({self._num_left_out:,})")
        unread = [theirs for theirs in self.columns.values() if theirs not in self._seen]
        if unread:
            raise DataError(f"data.columns: '{self._source}' has no row with a column {listed(unread)}")
        notes = [self._note(len(self._parts), is_text=is_text)]
        if self._bad:
            notes.append(self._note_of_bad_rows())
        return self._held(notes, tuple(self._parts) if self._parts[0].name != self._source else ())

    def _held(self, notes: list[str], parts: tuple[Part, ...]) -> Rows:
        """The rows in the store."""
        format = self.format or "messages"
        is_plain_text = format == "alpaca" and self._wording.is_plain_text
        return Rows(
            format="prompt_completion" if is_plain_text else BECOMES[format],
            rows=self._store,
            source=self._source,
            numbers=self._numbers,
            unit=self._unit,
            notes=tuple(notes),
            read_as=format,
            parts=parts,
            skipped=tuple(self._bad),
            loss_on=self._loss_on,
            media=tuple(kind for kind in KINDS if self._num_media[kind]),
            ranks=None if self._ranked_by is None else self._ranks,
        )

    def _settle_format(self, name: str, table: Table) -> SourceFormat:
        """The format of the source, told from its first file; the columns of every file are checked."""
        first = first_row(table)
        if first is None:
            # Where no row is an object there is nothing to recognise; reading then reports what the rows are instead.
            return self.format or "messages"
        names, number = first
        if self.format in (None, "captions"):
            self.columns = {**self.columns, **row_formats.names_of_captions(names, self.columns)}
        if self.format in (None, "classification") and tuple(self._learned) == ("classification",):
            self.columns = {**self.columns, **row_formats.names_of_texts(names, self.columns)}
        where = name if number is None else f"{name}:{number}"
        missing = row_formats.missing_columns(names, self.columns, only_needed=table.columns is None)
        if missing is None and table.columns is not None and self._ranked_by is not None:
            missing = row_formats.missing_column(names, self._ranked_by, "data.curriculum_column")
        if missing is not None:
            raise DataError(f"{where}: {missing}")
        columns = tuple(row_formats.renamed(dict.fromkeys(names), self.columns))
        try:
            if self.format is None:
                self.format = row_formats.recognise(columns, self._learned)
            elif table.columns is not None:
                self._check_reading(columns, self.format)
        except BadRow as error:
            raise DataError(f"{where}: {error}") from None
        if self._wording.prompt_style != "plain" and self.format != "alpaca":
            problem = f"data.prompt_style: only for rows of alpaca, but '{self._source}' holds {self.format}"
            raise DataError(problem, hint="unset it, or set it in the sources that are")
        refusal = None if self._learner is None else self._learner.refusal(self.format, columns)
        if refusal is not None:
            raise DataError(f"{self._key}: '{self._source}' {refusal[0]}", hint=refusal[1])
        return self.format

    def _check_reading(self, columns: Sequence[str], format: SourceFormat) -> None:
        """Check that columns are those of the format, and, where it was recognised, of no other."""
        read = frozenset(column for column in columns if column in row_formats.KNOWN)
        if read in self._read_alike:
            return
        row_formats.check_columns(columns, format)
        if self._recognised:
            row_formats.check_same_reading(columns, format, self._learned)
        self._read_alike.add(read)

    def _row(self, value: Any, format: SourceFormat, folder: Path | None) -> Row:
        media: list[Row] = []
        if isinstance(value, dict):
            for ours in COLUMNS[format]:
                if ours in self.columns and self.columns[ours] not in value:
                    raise BadRow(f"no column {listed([self.columns[ours]])} (data.columns.{ours})")
            value = row_formats.renamed(value, self.columns)
            if self._replace:
                value = replaced(value, self._replace)
            self._num_developers += sum(messages.num_with_role(column, messages.DEVELOPER) for column in value.values())
            self._check_reading(tuple(value), format)
            if format == "captions":
                row_formats.check_columns(tuple(value), format)
                value, media = with_caption(value, folder, self.columns)
            elif kinds := self._kinds(format):
                value, media = with_media(value, folder, kinds)
        row = convert_row(value, "messages" if format == "captions" else format, self._findings, self._wording)
        if media:
            row[COLUMN] = media
            self._num_media.update(medium["kind"] for medium in media)
        if "prompt" in row:
            self._check_kind(row["prompt"])
        return row

    def _kinds(self, format: SourceFormat) -> tuple[MediaKind, ...]:
        """The kinds of media that rows of a format may have."""
        return self._learner.media if self._learner is not None and format in _WITH_MEDIA else ()

    def _check_kind(self, prompt: object) -> None:
        """Prompts are all strings or all lists of messages: they become tokens in different ways."""
        is_chat = isinstance(prompt, list)
        if self._prompts_are_chats is None:
            self._prompts_are_chats = is_chat
        if is_chat != self._prompts_are_chats:
            here, there = ("a list of messages", "a string") if is_chat else ("a string", "a list of messages")
            raise BadRow(f"prompt is {here}, but {there} in the first row")

    def _note_columns(self, columns: tuple[str, ...], format: SourceFormat) -> list[str]:
        """Those of the columns that are read, by their names in the file; the others are noted."""
        named = (
            self.columns.get(column, column) for column in (*COLUMNS[format], *row_formats.OPTIONAL_COLUMNS[format])
        )
        read = [column for column in named if column in columns]
        if format == "preference" and "prompt" in read and "messages" in read:
            read.remove("messages")
        # Their columns may have any name; where they are not taken, rows with media are refused.
        mapped = [theirs for ours, theirs in self.columns.items() if ours in MEDIA_COLUMNS and theirs in columns]
        read += [column for column in mapped if column not in read]
        unread = [column for column in columns if column not in read]
        if format == "prompts":
            taken_names = {*self.columns, *row_formats.REWARD_ARGUMENTS}
            unmapped = [column for column in unread if column not in taken_names]
            self._references.update(dict.fromkeys(unmapped))
            read, unread = read + unmapped, [column for column in unread if column not in unmapped]
        if self._ranked_by in unread:
            unread.remove(self._ranked_by)
            read.append(self._ranked_by)
        self._seen.update(columns)
        taken = [column for kind in self._kinds(format) for column in KINDS[kind].columns]
        self._ignored.update(column for column in unread if column not in taken)
        # What is ignored may yet say that a row is none of text, or which of its words are not to be learned.
        return read + [
            column
            for column in unread
            if messages.looks_like_weights(column) or messages.media_kind(column) or column == BOXES
        ]

    def _refusal(self) -> DataError:
        """The error that names the first bad rows."""
        faults = [f"{bad.place}: {bad.reason}" for bad in self._bad[:_FAULTS_SHOWN]]
        if self._num_bad > len(faults):
            faults.append(f"{self._source}: and {counted(self._num_bad - len(faults), 'more invalid row')}")
        if self._max_bad_rows == 0:
            return DataError("\n".join(faults))
        if self._num_bad > self._max_bad_rows:
            why = f"{counted(self._num_bad, 'invalid row')}, more than data.max_bad_rows={self._max_bad_rows}"
        elif self._cut_short:
            why = "rows after such an error cannot be read; data.max_bad_rows does not apply"
        else:
            why = "no valid rows left"
        return DataError("\n".join([*faults, f"{self._source}: {why}"]))

    def _note(self, num_files: int, *, is_text: bool) -> str:
        """Describe what was read, in a sentence."""
        format = self.format or "messages"
        of_files = "" if num_files == 1 else f" in {num_files:,} files"
        if is_text:
            documents = counted(len(self._store), "document")
            return f"{self._source}: {documents} of plain text{of_files} (separated by two blank lines)"
        note = f"{self._source}: {counted(len(self._store), 'row')}{of_files} of {format}"
        if self._function is not None:
            left_out = f", {self._num_left_out:,} skipped" if self._num_left_out else ""
            note += f", converted by {self._function}{left_out}"
        sentence = conversion(format, self._findings, self._wording)
        columns = [self.columns.get(column, column) for column in COLUMNS[format]]
        if sentence:
            note += f": {sentence}"
        elif self._recognised:
            *most, last = columns
            named = f"columns {', '.join(most)} and {last}" if most else f"column {last}"
            aside = "; data.format=prompt_completion ignores label" if format == "unpaired_preference" else ""
            note += f" (recognized from the {named}{aside})"
        if self._wording.system is not None:
            note += "; data.system begins those without a system message"
        if self._num_developers:
            note += f"; {counted(self._num_developers, 'developer message')} read as system"
        if self._num_media:
            note += f"; {counts_of(self._num_media)}"
        if self._references:
            note += f"; passed to rewards: {listed(self._references)}"
        if self.columns:
            note += "; data.columns: " + ", ".join(f"{theirs} -> {ours}" for ours, theirs in self.columns.items())
        if self._ignored:
            note += f"; ignored: {listed(sorted(self._ignored))}"
        keys = self._passed_on - {"role", "content", "weight"}
        also = ["tools"] * ("tools" in self._findings.columns) + [f"{listed(sorted(keys))} of messages"] * bool(keys)
        if self._num_weightless:
            note += f"; {counted(self._num_weightless, 'assistant message')} with weight 0 excluded from the loss"
        return note + (f"; also passed to the chat template: {' and '.join(also)}" if also else "")

    def _note_of_bad_rows(self) -> str:
        examples = "; ".join(f"{bad.place}: {bad.reason}" for bad in self._bad[:_SKIPPED_SHOWN])
        more = f"; and {self._num_bad - _SKIPPED_SHOWN:,} more" if self._num_bad > _SKIPPED_SHOWN else ""
        left_out = f"{counted(self._num_bad, 'invalid row')} skipped (data.max_bad_rows={self._max_bad_rows})"
        return f"{self._source}: {left_out}: {examples}{more}"


def _rank(row: object, column: str, *, cells: bool) -> float:
    """Return the number of a row by which a curriculum orders it.

    Args:
        row: The row as it was read.
        column: The column of the numbers.
        cells: Whether the file has text only, as CSV, so that a number is one in writing.

    Raises:
        BadRow: It has none.
    """
    columns = row_formats.of_type(row, dict, "a row must be an object")
    if column not in columns:
        raise BadRow(f"no column {listed([column])} (data.curriculum_column)")
    value = columns[column]
    try:
        number = float(value) if type(value) in (int, float) or (cells and isinstance(value, str)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        description = f"the string {shortened(value)}" if isinstance(value, str) else described(value)
        raise BadRow(f"{listed([column])} must be a finite number (data.curriculum_column), got {description}")
    return number


def _messages(row: Row, format: SourceFormat) -> Iterator[Row]:
    """All messages of a row, whichever columns hold them."""
    # Beside a prompt of `prompts`, a column of any name may hold anything.
    columns = ("prompt",) if format == "prompts" else ("messages", "prompt", "completion", "chosen", "rejected")
    for column in columns:
        if isinstance(row.get(column), list):
            yield from row[column]
