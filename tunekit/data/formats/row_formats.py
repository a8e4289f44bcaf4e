"""Formats of training rows, those that each method learns from, and renamed columns.

The shapes a training row can have, and how one is told from another.

A row is told apart by its columns: `messages` is a conversation, `prompt` with `completion` is a question and its
answer, `chosen` with `rejected` are two answers of which one is better. Shapes that other tools write (ShareGPT,
Alpaca, rankings) are recognised as well; `convert` makes rows of the others of them. Where columns fit two formats,
nothing is guessed: both readings are named, and the recipe chooses.

Nothing here knows files: a complaint about a row says what is wrong, and the caller says where.

Formats that a training method learns from, and advice for rows in others.

Columns that a file calls otherwise: `data.columns` maps our names to the file's.

A column that is read under another name is no longer there under its own, and a column of the file that has one of
our names gives way to the column that is read as it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from tunekit.errors import DataError
from tunekit.files import read_table
from tunekit.recipe.methods import METHODS
from tunekit.recipe.sections.data import Format, MediaKind, SourceFormat

Row = dict[str, Any]
"""One valid row: the columns of its format and no others, but that `prompts` keep all."""


TABLES: dict[str, Any] = read_table(Path(__file__).with_name("formats.yaml"))
"""Tables of `formats.yaml`."""

_FORMATS: dict[SourceFormat, dict[str, Any]] = TABLES["formats"]

BECOMES: dict[SourceFormat, Format] = {format: entry["becomes"] for format, entry in _FORMATS.items()}
"""Format into which rows of each format are converted."""

COLUMNS: dict[SourceFormat, tuple[str, ...]] = {format: tuple(entry["columns"]) for format, entry in _FORMATS.items()}
"""The columns that make a row of each format."""

OPTIONAL_COLUMNS: dict[SourceFormat, tuple[str, ...]] = {
    format: tuple(entry["optional"]) for format, entry in _FORMATS.items()
}
"""The columns that a row of each format may have beside those."""

_PARTS = frozenset({"chosen", "rejected", "completions", "label"})
"""Columns beside which a prompt is a part of another format, not one of `prompts`."""

REWARD_ARGUMENTS = frozenset({"prompts", "completions"})
"""Columns beside prompts that rewards do not get: TRL passes them other values by these names."""

# What was read may be anything, so what of it goes into a message is kept short and printable.
_NAMES_SHOWN = 12
_NAME_LENGTH = 40
LOOKED_AT = 1000
"""Among so many names a misspelt one is looked for: comparing takes its time."""


T = TypeVar("T")


class BadRow(Exception):
    """A row, or a set of columns, that cannot be trained on. The text says what is wrong, not where."""


def recognise(columns: Iterable[str], learned: Collection[SourceFormat] = ()) -> SourceFormat:
    """Tell the format from the names of the columns.

    Args:
        columns: The names.
        learned: Formats that the method learns from; of several that fit, one of these is meant.

    Raises:
        BadRow: No format fits, or several do.
    """
    names = tuple(columns)
    fitting = _fitting(names, learned)
    if fitting == ["prompts"] and _PARTS & set(names):
        passed = sorted((_PARTS & set(names)) - REWARD_ARGUMENTS)
        only = "data.format=prompts reads the prompt" + (
            f" and passes {listed(passed)} to the rewards" if passed else ""
        )
        raise BadRow(f"no format matches the columns {listed(names)}; {_suggestion(names)}; {only}")
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        choices = " or ".join(f"data.format={format}" for format in fitting)
        raise BadRow(f"the columns match {_readings(fitting)}; set {choices}")
    texts = [name for name in names if name != "label"]
    if tuple(learned) == ("classification",) and "label" in names and texts:
        raise BadRow(f"no column prompt, text or messages; set data.columns={{prompt: {shortened(texts[0])}}}")
    raise BadRow(f"no format matches the columns {listed(names)}; {_suggestion(names)}")


def _fitting(columns: Collection[str], learned: Collection[SourceFormat] = ()) -> list[SourceFormat]:
    """The formats whose columns are there, without those that another of them takes in.

    Preference pairs have a prompt of their own, and a label makes a rating of a prompt with its completion. A prompt
    by itself is one of `prompts` only where the other columns make nothing else of it, and so are captions. Messages
    beside two answers are their prompt, or a conversation: the method tells, which learns from one of them.
    """
    fitting: list[SourceFormat] = [format for format, needed in COLUMNS.items() if set(needed) <= set(columns)]
    if "classification" in fitting:
        if "classification" in learned:
            return ["classification"]
        # A label beside a prompt is for rewards, or marks an answer.
        fitting.remove("classification")
    if len(fitting) > 1 and "prompts" in fitting:
        fitting.remove("prompts")
    if "captions" in fitting and set(fitting) - {"captions", "text"}:
        fitting.remove("captions")
    read = {format: {*COLUMNS[format], *OPTIONAL_COLUMNS[format]} - {"messages"} for format in fitting}
    apart = [
        format
        for format in fitting
        if not any(set(COLUMNS[format]) <= read[other] for other in read if other != format)
    ]
    return [format for format in apart if BECOMES[format] in learned] or apart


def check_columns(columns: Sequence[str], format: SourceFormat) -> None:
    """Check that a table or a row has the columns of a format.

    Raises:
        BadRow: A column is missing.
    """
    missing = [name for name in COLUMNS[format] if name not in columns]
    if not missing:
        return
    what = f"no {'column' if len(missing) == 1 else 'columns'} {listed(missing)}"
    near = misspelt(columns, missing)
    fitting = _fitting(columns)
    if near is None and fitting:
        raise BadRow(f"{what}; the columns match {_readings(fitting)}, not {_readings([format])}")
    raise BadRow(f"{what}; {near or _suggestion(columns, missing)}")


def check_same_reading(columns: Sequence[str], format: SourceFormat, learned: Collection[SourceFormat] = ()) -> None:
    """Check that columns which have those of a format do not read as another one as well.

    Raises:
        BadRow: They do; nothing says which of the readings is meant.
    """
    fitting = _fitting(columns, learned)
    if fitting != [format]:
        raise BadRow(
            f"the columns match {_readings(fitting)}, but earlier rows match {_readings([format])}; "
            f"a source must have one format (data.format={format} reads all rows as that format)"
        )
    recognise(columns, learned)


def _readings(formats: Iterable[SourceFormat]) -> str:
    return " or ".join(f"{format} ({listed(COLUMNS[format])})" for format in formats)


def listed(names: Iterable[str]) -> str:
    """Names in a sentence: `a, b`. A name that would be misread without quotes, such as ' text', gets them."""
    quoted = [shortened(name) for name in names]
    if len(quoted) > _NAMES_SHOWN:
        quoted[_NAMES_SHOWN:] = [f"and {len(quoted) - _NAMES_SHOWN} more"]
    return ", ".join(quoted) or "(none)"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shortened(name: str) -> str:
    """A name or a word out of a row: short, and in quotes where it could be misread."""
    short = name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 3] + "..."
    return short if short and short == short.strip() and short.isprintable() else repr(short)


def described(value: object) -> str:
    """A value named by its JSON type, so that the message reads the same for JSON, CSV and Parquet."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {shortened(str(value))}"
    spoken = {str: "a string", list: "a list", tuple: "a list", dict: "an object"}
    return next((words for kind, words in spoken.items() if isinstance(value, kind)), f"a {type(value).__name__}")


