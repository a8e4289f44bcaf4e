"""Checks of conversations: their texts and tools, tool calls, weights of turns, and media.

A row is checked completely before anything is tokenised, because what a tokenizer would do with a missing answer or a
misspelt role is worse than an error: it trains on it.

**Contents.** A content is a string, or OpenAI's list of parts. Parts of text are joined as they are, which is how chat
templates of Transformers write them. A `developer` message, as OpenAI has called system messages since 2024, is a
system message; a conversation has one or the other.

**Tool calls.** A template that knows no calls writes an assistant turn that only calls tools as an empty one, and a
model would learn to say nothing. A call is written if its name is among what the assistant says; where names do not
tell, for they stand in the words of the turn as well or are spelt otherwise, the conversation is rendered with other
names to see.

**Weights.** OpenAI writes `weight: 0`, Axolotl `train: false` (or `training`), ms-swift `loss: false`. All of them
become a weight of 0, which the loss skips. A mark that cannot be honoured, a fraction or another spelling, is refused:
ignored, it would train on what it is there to exclude.

**Media.** Rows with images, video or audio are refused where only text is trained on. Without its image a row still
reads as text, with `<image>` in it as seven letters, and a model would learn to talk of what it never saw. A medium is
in a column, in a key of a message, or among the parts of its content. A text that merely talks of `<image>`, as code
does, has no such column and is a text like any other.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tunekit.data.formats import row_formats
from tunekit.data.formats.row_formats import LOOKED_AT, BadRow, Row, described, listed, nearest, of_type, shortened
from tunekit.errors import DataError

TEMPLATE_REMEDY = "set model.chat_template to a template that renders tool calls"


def check_calls_written(
    messages: Sequence[Row],
    turns: Sequence[int],
    place: str,
    render: Callable[[list[Row]], str],
    *,
    said: str = "",
    remedy: str = "or remove the row",
) -> None:
    """Check that the calls in some turns of a conversation are in its text.

    Args:
        messages: The conversation.
        turns: Indices of the assistant turns that are learned.
        place: Where the row stands, for messages.
        render: Writes a conversation as the chat template does.
        said: What of the text is learned, where that is known.
        remedy: What else can be done than to name another template.

    Raises:
        DataError: A call is not in the text.
    """
    calls = [(turn, name) for turn in turns for name in function_names(messages[turn])]
    if not calls or _all_in(said, calls, messages):
        return
    stand_ins = {f"tunekit_{number}_call": call for number, call in enumerate(calls)}
    names = iter(stand_ins)
    renamed = [_renamed(message, names) if i in set(turns) else message for i, message in enumerate(messages)]
    text = render(renamed)
    lost = next((call for stand_in, call in stand_ins.items() if stand_in not in text), None)
    if lost is not None:
        turn, name = lost
        raise DataError(
            f"{place}: messages[{turn}] calls {shortened(name)}, but the chat template does not render tool calls; "
            "the model would be trained on the message without its call",
            hint=f"{TEMPLATE_REMEDY}, {remedy}",
        )


def function_names(message: Row) -> Iterator[str]:
    """The functions that a message calls, also in OpenAI's older `function_call`."""
    yield from names_of(message.get("tool_calls"))
    yield from names_of([message.get("function_call")])


def names_of(functions: object) -> Iterator[str]:
    """The names in a list of calls, or of tools."""
    # What only a chat template reads has no checked shape.
    for entry in functions if isinstance(functions, list) else ():
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]


def _all_in(said: str, calls: Sequence[tuple[int, str]], messages: Sequence[Row]) -> bool:
    """Return whether a rendered text contains all calls, with their arguments and not only their names."""
    num_calls = Counter(name for _, name in calls)
    contents = [content for turn in {turn for turn, _ in calls} for content in messages[turn].values()]
    words = [content for content in contents if isinstance(content, str)]
    return all(
        said.count(name) >= number + sum(text.count(name) for text in words) for name, number in num_calls.items()
    )


