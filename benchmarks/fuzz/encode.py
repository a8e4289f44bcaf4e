"""Rows as token ids and labels, from the definitions alone: rendered prefixes of the chat template, and characters.

Nothing here imports tunekit, or a difference would hide in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Learned(NamedTuple):
    """A sequence and, for each token, its id where it is learned, else -100."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


class Pair(NamedTuple):
    """A row of answers: tokens of its prompt, each answer with its prompt, and the first of these uncut."""

    num_prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    full: tuple[int, ...]
    label: bool | None


def sequences(rows: Sequence[Row], tokenizer: Any, *, max_length: int, loss_on: str) -> list[Learned]:
    """Return what is learned from rows of supervised fine-tuning, in their order."""
    made: list[Learned] = []
    for row in rows:
        if "text" in row:
            ids = _plain(row["text"], tokenizer)
            pieces = [ids]
            if len(ids) > max_length:
                # Each piece begins with the token that the last one ended with.
                pieces = [ids[at : at + max_length] for at in range(0, len(ids) - 1, max_length - 1)]
            made += [Learned(tuple(piece), (-100, *piece[1:])) for piece in pieces]
            continue
        if "input_ids" in row:
            ids, learned = list(row["input_ids"]), [label != -100 for label in row["labels"]]
        else:
            ids, learned = _marked(row, tokenizer, loss_on)
        ids, learned = ids[:max_length], learned[:max_length]
        labels = [token if is_learned else -100 for token, is_learned in zip(ids, learned, strict=True)]
        made.append(Learned(tuple(ids), (-100, *labels[1:])))
    return [one for one in made if any(label != -100 for label in one.labels)]


def _plain(text: str, tokenizer: Any) -> list[int]:
    ids = tokenizer(text)["input_ids"]
    return ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def _marked(row: Row, tokenizer: Any, loss_on: str) -> tuple[list[int], list[bool]]:
    if isinstance(row.get("prompt"), str):
        whole = _plain(row["prompt"] + row["completion"], tokenizer)
        prompt = tokenizer(row["prompt"])["input_ids"]
        shared = next((i for i, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), None)
        num_given = len(prompt) if shared is None else shared
        return whole, [loss_on == "all" or i >= num_given for i in range(len(whole))]
    messages = [*row["prompt"], *row["completion"]] if "prompt" in row else list(row["messages"])
    text = render(messages, tokenizer)
    spans = [(0, len(text))] if loss_on == "all" else _spans(row, messages, tokenizer, loss_on)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [
        any(start < last and first < max(end, start + 1) for first, last in spans)
        for start, end in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], learned


def _spans(row: Row, messages: list[Row], tokenizer: Any, loss_on: str) -> list[tuple[int, int]]:
    """Characters of the turns that are learned, each with the token that ends it."""
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = spoken[-1:] if loss_on == "last" else spoken
    turns = [i for i in turns if i >= len(row.get("prompt", ())) and messages[i].get("weight") != 0]
    return [_span(messages, turn, tokenizer) for turn in turns]


def _span(messages: list[Row], turn: int, tokenizer: Any) -> tuple[int, int]:
    start = len(render(messages[:turn], tokenizer, asks=True))
    text = render(messages[: turn + 1], tokenizer)
    bare = text.rstrip()
    ends = bare.endswith(tuple(tokenizer.get_added_vocab()))
    return start, len(bare) if ends else len(text)


def render(messages: Sequence[Row], tokenizer: Any, *, asks: bool = False) -> str:
    """Return a conversation as text, up to where the assistant is asked to speak if it `asks`."""
    plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    text: str = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=asks)
    return text


def answers(rows: Sequence[Row], tokenizer: Any, *, max_length: int, classifies: bool) -> list[Pair]:
    """Return rows of preferences or of rated answers as tokens, without those that have no room.

    Args:
        rows: The rows.
        tokenizer: The tokenizer.
        max_length: Longest sequence; answers are cut there.
        classifies: Whole pairs are scored, so that none is cut: longer ones are left out.
    """
    pairs = []
    for row in rows:
        prompt = _ids(render(row["prompt"], tokenizer, asks=True), tokenizer)
        columns = ("completion",) if "completion" in row else ("chosen", "rejected")
        whole = [_ids(render([*row["prompt"], *row[column]], tokenizer), tokenizer) for column in columns]
        longest = max(map(len, whole)) if classifies else len(prompt) + 1
        if longest <= max_length:
            cut = tuple(tuple(ids[:max_length]) for ids in whole)
            shared = tuple(_shared(prompt, ids) for ids in whole)
            pairs.append(Pair(shared, cut, tuple(whole[0]), row.get("label")))
    return pairs


def _ids(text: str, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    num = 0
    while num < min(len(one), len(other)) and one[num] == other[num]:
        num += 1
    return num
