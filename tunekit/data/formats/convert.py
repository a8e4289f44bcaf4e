"""Rows of other tools and other shapes, checked and made into rows that a method can learn from.

ShareGPT keeps a conversation in `conversations`, with `from` and `value` for who speaks and what. Alpaca keeps one
question and its answer in columns; it becomes a conversation too, so that the model's chat template writes it. A
ranking becomes a pair of its best and its worst answer. Nothing of a row is lost on the way: what has no place in it
is refused.

Token ids are taken as they are, so a mistake in them cannot be seen later. Labels follow the Hugging Face convention:
one for each token, equal to it where it counts and -100 where it does not; the model itself compares each label with
what it predicts one place before. Labels that were shifted by hand, or masked with another number, would train on
wrong words without an error, and are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunekit.data.formats.messages import (
    ROLES,
    check_no_media,
    conversation,
    function_call,
    plain,
    prompt,
    text,
    turns,
    unweighted,
    with_system,
    with_tools,
)
from tunekit.data.formats.preferences import check_alike, pair
from tunekit.data.formats.row_formats import REWARD_ARGUMENTS, TABLES, BadRow, Row, described, listed, misspelt, of_type
from tunekit.data.packing.sequences import IGNORED
from tunekit.recipe.sections.data import PromptStyle

SPEAKERS: dict[str, str] = TABLES["speakers"]
"""The role that a speaker of a ShareGPT conversation has, where its name is another one."""

ASKING = ("messages", "conversations", "prompt", "instruction", "text")
"""Columns of which one holds what is asked."""


PROMPTS: dict[PromptStyle, dict[str, str]] = TABLES["alpaca_prompts"]
"""Prompts of alpaca rows, with and without an input, by their style."""


@dataclass(frozen=True)
class Wording:
    """Texts that a recipe puts around those of rows.

    Attributes:
        prompt_style: Prompts of alpaca rows.
        system: System message of conversations without one; None adds none.
    """

    prompt_style: PromptStyle = "plain"
    system: str | None = None

    @property
    def is_plain_text(self) -> bool:
        """True if alpaca rows are plain text, without turns."""
        return self.prompt_style == "alpaca"


AS_GIVEN = Wording()
"""No texts besides those of rows."""


@dataclass
class Findings:
    """Counts of what was found in the rows of a source, gathered into one sentence."""

    speakers: dict[str, str] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    """Optional columns that held something."""
    implicit_prompts: bool = False
    """Some pair has its prompt in both answers, not in a column."""


def asked_in(entry: object) -> Row:
    """Return the prompt of a row: `prompt`, a text or a conversation, and its `tools`, if any.

    An answer at the end of a conversation is left out. So rows to train on are rows to ask, too.

    Raises:
        BadRow: The row asks nothing.
    """
    value = of_type(entry, dict, "a row must be an object")
    check_no_media(value)
    findings = Findings()
    question: str | list[Row]
    if "messages" in value:
        question = _unanswered(turns(value["messages"], "messages"), "messages")
    elif "conversations" in value:
        entries = _turns(value["conversations"], "conversations", findings)
        messages = _unanswered(turns(entries, "conversations"), "conversations")
        question = with_system(messages, _optional_text(value, "system", findings))
    elif "prompt" in value:
        question = prompt(value["prompt"], move="remove that message, or rename the column to messages")
    elif "instruction" in value:
        question = _instruction(value, findings)
    elif "chosen" in value and "rejected" in value:
        question = preference(value, findings)["prompt"]
    elif "text" in value:
        question = text(value["text"], "text")
    else:
        near = misspelt(list(value), ASKING)
        raise BadRow(f"no column {listed(ASKING)}; {near or f'columns: {listed(value)}'}")
    return with_tools({"prompt": question}, value)


def _unanswered(messages: list[Row], where: str) -> list[Row]:
    """A conversation up to the last turn that is not the assistant's."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise BadRow(f"{where} has no system, user or tool message")
    return unweighted(messages)


def sharegpt(row: Row, findings: Findings) -> Row:
    """The conversation of a ShareGPT row."""
    messages = conversation(_turns(row["conversations"], "conversations", findings), "conversations")
    return {"messages": with_system(messages, _optional_text(row, "system", findings))}


def _turns(entries: object, where: str, findings: Findings) -> object:
    if not isinstance(entries, list):
        return entries
    return [_turn(entry, f"{where}[{i}]", findings) for i, entry in enumerate(entries)]