def _renamed(message: Row, names: Iterator[str]) -> Row:
    """A message whose calls have other names."""
    copy = dict(message)
    if isinstance(message.get("tool_calls"), list):
        copy["tool_calls"] = [_with_name(call, names) for call in message["tool_calls"]]
    if "function_call" in message:
        copy["function_call"] = _with_name(message["function_call"], names)
    return copy


def _with_name(call: Any, names: Iterator[str]) -> Any:
    if next(names_of([call]), None) is None:
        return call
    if "function" in call:
        return {**call, "function": {**call["function"], "name": next(names)}}
    return {**call, "name": next(names)}


SWITCHES = ("train", "training", "loss")
"""Keys of a turn that say with true or false what `weight` says with 1 or 0."""

_MARKS = ("weight", *SWITCHES)

_WORDS = frozenset(row_formats.TABLES["weight_words"])
"""Words in the name of a key that is likely such a mark."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def weighed(message: Row, where: str) -> Row:
    """A message whose marks are one: `weight`, 0 or 1, and none where all that is not said is learned.

    Args:
        message: The message, its role checked, without keys that are null.
        where: Its place in the row.

    Raises:
        BadRow: A mark cannot be honoured, two say different things, or a key looks like a mark and is none.
    """
    marks = {mark: _learned(message, mark, where) for mark in _MARKS if mark in message}
    for key in message:
        if key not in marks and looks_like_weights(key) and _is_mark(message[key]):
            raise BadRow(
                f"{where}.{shortened(key)} looks like a loss weight, but is not read; set weight: 0 on assistant "
                "messages to exclude from the loss, or remove the key"
            )
    if len(set(marks.values())) > 1:
        first, *others = marks
        other = next(mark for mark in others if marks[mark] != marks[first])
        raise BadRow(f"{where}: {_said(message, first)}, but {_said(message, other)}; keep one of them")
    if not marks:
        return message
    content = {key: item for key, item in message.items() if key not in SWITCHES}
    if message["role"] == "assistant" and not all(marks.values()):
        content["weight"] = 0
    return content


def _said(message: Mapping[str, object], mark: str) -> str:
    return f"{mark} is {str(message.get(mark)).lower()}"


def looks_like_weights(key: str) -> bool:
    """Return whether a key or column is named like a loss weight or mask."""
    return any(word.lower() in _WORDS for word in _WORD.findall(key[:200]))


def check_no_mask(columns: Row, known: tuple[str, ...]) -> None:
    """Check that no column besides the known ones says for each turn or token what is learned.

    Raises:
        BadRow: One does.
    """
    for column, content in columns.items():
        if column not in known and looks_like_weights(column) and _is_numbers(content):
            raise BadRow(
                f"column {shortened(column)} looks like a loss mask, but is not read; set weight: 0 on messages to "
                "exclude from the loss, add labels to input_ids, or remove the column"
            )


def _learned(message: Row, mark: str, where: str) -> bool:
    """Return whether a mark says that its message is learned."""
    mark_value = message[mark]
    if mark == "weight":
        if message["role"] != "assistant":
            raise BadRow(f"{where}.weight: only assistant messages may have a weight, got role {message['role']}")
        if type(mark_value) is not int or mark_value not in (0, 1):
            raise BadRow(
                f"{where}.weight must be 0 (excluded from the loss) or 1 (included), got {described(mark_value)}"
            )
        return mark_value == 1
    learned = of_type(mark_value, bool, f"{where}.{mark} must be true (included in the loss) or false")
    if learned and message["role"] != "assistant":
        raise BadRow(
            f"{where}.{mark} is true, but only assistant messages are included in the loss, got role "
            f"{message['role']}; remove it"
        )
    return learned


def _is_mark(held: object) -> bool:
    """Return whether a value could be a weight; a name or a sentence could not."""
    if not isinstance(held, str):
        return True
    return re.fullmatch(r"\s*(?:true|false|yes|no|on|off|[-+]?[\d.]+(?:e[-+]?\d+)?)\s*", held.lower()) is not None


def _is_numbers(held: object) -> bool:
    return isinstance(held, list) and bool(held) and all(isinstance(item, bool | int | float) for item in held)


_COLUMNS: dict[str, str] = {name: kind for kind, names in row_formats.TABLES["media"].items() for name in names}
"""Columns and keys of messages that hold media, with the kind of each."""

_PLURALS = {"image": "images", "video": "videos", "audio": "audio"}


class HoldsMediaError(BadRow):
    """A row with an image, a video or audio; where one is, there are mostly more."""


def check_no_media(row: Mapping[str, object]) -> None:
    """Check that a row is text alone.

    Raises:
        HoldsMediaError: It is not.
    """
    for column, content in row.items():
        kind = media_kind(column)
        if kind is None or content is None:
            continue
        if column.lower() in _COLUMNS and _holds_something(content):
            raise _refusal(
                f"column {shortened(column)} holds {_PLURALS[kind]}", "remove the column to train on the text only"
            )
        if any(_says(value, f"<{kind}>") for name, value in row.items() if name != column):
            raise _refusal(
                f"the text has <{kind}> placeholders for column {shortened(column)}",
                "remove both to train on the text only",
            )


def check_no_media_keys(message: Row, where: str) -> None:
    """Check that a message has no key that holds media.

    Raises:
        HoldsMediaError: It has one.
    """
    for key, content in message.items():
        if key.lower() in _COLUMNS and _holds_something(content):
            kind = _PLURALS[_COLUMNS[key.lower()]]
            raise _refusal(f"{where}.{shortened(key)} holds {kind}", "remove the key to train on the text only")


def check_no_media_parts(parts: list[object], where: str) -> None:
    """Check that no part of a message's content is an image, a video or audio.

    Args:
        parts: The content, as OpenAI and transformers write it: [{type: image_url, ...}, {type: text, ...}].
        where: Its place in the row.

    Raises:
        HoldsMediaError: One is.
    """
    for i, part in enumerate(parts):
        if not isinstance(part, dict):
            continue
        names = [part["type"]] if isinstance(part.get("type"), str) else list(part)
        kind = next((kind for name in names if isinstance(name, str) and (kind := media_kind(name))), None)
        if kind is not None:
            raise _refusal(f"{where}[{i}] is of type {kind}", "make the content a string to train on the text only")


@lru_cache(maxsize=4096)
def media_kind(name: str) -> str | None:
    """The medium that a column, a key or a part is named after: `image` for `image_url`; None for most."""
    lowered = name[:200].lower()
    words = re.findall("[a-z]+", lowered)
    return _COLUMNS.get(lowered) or next((_COLUMNS[word] for word in words if word in _COLUMNS), None)


def _refusal(what: str, remedy: str) -> HoldsMediaError:
    return HoldsMediaError(f"{what}, but only text is supported; {remedy}")


def _holds_something(held: object) -> bool:
    """Return whether a value could be a medium: not empty, neither a number nor a flag."""
    if isinstance(held, bool | int | float):
        return False
    return any(item is not None for item in held) if isinstance(held, list) else bool(held)


def _says(value: object, placeholder: str) -> bool:
    """Return whether a placeholder occurs in the texts of a value."""
    if isinstance(value, str):
        return placeholder in value
    if isinstance(value, dict):
        return any(_says(text_item, placeholder) for text_item in value.values())
    return isinstance(value, list) and any(_says(item, placeholder) for item in value)


ROLES = ("system", "user", "assistant", "tool")
"""Roles that can speak in a conversation."""

DEVELOPER = "developer"
"""OpenAI's newer name of the role `system`."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are texts."""


