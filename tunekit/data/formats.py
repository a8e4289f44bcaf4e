"""The shapes a training row can have, and what makes a row of each shape good.

A row is told apart by its columns: `messages` is a conversation, `prompt` with `completion` is a question and its
answer, `text` is plain text. Shapes that other tools write (ShareGPT, Alpaca) are recognised as well; `convert` makes
conversations of them. A row is checked completely before anything is tokenised, because what a tokenizer would do
with a missing answer or a misspelt role is worse than an error: it trains on it.

Nothing here knows files: a complaint about a row says what is wrong, and the caller says where.
"""

import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal

Format = Literal["messages", "prompt_completion", "text"]
"""Shape of rows that can be trained on."""

SourceFormat = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"]
"""Shape of rows as they stand in a source."""

Row = dict[str, Any]
"""One valid row: the columns of its format and no others."""

BECOMES: dict[SourceFormat, Format] = {
    "messages": "messages",
    "sharegpt": "messages",
    "alpaca": "messages",
    "prompt_completion": "prompt_completion",
    "text": "text",
}
"""What the rows of each format become."""

COLUMNS: dict[SourceFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""The columns that make a row of each format."""

OPTIONAL_COLUMNS: dict[SourceFormat, tuple[str, ...]] = {
    "messages": ("tools",),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", "system", "history"),
    "prompt_completion": ("tools",),
    "text": (),
}
"""The columns that a row of each format may have beside those. What else it has is left aside, and said."""

ROLES = ("system", "user", "assistant", "tool")
"""Who can speak in a conversation."""

_ROLES_ELSEWHERE = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatbot": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
}

_FOREIGN_SHAPES: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"chosen", "rejected"}),
        "these are preference pairs; to imitate the better answers, set data.columns={completion: chosen}, or "
        "{messages: chosen} if it holds whole conversations",
    ),
    (frozenset({"question", "answer"}), "set data.columns={prompt: question, completion: answer}"),
    (frozenset({"instruction", "response"}), "set data.columns={output: response}"),
    (frozenset({"input", "output"}), "set data.columns={prompt: input, completion: output}"),
    (frozenset({"conversation"}), "set data.columns={messages: conversation}"),
)


# What was read may be anything, so what of it goes into a message is kept short and printable.
_NAMES_SHOWN = 12
_NAME_LENGTH = 40


class BadRow(Exception):
    """A row, or a set of columns, that cannot be trained on. The text says what is wrong, not where."""


def recognise(columns: Iterable[str]) -> SourceFormat:
    """Tell the format from the names of the columns.

    Raises:
        BadRow: No format fits, or several do.
    """
    names = tuple(columns)
    fitting: list[SourceFormat] = [format for format, needed in COLUMNS.items() if set(needed) <= set(names)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        readings = " or ".join(f"{format} ({listed(COLUMNS[format])})" for format in fitting)
        choices = " or ".join(f"data.format={format}" for format in fitting)
        raise BadRow(f"the columns can be read as {readings}; choose one with {choices}")
    raise BadRow(f"no known format has the columns {listed(names)}; {_suggestion(names)}")


def check_columns(columns: Sequence[str], format: SourceFormat) -> None:
    """Check that a table has the columns of a format.

    Raises:
        BadRow: A column is missing.
    """
    missing = [name for name in COLUMNS[format] if name not in columns]
    if missing:
        noun = "column" if len(missing) == 1 else "columns"
        raise BadRow(f"no {noun} {listed(missing)}; {_suggestion(columns, missing)}")


def check_row(value: object, format: Format) -> Row:
    """Check one row and keep the columns of its format.

    Args:
        value: The row as it was read.
        format: The format that the source has.

    Raises:
        BadRow: The row is not one of this format.
    """
    if not isinstance(value, dict):
        raise BadRow(f"a row must be an object, got {described(value)}")
    check_columns(list(value), format)
    if format == "text":
        return {"text": text(value["text"], "text")}
    if format == "messages":
        row: Row = {"messages": conversation(value["messages"], "messages")}
    else:
        row = _prompt_completion(value["prompt"], value["completion"])
    tools = tools_of(value.get("tools"))
    if not tools:
        return row
    if isinstance(row.get("prompt"), str):
        raise BadRow("tools beside a prompt that is plain text: only a conversation can name tools")
    return {**row, "tools": tools}


def listed(names: Iterable[str]) -> str:
    """Names in a sentence: `a, b`. A name that would be misread without quotes, such as ' text', gets them."""
    shown = [_name(name) for name in names]
    if len(shown) > _NAMES_SHOWN:
        shown[_NAMES_SHOWN:] = [f"and {len(shown) - _NAMES_SHOWN} more"]
    return ", ".join(shown) or "(none)"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _name(name: str) -> str:
    short = name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 3] + "..."
    return short if short and short == short.strip() and short.isprintable() else repr(short)


def described(value: object) -> str:
    """A value named by its JSON type, so that the message reads the same for JSON, CSV and Parquet."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {_name(str(value))}"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    return f"a {type(value).__name__}"


def _suggestion(columns: Sequence[str], missing: Iterable[str] | None = None) -> str:
    """What to do about columns that fit no format: the nearest known shape, a misspelling, or the list of formats."""
    for foreign, advice in _FOREIGN_SHAPES:
        if foreign <= set(columns):
            return advice
    wanted = [name for needed in COLUMNS.values() for name in needed] if missing is None else list(missing)
    for name in wanted:
        near = get_close_matches(name, [column for column in columns if column not in wanted], n=1, cutoff=0.7)
        if near:
            return f"rename {_name(near[0])} to {name}"
    for name, other in (("prompt", "completion"), ("completion", "prompt")):
        if name in columns and other not in columns:
            return f"beside {name}, a column {other} is needed"
    if missing is not None:
        return f"the columns are {listed(columns)}"
    formats = "; ".join(f"{format}: {listed(needed)}" for format, needed in COLUMNS.items())
    return f"say with data.columns which of them are those of a format ({formats})"


def text(value: object, where: str) -> str:
    """A string that holds something."""
    if not isinstance(value, str):
        raise BadRow(f"{where} must be a string, got {described(value)}")
    if not value.strip():
        raise BadRow(f"{where} is empty")
    if value in ("nan", "NaN"):
        raise BadRow(f"{where} is '{value}', which is how pandas writes a missing value")
    return encodable(value, where)


def encodable(value: str, where: str) -> str:
    """A string that is all characters."""
    # JSON can spell half of a surrogate pair (\ud83d); no tokenizer can encode one.
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])[1:-1]
        raise BadRow(f"{where} holds {half}, one half of a surrogate pair, which is no character") from None
    return value


