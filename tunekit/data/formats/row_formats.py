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
from typing import Any, Literal

from tunekit.errors import DataError
from tunekit.recipe.methods import METHODS
from tunekit.recipe.sections.data import SourceFormat

Format = Literal["messages", "prompt_completion", "text", "tokens", "preference", "unpaired_preference", "prompts"]
"""Shape of rows that a method can learn from."""

Row = dict[str, Any]
"""One valid row: the columns of its format and no others, but that `prompts` keep all."""

BECOMES: dict[SourceFormat, Format] = {
    "messages": "messages",
    "sharegpt": "messages",
    "alpaca": "messages",
    "prompt_completion": "prompt_completion",
    "text": "text",
    "tokens": "tokens",
    "preference": "preference",
    "ranking": "preference",
    "unpaired_preference": "unpaired_preference",
    "prompts": "prompts",
}
"""Format into which rows of each format are converted."""

COLUMNS: dict[SourceFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "tokens": ("input_ids",),
    "preference": ("chosen", "rejected"),
    "ranking": ("prompt", "completions", "scores"),
    "unpaired_preference": ("prompt", "completion", "label"),
    "prompts": ("prompt",),
}
"""The columns that make a row of each format."""

OPTIONAL_COLUMNS: dict[SourceFormat, tuple[str, ...]] = {
    "messages": ("tools",),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", "system", "history"),
    "prompt_completion": ("tools",),
    "text": (),
    "tokens": ("labels", "attention_mask", "completion_mask", "assistant_masks"),
    "preference": ("prompt", "conversations", "system", "tools"),
    "ranking": ("tools",),
    "unpaired_preference": ("tools",),
    "prompts": ("tools",),
}
"""The columns that a row of each format may have beside those. What else it has is left aside, and said; only
`prompts` keep it, for the rewards."""

_FOREIGN_SHAPES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"question", "answer"}), "set data.columns={prompt: question, completion: answer}"),
    (frozenset({"instruction", "response"}), "set data.columns={output: response}"),
    (frozenset({"input", "output"}), "set data.columns={prompt: input, completion: output}"),
    (frozenset({"conversation"}), "set data.columns={messages: conversation}"),
)

_PARTNERS = (
    ("completion", "prompt"),
    ("chosen", "rejected"),
    ("rejected", "chosen"),
    ("completions", "scores"),
    ("label", "completion"),
    ("prompt", "completion"),
)
"""Columns that mean something only together with another one."""

_PARTS = frozenset({"chosen", "rejected", "completions", "label"})
"""Columns beside which a prompt is a part of another format, not one of `prompts`."""

# What was read may be anything, so what of it goes into a message is kept short and printable.
_NAMES_SHOWN = 12
_NAME_LENGTH = 40
LOOKED_AT = 1000
"""Among so many names a misspelt one is looked for: comparing takes its time."""


class BadRow(Exception):
    """A row, or a set of columns, that cannot be trained on. The text says what is wrong, not where."""


def recognise(columns: Iterable[str]) -> SourceFormat:
    """Tell the format from the names of the columns.

    Raises:
        BadRow: No format fits, or several do.
    """
    names = tuple(columns)
    fitting = _fitting(names)
    if fitting == ["prompts"] and _PARTS & set(names):
        only = f"data.format=prompts reads the prompt and keeps {listed(sorted(_PARTS & set(names)))} beside it"
        raise BadRow(f"no known format has the columns {listed(names)}; {_suggestion(names)}; {only}")
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        choices = " or ".join(f"data.format={format}" for format in fitting)
        raise BadRow(f"the columns can be read as {_readings(fitting)}; choose one with {choices}")
    raise BadRow(f"no known format has the columns {listed(names)}; {_suggestion(names)}")