def _turn(value: object, where: str, findings: Findings) -> object:
    """One entry as {role, content}; an entry that has these already keeps them."""
    entry = of_type(value, dict, f"{where} must be an object {{from, value}}")
    if "from" not in entry and "role" in entry:
        return entry
    for key in ("from", "value"):
        if key not in entry:
            raise BadRow(f"{where} has no {key}")
    speaker, content = of_type(entry["from"], str, f"{where}.from must be a string"), entry["value"]
    role = SPEAKERS.get(speaker.lower(), speaker)
    if role not in ROLES:
        raise BadRow(f"{where}.from: unknown speaker {speaker[:40]!r}; known: {listed([*ROLES, *SPEAKERS])}")
    of_type(content, str, f"{where}.value must be a string")
    if {"role", "content"} & entry.keys():
        raise BadRow(f"{where} has both from and role, or both value and content; keep one of each")
    findings.speakers.setdefault(speaker, role)
    extra = {key: item for key, item in entry.items() if key not in ("from", "value")}
    if speaker.lower() == "function_call":
        return {"role": role, "content": "", **extra, "tool_calls": function_call(content, f"{where}.value")}
    return {"role": role, "content": content, **extra}


def alpaca(row: Row, findings: Findings, wording: Wording) -> Row:
    """An Alpaca row as a conversation, or as plain text under its headings."""
    answer = text(row["output"], "output")
    if wording.is_plain_text:
        unread = [column for column in ("system", "history") if row.get(column)]
        if unread:
            raise BadRow(f"{listed(unread)} is unsupported in plain text; set data.prompt_style=alpaca_turn")
        return {"prompt": _question(row, findings, wording.prompt_style), "completion": answer}
    question = _instruction(row, findings, wording.prompt_style)
    return {"messages": [*question, {"role": "assistant", "content": answer}]}


def _question(row: Row, findings: Findings, style: PromptStyle) -> str:
    """Instruction and input as one text."""
    question = text(row["instruction"], "instruction")
    context = _optional_text(row, "input", findings)
    # Rows may hold braces, so nothing is formatted twice.
    return PROMPTS[style]["with_input" if context else "alone"].format(instruction=question, input=context)


def _instruction(row: Row, findings: Findings, style: PromptStyle = "plain") -> list[Row]:
    """The conversation of an Alpaca row up to its answer."""
    question = _question(row, findings, style)
    messages: list[Row] = []
    system = _optional_text(row, "system", findings)
    if system:
        messages.append({"role": "system", "content": system})
    for earlier, reply in _history(row, findings):
        messages += [{"role": "user", "content": earlier}, {"role": "assistant", "content": reply}]
    return [*messages, {"role": "user", "content": question}]


def _history(row: Row, findings: Findings) -> list[tuple[str, str]]:
    """Earlier questions with their answers."""
    pairs = row.get("history")
    if not pairs:
        return []
    entries = of_type(pairs, list, "history must be a list of [question, answer]")
    findings.columns.add("history")
    turns = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, list) or len(entry) != 2:
            what = f"a list of {len(entry)}" if isinstance(entry, list) else described(entry)
            raise BadRow(f"history[{i}] must be a list [question, answer], got {what}")
        turns.append((text(entry[0], f"history[{i}][0]"), text(entry[1], f"history[{i}][1]")))
    return turns


def _optional_text(row: Row, column: str, findings: Findings) -> str:
    """Return the text of a column that a row may leave empty."""
    value = row.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    findings.columns.add(column)
    return text(value, column)


def with_default_system(row: Row, system: str) -> Row:
    """A row whose conversation begins with a system message: its own, or else this one.

    Raises:
        BadRow: The row is no conversation.
    """
    column = "messages" if "messages" in row else "prompt"
    turns_of_row = row.get(column)
    if not isinstance(turns_of_row, list):
        raise BadRow(f"data.system requires conversations, but {column} is plain text; put it into the rows")
    return row if turns_of_row[0]["role"] == "system" else {**row, column: with_system(turns_of_row, system)}


def replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """A value of a row with texts in all its strings replaced."""
    if isinstance(value, str):
        for old, new in texts.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, list):
        return [replaced(item, texts) for item in value]
    if isinstance(value, dict):
        return {key: replaced(item, texts) for key, item in value.items()}
    return value


def prompt_completion(row: Row) -> Row:
    """Both plain text, or both lists of messages: the two shapes that TRL knows."""
    completion = row["completion"]
    check_alike("prompt", row["prompt"], "completion", completion)
    question = prompt(row["prompt"], move="move that message to completion")
    check = conversation if isinstance(completion, list) else text
    return {"prompt": question, "completion": check(completion, "completion")}


