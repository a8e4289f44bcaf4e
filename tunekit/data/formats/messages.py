"""Checks of texts, conversations and their tools.

A row is checked completely before anything is tokenised, because what a tokenizer would do with a missing answer or a
misspelt role is worse than an error: it trains on it.
"""

import json
from difflib import get_close_matches

from tunekit.data.formats.media import check_no_media_keys, check_no_media_parts
from tunekit.data.formats.row_formats import LOOKED_AT, BadRow, Row, described, listed, shortened
from tunekit.data.formats.weights import unlearned_mark, weighed

ROLES = ("system", "user", "assistant", "tool")
"""Roles that can speak in a conversation."""

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


def prompt(value: object, *, move: str) -> str | list[Row]:
    """Check and return a prompt: a text, or a conversation in which the assistant does not speak last.

    Args:
        value: The column `prompt`.
        move: What to do with an answer that stands in it.
    """
    if not isinstance(value, list):
        return text(value, "prompt")
    messages = turns(value, "prompt")
    if messages[-1]["role"] == "assistant":
        raise BadRow(f"prompt ends with an assistant turn; {move}")
    return unweighted(messages)


def answer(value: object, where: str) -> str | list[Row]:
    """Check and return an answer: a text, or a conversation that the assistant begins."""
    if not isinstance(value, list):
        return text(value, where)
    messages = conversation(value, where)
    if messages[0]["role"] != "assistant":
        raise BadRow(f"{where} must begin with an assistant turn, got one of {messages[0]['role']}")
    unlearned = next((i for i, message in enumerate(messages) if message.get("weight") == 0), None)
    if unlearned is not None:
        mark = unlearned_mark(value[unlearned])
        raise BadRow(f"{where}[{unlearned}].{mark}, but answers are compared as a whole; take it out")
    return unweighted(messages)


def conversation(value: object, where: str) -> list[Row]:
    """A list of messages in which the assistant says something that counts."""
    messages = turns(value, where)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise BadRow(f"{where} has no assistant turn")
    if not any(_says_something(message) for message in answers):
        raise BadRow(f"{where}: every assistant turn is empty")
    if not any(_says_something(message) for message in answers if message.get("weight") != 0):
        raise BadRow(f"{where}: every assistant turn that says something has weight 0, so there is nothing to learn")
    return messages


def turns(value: object, where: str) -> list[Row]:
    """A list of messages, whoever speaks."""
    if isinstance(value, str):
        raise BadRow(
            f"{where} must be a list of {{role, content}}, got a string; "
            "conversations belong in .jsonl or .parquet, where a column can hold a list"
        )
    if not isinstance(value, list):
        raise BadRow(f"{where} must be a list of {{role, content}}, got {described(value)}")
    if not value:
        raise BadRow(f"{where} is empty")
    return [_message(entry, f"{where}[{i}]") for i, entry in enumerate(value)]


def unweighted(messages: list[Row]) -> list[Row]:
    """Messages of which none or all count, so that a weight says nothing."""
    return [{key: content for key, content in message.items() if key != "weight"} for message in messages]


def with_system(messages: list[Row], system: str) -> list[Row]:
    """A conversation with the words of a column `system` before it."""
    if not system:
        return messages
    if messages[0]["role"] == "system":
        raise BadRow("the column system and a first turn of the system: only one of them can stand there")
    return [{"role": "system", "content": system}, *messages]


def _says_something(message: Row) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _message(entry: object, where: str) -> Row:
    """One turn. Further keys (name, tool_calls) stay: they are the chat template's to read."""
    if not isinstance(entry, dict):
        raise BadRow(f"{where} must be an object {{role, content}}, got {described(entry)}")
    if entry.get("tool_calls") and entry.get("role") == "assistant" and entry.get("content") is None:
        entry = {**entry, "content": ""}  # as OpenAI writes a turn that only calls tools
    if "role" not in entry and {"from", "value"} <= set(entry):
        column = where.partition("[")[0]
        advice = f"set data.columns={{conversations: {column}}}" if column == "messages" else "write role and content"
        raise BadRow(f"{where} has from and value (ShareGPT); {advice}")
    for key in ("role", "content"):
        if key not in entry:
            near = get_close_matches(
                key, [name for name in entry if isinstance(name, str)][:LOOKED_AT], n=1, cutoff=0.7
            )
            raise BadRow(f"{where} has no {key}" + (f"; did you mean {near[0]!r}?" if near else ""))
    role, content = entry["role"], entry["content"]
    if not isinstance(role, str):
        raise BadRow(f"{where}.role must be a string, got {described(role)}")
    if role not in ROLES:
        near = get_close_matches(role.lower()[:40], ROLES, n=1, cutoff=0.6)
        suggestion = _ROLES_ELSEWHERE.get(role.lower()) or (near[0] if near else None)
        advice = f"did you mean '{suggestion}'?" if suggestion else f"the roles are {listed(ROLES)}"
        raise BadRow(f"{where}.role: unknown role {role[:40]!r}; {advice}")
    if isinstance(content, list):
        check_no_media_parts(content, f"{where}.content")
        raise BadRow(f"{where}.content must be a string, got a list; content in parts is not understood yet")
    if not isinstance(content, str):
        raise BadRow(f"{where}.content must be a string, got {described(content)}")
    encodable(content, f"{where}.content")
    # Parquet gives every message the keys of all messages, as nulls.
    weighed_content = weighed({key: item for key, item in entry.items() if item is not None}, where)
    check_no_media_keys(weighed_content, where)
    for key in weighed_content.keys() - {"role", "content", "weight"}:
        plain(weighed_content[key], f"{where}.{shortened(key)}")
    if weighed_content.get("tool_calls"):
        weighed_content["tool_calls"] = _tool_calls(weighed_content["tool_calls"], f"{where}.tool_calls")
    return weighed_content


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


def function_call(said: str, where: str) -> list[Row]:
    """Parse a ShareGPT turn `function_call` into tool calls: JSON of one {name, arguments}, or of a list."""
    try:
        read = json.loads(said)
    except ValueError:
        raise BadRow(f"{where} is said by function_call, but is not JSON") from None
    calls = read if isinstance(read, list) else [read]
    if not calls:
        raise BadRow(f"{where} is said by function_call, but calls no function")
    for i, call in enumerate(calls):
        if not isinstance(call, dict) or "arguments" not in call:
            what = described(call) if not isinstance(call, dict) else "an object without arguments"
            raise BadRow(f"{where}: call {i} must be an object {{name, arguments}}, got {what}")
    return [{"type": "function", "function": _called(call, where)} for call in calls]


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
