"""Answers that are compared: a better one with a worse one, several in order, or one that is good or bad, or its steps.

A pair is kept as TRL wants it, `prompt`, `chosen` and `rejected`, all texts or all lists of messages. Where the prompt
is not a column, it is what both answers begin with. Conversations show where it ends: before the assistant speaks.
Texts show it only where they name the speaker, as Anthropic's HH does; two texts that merely begin alike, as answers
to one question often do, have no prompt in them, and are refused.
"""

import math

from tunekit.data.formats.messages import answer, conversation, prompt, text, turns, unweighted
from tunekit.data.formats.row_formats import BadRow, Row, counted, described, of_type
from tunekit.data.packing.sequences import common_prefix_length

_SPOKEN = "\n\nAssistant:"
"""Speaker marks in the texts of Anthropic's HH."""


def pair(given: object, chosen: object, rejected: object) -> Row:
    """A prompt with a better and a worse answer, from columns that hold all three, or the prompt within the answers.

    Args:
        given: The prompt; None where it stands in both answers.
        chosen: The better answer.
        rejected: The worse answer.

    Raises:
        BadRow: They make no pair.
    """
    if given is None:
        return _explicit(*split(chosen, rejected))
    kinds = [isinstance(value, list) for value in (given, chosen, rejected)]
    if (
        not isinstance(given, list)
        and isinstance(chosen, list)
        and isinstance(rejected, list)
        and _begins_with(chosen, "user", "system")
    ):
        return _repeated(text(given, "prompt"), chosen, rejected)
    if any(kinds) and not all(kinds):
        types = f"{described(given)}, {described(chosen)} and {described(rejected)}"
        raise BadRow(f"prompt, chosen and rejected must all be strings or all be lists of messages, got {types}")
    if isinstance(given, list) and isinstance(chosen, list) and isinstance(rejected, list):
        start = len(given)
        if chosen[:start] == given == rejected[:start]:  # the answers are whole conversations
            chosen, rejected = chosen[start:], rejected[start:]
    question = prompt(given, move="move that message to chosen and rejected")
    return _explicit(question, chosen, rejected)


def split(chosen: object, rejected: object) -> tuple[str | list[Row], object, object]:
    """The prompt that two answers begin with, and what is left of each.

    As TRL's `extract_prompt` where the answers differ from their first message or letter on; where they go on alike,
    the prompt still ends before the assistant speaks.

    Raises:
        BadRow: They begin with no prompt, or do not differ.
    """
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _split_messages(chosen, rejected)
    check_alike("chosen", chosen, "rejected", rejected)
    return _split_texts(text(chosen, "chosen"), text(rejected, "rejected"))


def check_alike(one: str, value: object, other: str, other_value: object) -> None:
    """Check that two columns are both texts or both conversations.

    Raises:
        BadRow: They are not.
    """
    if isinstance(value, list) != isinstance(other_value, list):
        raise BadRow(
            f"{one} and {other} must both be strings or both be lists of messages, "
            f"got {described(value)} and {described(other_value)}"
        )


