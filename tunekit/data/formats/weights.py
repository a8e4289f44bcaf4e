"""Marks of a turn that say whether it is learned.

OpenAI writes `weight: 0`, Axolotl `train: false` (or `training`), ms-swift `loss: false`. All of them become a weight
of 0, which the loss leaves out. A mark that cannot be honoured, a fraction or another spelling, is refused: left aside,
it would train on what it is there to keep out.
"""

import re
from collections.abc import Mapping

from tunekit.data.formats.row_formats import BadRow, Row, described, shortened

SWITCHES = ("train", "training", "loss")
"""Keys of a turn that say with true or false what `weight` says with 1 or 0."""

_MARKS = ("weight", *SWITCHES)

_WORDS = frozenset(
    (
        *("weight", "weights", "weighted", "loss", "losses", "train", "trained", "training", "trainable"),
        *("learn", "learned", "learnable", "supervised", "ignore", "ignored"),
        *("mask", "masks", "masked", "masking", "unmask", "unmasked"),
    )
)
"""Words in the name of a key that is likely such a mark: `loss_scale`, `trainOnTurn`, `is_masked`."""

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
                f"{where}.{shortened(key)} looks like a weight in the loss, which is not read from there; write "
                "weight 0 for an assistant turn that is not to be learned, or take the key out"
            )
    if len(set(marks.values())) > 1:
        first, other = (f"{mark} is {_shown(message[mark])}" for mark in _first_of_each(marks))
        raise BadRow(f"{where}: {first}, but {other}; keep one of them")
    if not marks:
        return message
    content = {key: item for key, item in message.items() if key not in SWITCHES}
    if message["role"] == "assistant" and not all(marks.values()):
        content["weight"] = 0
    return content


def unlearned_mark(message: Mapping[str, object]) -> str:
    """The mark by which a turn is not learned, in words: `train is false`."""
    mark = next((mark for mark in _MARKS if message.get(mark) in (False, 0)), "weight")
    return f"{mark} is {_shown(message.get(mark))}"


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
                f"the column {shortened(column)} looks like a mask of the loss, which is not read from there; write "
                "weight 0 in the turns that are not to be learned, or labels beside input_ids, or take the column out"
            )


def _learned(message: Row, mark: str, where: str) -> bool:
    """Return whether a mark says that its message is learned."""
    mark_value = message[mark]
    if mark == "weight":
        if message["role"] != "assistant":
            raise BadRow(f"{where}.weight: only an assistant turn has a weight, and this is one of {message['role']}")
        if type(mark_value) is not int or mark_value not in (0, 1):
            raise BadRow(
                f"{where}.weight must be 0 (the turn does not count) or 1 (it does), got {described(mark_value)}"
            )
        return mark_value == 1
    if not isinstance(mark_value, bool):
        raise BadRow(f"{where}.{mark} must be true (the turn counts in the loss) or false, got {described(mark_value)}")
    if mark_value and message["role"] != "assistant":
        raise BadRow(
            f"{where}.{mark} is true, but only assistant turns can be learned, and this is one of {message['role']}; "
            "take it out"
        )
    return mark_value


def _first_of_each(said: Mapping[str, bool]) -> tuple[str, str]:
    """The first mark, and the first that says otherwise."""
    first = next(iter(said))
    return first, next(mark for mark in said if said[mark] != said[first])


def _is_mark(held: object) -> bool:
    """Return whether a value could be a weight; a name or a sentence could not."""
    if not isinstance(held, str):
        return True
    return re.fullmatch(r"\s*(?:true|false|yes|no|on|off|[-+]?[\d.]+(?:e[-+]?\d+)?)\s*", held.lower()) is not None


def _is_numbers(held: object) -> bool:
    return isinstance(held, list) and bool(held) and all(isinstance(item, bool | int | float) for item in held)


def _shown(said: object) -> str:
    return str(said).lower()