def text(value: object, where: str) -> str:
    """A string that holds something."""
    words = of_type(value, str, f"{where} must be a string")
    if not words.strip():
        raise BadRow(f"{where} is empty")
    if words in ("nan", "NaN"):
        raise BadRow(f"{where} is '{words}', a missing value as written by pandas")
    return encodable(words, where)


def encodable(value: str, where: str) -> str:
    """A string that is all characters."""
    # JSON can spell half of a surrogate pair (\ud83d); no tokenizer can encode one.
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])[1:-1]
        raise BadRow(f"{where} holds {half}, an unpaired surrogate") from None
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
        raise BadRow(f"prompt ends with an assistant message; {move}")
    return unweighted(messages)


def answer(value: object, where: str) -> str | list[Row]:
    """Check and return an answer: a text, or a conversation that the assistant begins."""
    if not isinstance(value, list):
        return text(value, where)
    messages = conversation(value, where)
    if messages[0]["role"] != "assistant":
        raise BadRow(f"{where} must begin with an assistant message, got role {messages[0]['role']}")
    unlearned = next((i for i, message in enumerate(messages) if message.get("weight") == 0), None)
    if unlearned is not None:
        marked = value[unlearned]
        mark = _said(marked, next((mark for mark in _MARKS if marked.get(mark) in (False, 0)), "weight"))
        raise BadRow(f"{where}[{unlearned}].{mark}, but completions are compared as a whole; remove it")
    return unweighted(messages)