def _split_messages(chosen: list[Row], rejected: list[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    better, worse = conversation(chosen, "chosen"), conversation(rejected, "rejected")
    _check_different(unweighted(better), unweighted(worse))
    end = 0
    before = "assistant"
    for i, (left, other) in enumerate(zip(unweighted(better), unweighted(worse), strict=False)):
        if left["role"] == other["role"] == "assistant" != before:
            end = i
        if left != other:
            break
        before = left["role"]
    if end == 0:
        raise BadRow(
            "chosen and rejected have no common prompt; without a column prompt, both must be complete conversations "
            "that begin with the same messages"
        )
    return unweighted(better[:end]), chosen[end:], rejected[end:]


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    _check_different(chosen, rejected)
    end = chosen.rfind(_SPOKEN, 0, common_prefix_length(chosen, rejected))
    if end == -1:
        raise BadRow(
            r"chosen and rejected are strings without a common prompt (\n\nHuman: ... \n\nAssistant:); set "
            "data.columns={prompt: ...} to the column of the prompt"
        )
    end += len(_SPOKEN)
    return chosen[:end], chosen[end:], rejected[end:]


def _repeated(asked: str, chosen: list[Row], rejected: list[Row]) -> Row:
    """A pair whose prompt stands in a column, and again as the first question of both conversations."""
    question, better, worse = _split_messages(chosen, rejected)
    first = next((message["content"] for message in question if message["role"] == "user"), "")
    if first.strip() != asked.strip():
        raise BadRow(
            "prompt is a string, but chosen is a conversation with another first user message; make them equal, or "
            "make prompt, chosen and rejected all strings or all lists of messages"
        )
    return _explicit(question, better, worse)


def _begins_with(value: object, *roles: str) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and first.get("role") in roles


def _explicit(asked: str | list[Row], chosen: object, rejected: object) -> Row:
    better, worse = answer(chosen, "chosen"), answer(rejected, "rejected")
    _check_different(better, worse)
    return {"prompt": asked, "chosen": better, "rejected": worse}


def _check_different(chosen: object, rejected: object) -> None:
    if chosen == rejected:
        raise BadRow("chosen and rejected are identical")


def best_and_worst(row: Row) -> Row:
    """A ranking as a pair: the answer with the highest score and the one with the lowest, the first of several.

    Raises:
        BadRow: It is no ranking, or no answer is better than another.
    """
    completions, scores = row["completions"], row["scores"]
    for column in ("completions", "scores"):
        of_type(row[column], list, f"{column} must be a list")
    if len(completions) != len(scores):
        raise BadRow(f"{counted(len(completions), 'completion')}, but {counted(len(scores), 'score')}")
    if len(completions) < 2:
        raise BadRow(f"completions must hold at least two completions, got {len(completions)}")
    for i, score in enumerate(scores):
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise BadRow(f"scores[{i}] must be a number, got {described(score)}")
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if best == worst:
        raise BadRow(f"every score is {scores[0]}; no completion is better than another")
    if row["prompt"] is None:
        raise BadRow("prompt must be a string or a list of messages, got null")
    return pair(row["prompt"], completions[best], completions[worst])


def rated(row: Row) -> Row:
    """An answer that is good or bad, as TRL's KTO wants it."""
    question, completion = row["prompt"], row["completion"]
    check_alike("prompt", question, "completion", completion)
    return {
        "prompt": prompt(question, move="move that message to completion"),
        "completion": answer(completion, "completion"),
        "label": _label(row["label"]),
    }


def with_labelled_steps(row: Row) -> Row:
    """An answer as the list of its steps, each of which is good or bad (TRL's stepwise supervision)."""
    question = prompt(row["prompt"], move="move that message to completions, as steps")
    texts = of_type(row["completions"], list, "completions must be a list of steps")
    labels = of_type(row["labels"], list, "labels must be a list with true or false for each step")
    if not texts:
        raise BadRow("completions is empty")
    if len(texts) != len(labels):
        raise BadRow(f"{counted(len(texts), 'step')} in completions, but {counted(len(labels), 'label')}")
    steps = [text(step, f"completions[{i}]") for i, step in enumerate(texts)]
    return {"prompt": question, "completions": steps, "labels": [_step_label(*each) for each in enumerate(labels)]}


def with_label(row: Row) -> Row:
    """A text or a conversation with its label, or with the list of its labels."""
    value, label = row["prompt"], row["label"]
    for i, entry in enumerate(label if isinstance(label, list) else [label]):
        if not isinstance(entry, str | int) or entry == "":
            where = f"label[{i}]" if isinstance(label, list) else "label"
            raise BadRow(f"{where} must be the name of a label or its position, got {described(entry)}")
    if not isinstance(value, list):
        return {"prompt": text(value, "prompt"), "label": label}
    return {"prompt": unweighted(turns(value, "prompt")), "label": label}


def _step_label(index: int, value: object) -> bool:
    bit = _bit(value)
    if bit is None:
        raise BadRow(f"labels[{index}] must be true (good step) or false (bad), got {described(value)}")
    return bit


def _bit(value: object) -> bool | None:
    """Return a label that is a boolean, or 0 or 1; None for anything else."""
    if isinstance(value, bool):
        return value
    return value == 1 if type(value) is int and value in (0, 1) else None


def _label(value: object) -> bool:
    bit = _bit(value)
    if bit is not None:
        return bit
    if value in ("true", "false"):  # as CSV has it
        return value == "true"
    description = f"the string '{value[:40]}'" if isinstance(value, str) else described(value)
    raise BadRow(
        f"label must be true (good completion) or false (bad), got {description}; "
        "to ignore the column, set data.format=prompt_completion"
    )