def of_type(value: object, kind: type[T], expected: str) -> T:
    """Return a value of a row that has the type it must have.

    Args:
        value: The value.
        kind: The type.
        expected: What must be there, for messages: `tools must be a list of functions`.

    Raises:
        BadRow: It has another type.
    """
    if not isinstance(value, kind):
        raise BadRow(f"{expected}, got {described(value)}")
    return value


def _suggestion(columns: Sequence[str], missing: Iterable[str] | None = None) -> str:
    """Suggest a remedy for columns that fit no format: the nearest format, a misspelling, or the list of formats."""
    for shape in TABLES["foreign_shapes"]:
        if set(shape["columns"]) <= set(columns):
            return str(shape["advice"])
    near = misspelt(columns, missing)
    if near is not None:
        return near
    for name, *others in TABLES["partners"]:
        if name in columns and not set(others) & set(columns):
            return f"column {name} requires a column {' or '.join(others)}"
    if missing is not None:
        return f"columns: {listed(columns)}"
    formats = "; ".join(f"{format}: {listed(needed)}" for format, needed in COLUMNS.items())
    return (
        f"map them to the columns of a format with data.columns ({formats}), "
        "or convert the rows by a function (data.format=module:function)"
    )


def misspelt(columns: Sequence[str], missing: Iterable[str] | None = None) -> str | None:
    """The advice to rename a column that is nearly one of a format."""
    # `score` and `labels` are names by themselves far more often than they are misspelt.
    candidates = (
        [name for name in NEEDED if name not in ("scores", "label", "labels")] if missing is None else list(missing)
    )
    for name in candidates:
        near = nearest(name, (column for column in columns[:LOOKED_AT] if column not in NEEDED), cutoff=0.7)
        if near is not None:
            return f"rename {shortened(near)} to {name}"
    return None


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that another one is most like, if it is like any."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


_ANSWERS = ("response", "answer", "output", "solution", "target")
"""Common names of a column of answers."""


