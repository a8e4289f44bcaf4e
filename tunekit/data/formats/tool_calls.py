"""Calls of tools that a chat template does not write.

A template that knows no calls writes an assistant turn that only calls tools as an empty one, and a model would learn
to say nothing. A call is written if its name is among what the assistant says; where names do not tell, for they stand
in the words of the turn as well or are spelt otherwise, the conversation is rendered with other names to see.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tunekit.data.formats.row_formats import Row, shortened
from tunekit.errors import DataError

TEMPLATE_REMEDY = "name a template that writes tool calls in model.chat_template"


def check_calls_written(
    messages: Sequence[Row],
    turns: Sequence[int],
    place: str,
    render: Callable[[list[Row]], str],
    *,
    said: str = "",
    remedy: str = "or leave the row out",
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
            f"{place}: messages[{turn}] calls {shortened(name)}, which the chat template does not write, so the turn "
            "would be learned without its call",
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
    words = [
        content
        for turn in {turn for turn, _ in calls}
        for content in messages[turn].values()
        if isinstance(content, str)
    ]
    in_words = {name: sum(text.count(name) for text in words) for name in num_calls}
    return all(said.count(name) >= number + in_words[name] for name, number in num_calls.items())


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