def _prompt_completion(prompt: object, completion: object) -> Row:
    """Both plain text, or both lists of messages: the two shapes that TRL knows."""
    if isinstance(prompt, list) != isinstance(completion, list):
        raise BadRow(
            "prompt and completion must both be strings or both be lists of messages, "
            f"got {described(prompt)} and {described(completion)}"
        )
    if not isinstance(prompt, list):
        return {"prompt": text(prompt, "prompt"), "completion": text(completion, "completion")}
    messages = [_message(entry, f"prompt[{i}]") for i, entry in enumerate(prompt)]
    if not messages:
        raise BadRow("prompt is empty")
    if messages[-1]["role"] == "assistant":
        raise BadRow("prompt ends with an assistant turn; move that turn to completion")
    return {"prompt": messages, "completion": conversation(completion, "completion")}


def conversation(value: object, where: str) -> list[Row]:
    """A list of messages in which the assistant says something."""
    if isinstance(value, str):
        raise BadRow(
            f"{where} must be a list of {{role, content}}, got a string; "
            "conversations belong in .jsonl or .parquet, where a column can hold a list"
        )
    if not isinstance(value, list):
        raise BadRow(f"{where} must be a list of {{role, content}}, got {described(value)}")
    if not value:
        raise BadRow(f"{where} is empty")
    messages = [_message(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    if not any(_says_something(message) for message in messages if message["role"] == "assistant"):
        said = any(message["role"] == "assistant" for message in messages)
        raise BadRow(f"{where} has no assistant turn" if not said else f"{where}: every assistant turn is empty")
    return messages


def _says_something(message: Row) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _message(entry: object, where: str) -> Row:
    """One turn. Further keys (name, tool_calls) stay: they are the chat template's to read."""
    if not isinstance(entry, dict):
        raise BadRow(f"{where} must be an object {{role, content}}, got {described(entry)}")
    if entry.get("tool_calls") and entry.get("role") == "assistant" and entry.get("content") is None:
        entry = {**entry, "content": ""}  # as OpenAI writes a turn that only calls tools
    if "role" not in entry and {"from", "value"} <= set(entry):
        raise BadRow(
            f"{where} has from and value (ShareGPT); set data.columns={{conversations: {where.partition('[')[0]}}}"
        )
    for key in ("role", "content"):
        if key not in entry:
            near = get_close_matches(key, [name for name in entry if isinstance(name, str)], n=1, cutoff=0.7)
            raise BadRow(f"{where} has no {key}" + (f"; did you mean {near[0]!r}?" if near else ""))
    role, content = entry["role"], entry["content"]
    if not isinstance(role, str):
        raise BadRow(f"{where}.role must be a string, got {described(role)}")
    if role not in ROLES:
        near = get_close_matches(role.lower(), ROLES, n=1, cutoff=0.6)
        meant = _ROLES_ELSEWHERE.get(role.lower()) or (near[0] if near else None)
        advice = f"did you mean '{meant}'?" if meant else f"the roles are {listed(ROLES)}"
        raise BadRow(f"{where}.role: unknown role {role[:_NAME_LENGTH]!r}; {advice}")
    if isinstance(content, list):
        raise BadRow(f"{where}.content must be a string, got a list; content in parts is not understood yet")
    if not isinstance(content, str):
        raise BadRow(f"{where}.content must be a string, got {described(content)}")
    encodable(content, f"{where}.content")
    # Parquet gives every message the keys of all messages, as nulls.
    kept = {key: held for key, held in entry.items() if held is not None}
    for key in kept.keys() - {"role", "content"}:
        plain(kept[key], f"{where}.{_name(key)}")
    if kept.get("tool_calls"):
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], f"{where}.tool_calls")
    return kept