@dataclass(frozen=True)
class Learner:
    """A training method by its name in recipes, and the formats that it learns from."""

    method: str
    formats: tuple[SourceFormat, ...]
    media: tuple[MediaKind, ...] = ()
    """Kinds of media of the rows that it trains on."""

    def refusal(self, format: SourceFormat, columns: Sequence[str]) -> tuple[str, str | None] | None:
        """Return why the method refuses rows of a format, and the remedy; None where it accepts them.

        Args:
            format: The format of a source.
            columns: All columns of the source, under our names.
        """
        if BECOMES[format] in self.formats:
            return None
        *most, last = (_FORMATS[format]["spoken"] for format in self.formats)
        takes = f"{', '.join(most)} or {last}" if most else last
        holds = f"{_FORMATS[format]['spoken']} ({listed(COLUMNS[format])})"
        what = f"holds {holds}, but method {self.method} trains on {takes}"
        if "prompt_completion" in self.formats:
            return what, _completions_of(format, columns)
        return what, TABLES["other_method"].get(self.formats[0], {}).get(BECOMES[format])


def learner_of(method: str) -> Learner:
    """Return the formats that a method learns from, by `method.type`."""
    spec = METHODS[method].spec
    return Learner(method, spec.row_formats, spec.media)


def _completions_of(format: SourceFormat, columns: Sequence[str]) -> str:
    """Describe how to read rows of another format as prompts with completions."""
    if format in TABLES["as_completions"]:
        return str(TABLES["as_completions"][format])
    answers = next((column for column in _ANSWERS if column in columns), None)
    if answers is not None:
        return f"to train on column {answers}, set data.columns={{completion: {answers}}}"
    return misspelt(columns, ["completion"]) or "column prompt requires a column completion"


NEEDED = tuple(dict.fromkeys(name for names in COLUMNS.values() for name in names))
"""Columns that a row of some format must have."""

KNOWN = tuple(dict.fromkeys((*NEEDED, *(name for names in OPTIONAL_COLUMNS.values() for name in names))))
"""Every column that some format reads."""

MAPPED = (*KNOWN, "images", "audios")
"""Every column that may have another name in a file."""


def check_mapping(columns: Mapping[str, str]) -> None:
    """Check the names on our side, and that every column of the file is read once.

    Raises:
        DataError: No format has a column of that name, or two are read from one.
    """
    for ours, theirs in columns.items():
        if ours not in MAPPED:
            near = nearest(ours, MAPPED)
            if theirs in MAPPED:
                hint = f"tunekit's name comes first: {{{theirs}: {ours}}}"
            else:
                hint = f"did you mean '{near}'?" if near else f"columns: {', '.join(MAPPED)}"
            raise DataError(f"data.columns.{ours}: no format has a column '{ours}'", hint=hint)
        same_source = [other for other, column in columns.items() if column == theirs and other != ours]
        if same_source:
            raise DataError(f"data.columns: {listed([ours, *same_source])} all map to column '{theirs}'")


def missing_columns(names: Sequence[str], columns: Mapping[str, str], *, only_needed: bool) -> str | None:
    """Return an error message if a file lacks a column that `data.columns` maps, else None.

    Args:
        names: The columns of the file, or of its first row.
        columns: From our names to the file's.
        only_needed: Leave out columns that a row may lack.
    """
    for ours, theirs in columns.items():
        if ours in NEEDED or not only_needed:
            problem = missing_column(names, theirs, f"data.columns.{ours}")
            if problem is not None:
                return problem
    return None


def missing_column(names: Sequence[str], column: str, key: str) -> str | None:
    """Return an error message if a file lacks a column that a recipe's key names, else None."""
    if column in names:
        return None
    near = nearest(column, names)
    advice = f"did you mean {listed([near])}?" if near else f"columns: {listed(names)}"
    return f"no column {listed([column])} ({key}); {advice}"


_TEXTS = ("text", "messages")
"""Other names of the column of what is classified."""


def names_of_texts(names: Collection[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the column of labeled texts that a source has in place of `prompt`; empty if it has that.

    Args:
        names: The columns of the source.
        columns: Mapping of the recipe.
    """
    if "prompt" in columns or "prompt" in names:
        return {}
    return next(({"prompt": name} for name in _TEXTS if name in names and name not in columns.values()), {})


_CAPTIONED = {"image": "file_name", "caption": "text"}
"""Other names of the columns of captions: those of Hugging Face's ImageFolder."""


def names_of_captions(names: Collection[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the names of columns of pictures with captions that a source has in place of ours; mostly none.

    Args:
        names: The columns of the source.
        columns: Mapping of the recipe.
    """
    here = {columns.get(ours, ours): ours for ours in KNOWN if columns.get(ours, ours) in names}
    read = set(here.values())
    missing = {ours: theirs for ours, theirs in _CAPTIONED.items() if ours not in read}
    has_all = all(theirs in names and here.get(theirs) in (None, theirs) for theirs in missing.values())
    return missing if has_all and not read - {"image", "caption", "text", "prompt"} else {}


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """A row under our names."""
    if not columns:
        return row
    columns_kept = {name: value for name, value in row.items() if name not in columns and name not in columns.values()}
    return {**columns_kept, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}