def conversation(value: object, where: str) -> list[Row]:
    """A list of messages in which the assistant says something that counts."""
    messages = turns(value, where)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise BadRow(f"{where} has no assistant message")
    if not any(_says_something(message) for message in answers):
        raise BadRow(f"{where}: every assistant message is empty")
    if not any(_says_something(message) for message in answers if message.get("weight") != 0):
        raise BadRow(f"{where}: every non-empty assistant message has weight 0; no token is included in the loss")
    return messages


def turns(value: object, where: str) -> list[Row]:
    """A list of messages, whoever speaks."""
    if isinstance(value, str):
        raise BadRow(
            f"{where} must be a list of {{role, content}}, got a string; "
            "use .jsonl or .parquet, where a column can hold lists"
        )
    messages = of_type(value, list, f"{where} must be a list of {{role, content}}")
    if not messages:
        raise BadRow(f"{where} is empty")
    if num_with_role(messages, DEVELOPER) and num_with_role(messages, "system"):
        raise BadRow(f"{where} has a system and a developer message; merge them into one")
    return [_message(entry, f"{where}[{i}]") for i, entry in enumerate(messages)]


def num_with_role(entries: object, role: str) -> int:
    """Return the number of messages with a role in a list; 0 of anything else."""
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
        return 0  # such as thousands of token ids
    return sum(isinstance(entry, dict) and entry.get("role") == role for entry in entries)


def unweighted(messages: Sequence[Row]) -> list[Row]:
    """Messages of which none or all count, so that a weight says nothing."""
    return [{key: content for key, content in message.items() if key != "weight"} for message in messages]


def with_system(messages: list[Row], system: str) -> list[Row]:
    """A conversation with the words of a column `system` before it."""
    if not system:
        return messages
    if messages[0]["role"] == "system":
        raise BadRow("column system and a first message with role system; keep one of them")
    return [{"role": "system", "content": system}, *messages]