def preference(row: Row, findings: Findings) -> Row:
    """A pair: its prompt in a column, in both answers, or as Axolotl and LLaMA-Factory write it.

    These have it in `messages` or `conversations`, and an answer is one message.
    """
    question, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if question is None and row.get("messages") is not None and isinstance(chosen, dict):
        findings.columns.add("messages")
        question = row["messages"]
    if isinstance(question, list):
        chosen, rejected = ([value] if isinstance(value, dict) else value for value in (chosen, rejected))
    if row.get("conversations") is not None:
        if question is not None:
            raise BadRow("columns prompt and conversations both hold the prompt; keep one of them")
        findings.columns.add("conversations")
        question = _turns(row["conversations"], "conversations", findings)
        if turns(question, "conversations")[-1]["role"] == "assistant":
            raise BadRow("conversations ends with an assistant message; move that message to chosen and rejected")
        chosen, rejected = _one_or_more(chosen, "chosen", findings), _one_or_more(rejected, "rejected", findings)
    findings.implicit_prompts |= question is None
    result = pair(question, chosen, rejected)
    system = _optional_text(row, "system", findings)
    if system and isinstance(result["prompt"], str):
        raise BadRow(
            "column system is unsupported with a plain-text prompt; "
            "put it into the prompt, for example by a row function (data.format=module:function)"
        )
    return {**result, "prompt": with_system(result["prompt"], system)} if system else result


def _one_or_more(said: object, where: str, findings: Findings) -> object:
    """An answer as a list of messages, where it is one {from, value} or several."""
    return _turns([said] if isinstance(said, dict) else said, where, findings)


def prompt_with_references(row: Row) -> Row:
    """A prompt, and all that stands beside it for the rewards to look at."""
    own = {"prompt", "tools", *REWARD_ARGUMENTS}
    references = {column: value for column, value in row.items() if column not in own}
    for column, value in references.items():
        plain(value, column)
    question = prompt(row["prompt"], move="remove that message; the model generates it")
    return {"prompt": question, **references}


_MASKS = ("completion_mask", "assistant_masks")


def check_tokens(row: Row) -> Row:
    """A row as `input_ids` with `labels`; all tokens count where nothing says which."""
    ids = _integers(row["input_ids"], "input_ids")
    if not ids:
        raise BadRow("input_ids is empty")
    low = next((i for i, token in enumerate(ids) if token < 0), None)
    if low is not None:
        raise BadRow(f"input_ids[{low}] must be at least 0, got the number {ids[low]}")
    if row.get("attention_mask") is not None:
        mask = _bits(row["attention_mask"], "attention_mask", len(ids))
        if 0 in mask:
            raise BadRow(
                f"attention_mask[{mask.index(0)}] is 0: the row is padded; remove the padding from every column"
            )
    present = [column for column in ("labels", *_MASKS) if row.get(column) is not None]
    if len(present) > 1:
        raise BadRow(f"{listed(present)} are all loss masks; keep one of them")
    if not present:
        return {"input_ids": ids, "labels": list(ids)}
    if present == ["labels"]:
        return {"input_ids": ids, "labels": _labels(row["labels"], ids)}
    mask = _bits(row[present[0]], present[0], len(ids))
    return {"input_ids": ids, "labels": [token if bit else IGNORED for token, bit in zip(ids, mask, strict=True)]}


def _labels(value: object, ids: list[int]) -> list[int]:
    labels = _integers(value, "labels", len(ids))
    for i, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (token, IGNORED):
            raise BadRow(
                f"labels[{i}] is {label}, but input_ids[{i}] is {token}; a label must equal its input id (unshifted, "
                f"the model shifts labels) or be {IGNORED} (ignored by the loss)"
            )
    return labels


def _bits(value: object, where: str, length: int) -> list[int]:
    bits = _integers(value, where, length)
    other = next((i for i, bit in enumerate(bits) if bit not in (0, 1)), None)
    if other is not None:
        raise BadRow(f"{where}[{other}] must be 0 or 1, got the number {bits[other]}")
    return bits


def _integers(value: object, where: str, length: int | None = None) -> list[int]:
    if isinstance(value, str):
        raise BadRow(
            f"{where} must be a list of integers, got a string; use .jsonl or .parquet, where a column can hold lists"
        )
    numbers = of_type(value, list, f"{where} must be a list of integers")
    for i, number in enumerate(numbers):
        if type(number) is not int:
            raise BadRow(f"{where}[{i}] must be an integer, got {described(number)}")
    if length not in (None, len(numbers)):
        raise BadRow(f"{where} must have the length of input_ids ({length:,}), got {len(numbers):,}")
    return numbers