def _fitting(columns: Collection[str]) -> list[SourceFormat]:
    """The formats whose columns are there, without those that another of them takes in.

    Preference pairs have a prompt of their own, and a label makes a rating of a prompt with its completion. A prompt
    by itself is one of `prompts` only where the other columns make nothing else of it.
    """
    fitting: list[SourceFormat] = [format for format, needed in COLUMNS.items() if set(needed) <= set(columns)]
    if len(fitting) > 1 and "prompts" in fitting:
        fitting.remove("prompts")
    return [format for format in fitting if not any(_takes_in(other, format) for other in fitting if other != format)]


def _takes_in(format: SourceFormat, other: SourceFormat) -> bool:
    return set(COLUMNS[other]) <= {*COLUMNS[format], *OPTIONAL_COLUMNS[format]}


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
        raise BadRow(f"{what}; the columns are those of {_readings(fitting)}, not of {_readings([format])}")
    raise BadRow(f"{what}; {near or _suggestion(columns, missing)}")


def check_same_reading(columns: Sequence[str], format: SourceFormat) -> None:
    """Check that columns which have those of a format do not read as another one as well.

    Raises:
        BadRow: They do; nothing says which of the readings is meant.
    """
    fitting = _fitting(columns)
    if fitting != [format]:
        raise BadRow(
            f"the columns are those of {_readings(fitting)}, and the rows before are of {_readings([format])}; "
            f"a source holds rows of one format (data.format={format} reads all of them as that one)"
        )
    recognise(columns)


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
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {shortened(str(value))}"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    return f"a {type(value).__name__}"


def _suggestion(columns: Sequence[str], missing: Iterable[str] | None = None) -> str:
    """Suggest a remedy for columns that fit no format: the nearest format, a misspelling, or the list of formats."""
    for foreign, advice in _FOREIGN_SHAPES:
        if foreign <= set(columns):
            return advice
    near = misspelt(columns, missing)
    if near is not None:
        return near
    for name, other in _PARTNERS:
        if name in columns and other not in columns:
            return f"beside {name}, a column {other} is needed"
    if missing is not None:
        return f"the columns are {listed(columns)}"
    formats = "; ".join(f"{format}: {listed(needed)}" for format, needed in COLUMNS.items())
    return (
        f"say with data.columns which of them are those of a format ({formats}), "
        "or let a function make rows of them (data.format=module:function)"
    )


def misspelt(columns: Sequence[str], missing: Iterable[str] | None = None) -> str | None:
    """The advice to rename a column that is nearly one of a format."""
    column_names = list(dict.fromkeys(name for needed in COLUMNS.values() for name in needed))
    # `score` and `labels` are names by themselves far more often than they are misspelt.
    candidates = (
        [name for name in column_names if name not in ("scores", "label")] if missing is None else list(missing)
    )
    for name in candidates:
        near = get_close_matches(
            name, [column for column in columns[:LOOKED_AT] if column not in column_names], n=1, cutoff=0.7
        )
        if near:
            return f"rename {shortened(near[0])} to {name}"
    return None


_SPOKEN: dict[SourceFormat, str] = {
    "messages": "conversations",
    "sharegpt": "conversations",
    "alpaca": "conversations",
    "prompt_completion": "prompts with completions",
    "text": "texts",
    "tokens": "token ids",
    "preference": "preference pairs",
    "ranking": "rankings",
    "unpaired_preference": "rated completions",
    "prompts": "prompts without completions",
}

_ANSWERS = ("response", "answer", "output", "solution", "target")
"""Common names of a column of answers."""


_ANOTHER_METHOD: dict[tuple[SourceFormat, SourceFormat], str] = {
    ("unpaired_preference", "preference"): "for pairs use method dpo; for kto write each answer as a row of its own, "
    "with a label true or false",
    ("unpaired_preference", "prompt_completion"): "add a column label, true for good answers and false for bad ones",
    ("preference", "unpaired_preference"): "for answers that are good or bad by themselves use method kto",
    ("preference", "prompt_completion"): "to imitate completions use method sft",
}
"""Advice where the rows are of the second format and the method learns from the first."""


