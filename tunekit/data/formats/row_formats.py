"""The shapes a training row can have, and how one is told from another.

A row is told apart by its columns: `messages` is a conversation, `prompt` with `completion` is a question and its
answer, `chosen` with `rejected` are two answers of which one is better. Shapes that other tools write (ShareGPT,
Alpaca, rankings) are recognised as well; `convert` makes rows of the others of them. Where columns fit two formats,
nothing is guessed: both readings are named, and the recipe chooses.

Nothing here knows files: a complaint about a row says what is wrong, and the caller says where.
"""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal

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
