"""Rows as other tools write them, made into rows that can be trained on.

ShareGPT keeps a conversation in `conversations`, with `from` and `value` for who speaks and what. Alpaca keeps one
question and its answer in columns; it becomes a conversation too, so that the model's chat template writes it.
Nothing of a row is lost on the way: what has no place in a conversation is refused.
"""

from dataclasses import dataclass, field

from tunekit.data.formats import (
    BECOMES,
    ROLES,
    BadRow,
    Row,
    SourceFormat,
    check_columns,
    check_row,
    conversation,
    described,
    listed,
    text,
    tools_of,
)

SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "observation": "tool",
}
"""The role that a speaker of a ShareGPT conversation has, where its name is another one."""


@dataclass
class Findings:
    """What was found in the rows of a source, gathered for a sentence about them."""

    speakers: dict[str, str] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    """Optional columns that held something."""


def convert_row(value: object, format: SourceFormat, findings: Findings) -> Row:
    """Check one row and make it a row that can be trained on.

    Args:
        value: The row as it was read.
        format: The format that the source has.
        findings: What was found in the rows so far; this row's is added.

    Raises:
        BadRow: The row is not one of this format.
    """
    if format not in ("sharegpt", "alpaca"):
        row = check_row(value, BECOMES[format])
    elif not isinstance(value, dict):
        raise BadRow(f"a row must be an object, got {described(value)}")
    else:
        check_columns(list(value), format)
        row = _sharegpt(value, findings) if format == "sharegpt" else _alpaca(value, findings)
    if "tools" in row:
        findings.columns.add("tools")
    return row


def conversion(format: SourceFormat, findings: Findings) -> str:
    """What becomes of the columns, in a few words; nothing for a format that stays as it is."""
    if format == "sharegpt":
        said = "conversations -> messages"
        renamed = [f"{name} -> {role}" for name, role in findings.speakers.items() if name != role]
        said += f" ({', '.join(renamed)})" if renamed else ""
    elif format == "alpaca":
        said = "instruction -> user" if "input" not in findings.columns else "instruction + input -> user"
        said += ", output -> assistant"
        said += ", history -> earlier turns" if "history" in findings.columns else ""
    else:
        return ""
    return said + (", system -> system" if "system" in findings.columns else "")


def _sharegpt(row: Row, findings: Findings) -> Row:
    entries = row["conversations"]
    if isinstance(entries, list):
        entries = [_turn(entry, f"conversations[{i}]", findings) for i, entry in enumerate(entries)]
    messages = conversation(entries, "conversations")
    system = _optional_text(row, "system", findings)
    if system:
        if messages[0]["role"] == "system":
            raise BadRow("the column system and a first turn of the system: only one of them can stand there")
        messages.insert(0, {"role": "system", "content": system})
    tools = tools_of(row.get("tools"))
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def _turn(entry: object, where: str, findings: Findings) -> object:
    """One entry as {role, content}; an entry that has these already keeps them."""
    if not isinstance(entry, dict):
        raise BadRow(f"{where} must be an object {{from, value}}, got {described(entry)}")
    if "from" not in entry and "role" in entry:
        return entry
    for key in ("from", "value"):
        if key not in entry:
            raise BadRow(f"{where} has no {key}")
    speaker, said = entry["from"], entry["value"]
    if not isinstance(speaker, str):
        raise BadRow(f"{where}.from must be a string, got {described(speaker)}")
    role = SPEAKERS.get(speaker.lower(), speaker)
    if role not in ROLES:
        raise BadRow(f"{where}.from: unknown speaker {speaker[:40]!r}; known are {listed([*ROLES, *SPEAKERS])}")
    if not isinstance(said, str):
        raise BadRow(f"{where}.value must be a string, got {described(said)}")
    if {"role", "content"} & entry.keys():
        raise BadRow(f"{where} has both from and role, or value and content; only one of them can be meant")
    findings.speakers.setdefault(speaker, role)
    rest = {key: held for key, held in entry.items() if key not in ("from", "value")}
    return {"role": role, "content": said, **rest}


def _alpaca(row: Row, findings: Findings) -> Row:
    question = text(row["instruction"], "instruction")
    given = _optional_text(row, "input", findings)
    if given:
        question += "\n\n" + given
    messages: list[Row] = []
    system = _optional_text(row, "system", findings)
    if system:
        messages.append({"role": "system", "content": system})
    for earlier, answer in _history(row, findings):
        messages += [{"role": "user", "content": earlier}, {"role": "assistant", "content": answer}]
    answer = text(row["output"], "output")
    return {"messages": [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _history(row: Row, findings: Findings) -> list[tuple[str, str]]:
    """Earlier questions with their answers."""
    pairs = row.get("history")
    if not pairs:
        return []
    if not isinstance(pairs, list):
        raise BadRow(f"history must be a list of [question, answer], got {described(pairs)}")
    findings.columns.add("history")
    turns = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2:
            what = f"a list of {len(pair)}" if isinstance(pair, list) else described(pair)
            raise BadRow(f"history[{i}] must be a list [question, answer], got {what}")
        turns.append((text(pair[0], f"history[{i}][0]"), text(pair[1], f"history[{i}][1]")))
    return turns


def _optional_text(row: Row, column: str, findings: Findings) -> str:
    """What stands in a column that a row may leave empty."""
    value = row.get(column)
    if value is None or value == "":
        return ""
    if isinstance(value, str) and not value.strip():
        return ""
    findings.columns.add(column)
    return text(value, column)