@dataclass(frozen=True)
class Learner:
    """A training method by its name in recipes, and the formats that it learns from."""

    method: str
    formats: tuple[SourceFormat, ...]

    def refusal(self, format: SourceFormat, columns: Sequence[str]) -> tuple[str, str | None] | None:
        """Return why the method refuses rows of a format, and the remedy; None where it accepts them.

        Args:
            format: The format of a source.
            columns: All columns of the source, under our names.
        """
        if BECOMES[format] in self.formats:
            return None
        *most, last = (_SPOKEN[format] for format in self.formats)
        takes = f"{', '.join(most)} or {last}" if most else last
        what = f"holds {_SPOKEN[format]} ({listed(COLUMNS[format])}), and method {self.method} learns from {takes}"
        if "prompt_completion" in self.formats:
            return what, _completions_of(format, columns)
        return what, _ANOTHER_METHOD.get((self.formats[0], BECOMES[format]))


def learner_of(method: str) -> Learner:
    """Return the formats that a method learns from, by `method.type`."""
    return Learner(method, METHODS[method].spec.row_formats)


def _completions_of(format: SourceFormat, columns: Sequence[str]) -> str:
    """Describe how to read rows of another format as prompts with completions."""
    match format:
        case "preference":
            return (
                "to imitate the better answers, set data.columns={completion: chosen}, or {messages: chosen} if it "
                "holds whole conversations"
            )
        case "ranking":
            return "to imitate the best answers, let a function take them (data.format=module:function)"
        case "unpaired_preference":
            return "to imitate all completions, good and bad, set data.format=prompt_completion"
    answers = next((column for column in _ANSWERS if column in columns), None)
    if answers is not None:
        return f"to imitate what stands in {answers}, set data.columns={{completion: {answers}}}"
    return misspelt(columns, ["completion"]) or "beside prompt, a column completion is needed"


NEEDED = tuple(dict.fromkeys(name for names in COLUMNS.values() for name in names))
"""Columns that a row of some format must have."""

KNOWN = tuple(dict.fromkeys((*NEEDED, *(name for names in OPTIONAL_COLUMNS.values() for name in names))))
"""Every column that some format reads."""


def check_mapping(columns: Mapping[str, str]) -> None:
    """Check the names on our side, and that every column of the file is read once.

    Raises:
        DataError: No format has a column of that name, or two are read from one.
    """
    for ours, theirs in columns.items():
        if ours not in KNOWN:
            near = get_close_matches(ours, KNOWN, n=1, cutoff=0.6)
            if theirs in KNOWN:
                hint = f"our name stands first: {{{theirs}: {ours}}}"
            else:
                hint = f"did you mean '{near[0]}'?" if near else f"the columns are {', '.join(KNOWN)}"
            raise DataError(f"data.columns.{ours}: no format has a column '{ours}'", hint=hint)
        same_source = [other for other, column in columns.items() if column == theirs and other != ours]
        if same_source:
            raise DataError(f"data.columns: {listed([ours, *same_source])} are all read from the column '{theirs}'")


def missing_columns(names: Sequence[str], columns: Mapping[str, str], *, only_needed: bool) -> str | None:
    """Return an error message if a file lacks a column that `data.columns` maps, else None.

    Args:
        names: The columns of the file, or of its first row.
        columns: From our names to the file's.
        only_needed: Leave out columns that a row may lack.
    """
    for ours, theirs in columns.items():
        if theirs not in names and (ours in NEEDED or not only_needed):
            near = get_close_matches(theirs, names, n=1, cutoff=0.6)
            advice = f"did you mean {listed(near)}?" if near else f"the columns are {listed(names)}"
            return f"no column {listed([theirs])}, which data.columns reads as {ours}; {advice}"
    return None


def name_in_file(ours: str, columns: Mapping[str, str]) -> str:
    """Return the file's name for a column."""
    return columns.get(ours, ours)


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """A row under our names."""
    if not columns:
        return row
    columns_kept = {name: value for name, value in row.items() if name not in columns and name not in columns.values()}
    return {**columns_kept, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}