def _says_something(message: Row) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _message(value: object, where: str) -> Row:
    """One turn. Further keys (name, tool_calls) stay: they are the chat template's to read."""
    entry = of_type(value, dict, f"{where} must be an object {{role, content}}")
    if entry.get("tool_calls") and entry.get("role") == "assistant" and entry.get("content") is None:
        entry = {**entry, "content": ""}  # as OpenAI writes a turn that only calls tools
    if "role" not in entry and {"from", "value"} <= set(entry):
        column = where.partition("[")[0]
        advice = f"set data.columns={{conversations: {column}}}" if column == "messages" else "write role and content"
        raise BadRow(f"{where} has from and value (ShareGPT); {advice}")
    for key in ("role", "content"):
        if key not in entry:
            near = nearest(key, [name for name in entry if isinstance(name, str)][:LOOKED_AT], cutoff=0.7)
            raise BadRow(f"{where} has no {key}" + (f"; did you mean {near!r}?" if near else ""))
    role, content = of_type(entry["role"], str, f"{where}.role must be a string"), entry["content"]
    if role == DEVELOPER:
        role = "system"
        entry = {**entry, "role": role}
    if role not in ROLES:
        suggestion = row_formats.TABLES["roles_elsewhere"].get(role.lower()) or nearest(role.lower()[:40], ROLES)
        advice = f"did you mean '{suggestion}'?" if suggestion else f"roles: {listed(ROLES)}"
        raise BadRow(f"{where}.role: unknown role {role[:40]!r}; {advice}")
    if isinstance(content, list):
        check_no_media_parts(content, f"{where}.content")
        content = "".join(_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
        entry = {**entry, "content": content}
    encodable(of_type(content, str, f"{where}.content must be a string"), f"{where}.content")
    # Parquet gives every message the keys of all messages, as nulls.
    weighed_content = weighed({key: item for key, item in entry.items() if item is not None}, where)
    check_no_media_keys(weighed_content, where)
    for key in weighed_content.keys() - {"role", "content", "weight"}:
        plain(weighed_content[key], f"{where}.{shortened(key)}")
    if weighed_content.get("tool_calls"):
        calls = of_type(weighed_content["tool_calls"], list, f"{where}.tool_calls must be a list of calls")
        weighed_content["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return weighed_content


def _text_part(value: object, where: str) -> str:
    """The text of a part of a content."""
    part = of_type(value, dict, f"{where} must be an object {{type, text}}")
    if part.get("type", "text") not in TEXT_PARTS:
        raise BadRow(f"{where} is of type {str(part['type'])[:40]}, but only text is supported")
    return of_type(part.get("text"), str, f"{where}.text must be a string")


def _tool_call(value: object, where: str) -> Row:
    """A call of a function, its arguments as an object.

    OpenAI writes the arguments as JSON in a string. Chat templates write them as JSON themselves, as transformers
    documents, and would put a string in quotes a second time.
    """
    call = of_type(value, dict, f"{where} must be an object {{function}}")
    if "function" not in call:
        return _called(call, where)
    function = of_type(call["function"], dict, f"{where}.function must be an object {{name, arguments}}")
    return {**call, "function": _called(function, f"{where}.function")}


def _called(function: Row, where: str) -> Row:
    of_type(function.get("name"), str, f"{where}.name must be a string")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    read = _parsed(arguments, f"{where}.arguments is a string, but not JSON") if arguments.strip() else {}
    return {**function, "arguments": of_type(read, dict, f"{where}.arguments must hold an object")}


def _parsed(written: str, problem: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        raise BadRow(problem) from None


def function_call(said: str, where: str) -> list[Row]:
    """Parse a ShareGPT turn `function_call` into tool calls: JSON of one {name, arguments}, or of a list."""
    read = _parsed(said, f"{where} of a function_call message is not JSON")
    calls = read if isinstance(read, list) else [read]
    if not calls:
        raise BadRow(f"{where} of a function_call message calls no function")
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
        value = _parsed(value, "tools is a string, but not JSON")
    if not value:
        return []
    tools = of_type(value, list, "tools must be a list of functions")
    for i, tool in enumerate(tools):
        function = of_type(tool, dict, f"tools[{i}] must be an object").get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"tools[{i}] has no function name; expected {{type: function, function: {{name, ...}}}}")
        plain(tool, f"tools[{i}]")
    return tools


def with_tools(row: Row, columns: Row) -> Row:
    """A row with the tools that stand among its columns, if any.

    Raises:
        BadRow: They are no tools, or stand beside a text.
    """
    tools = tools_of(columns.get("tools"))
    if tools and isinstance(row.get("prompt"), str):
        raise BadRow("tools are unsupported with a plain-text prompt; make the prompt a list of messages")
    return {**row, "tools": tools} if tools else row


def plain(value: object, where: str) -> None:
    """Check that a value can be written as JSON."""
    # What only the chat template reads may be of any shape, but not of any type: Parquet can hold dates and bytes.
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        raise BadRow(f"{where} holds a value that JSON cannot represent") from None