def _tool_calls(calls: object, where: str) -> list[Row]:
    """Calls of functions, their arguments as objects.

    OpenAI writes the arguments as JSON in a string. Chat templates write them as JSON themselves, as transformers
    documents, and would put a string in quotes a second time.
    """
    if not isinstance(calls, list):
        raise BadRow(f"{where} must be a list of calls, got {described(calls)}")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> Row:
    if not isinstance(call, dict):
        raise BadRow(f"{where} must be an object {{function}}, got {described(call)}")
    if "function" in call:
        if not isinstance(call["function"], dict):
            raise BadRow(f"{where}.function must be an object {{name, arguments}}, got {described(call['function'])}")
        return {**call, "function": _called(call["function"], f"{where}.function")}
    return _called(call, where)


def _called(function: Row, where: str) -> Row:
    if not isinstance(function.get("name"), str):
        raise BadRow(f"{where}.name must be a string, got {described(function.get('name'))}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        read = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        raise BadRow(f"{where}.arguments is a string, but not JSON") from None
    if not isinstance(read, dict):
        raise BadRow(f"{where}.arguments must hold an object, got {described(read)}")
    return {**function, "arguments": read}


def tools_of(value: object) -> list[Row]:
    """The functions that a conversation may call, as JSON schemas; a list of them, or its JSON in a string.

    Raises:
        BadRow: It is something else.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRow("tools is a string, but not JSON") from None
    if not value:
        return []
    if not isinstance(value, list):
        raise BadRow(f"tools must be a list of functions, got {described(value)}")
    for i, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise BadRow(f"tools[{i}] must be an object, got {described(tool)}")
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"tools[{i}] names no function: {{type: function, function: {{name, ...}}}} is expected")
        plain(tool, f"tools[{i}]")
    return value


def plain(value: object, where: str) -> None:
    """Check that a value can be written as JSON."""
    # What only the chat template reads may be of any shape, but not of any type: Parquet can hold dates and bytes.
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        raise BadRow(f"{where} holds something that is neither text, a number nor made of them") from None
