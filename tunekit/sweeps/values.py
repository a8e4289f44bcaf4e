"""Values of a sweep: lists such as `adapter.rank=8,32`, ranges such as `train.learning_rate=1e-5..1e-3`, and draws.

A range is whole where both of its ends are, and on a logarithmic scale where they are a factor of ten or more apart:
`linear:1e-5..1e-3` and `log:8..64` say otherwise.
"""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from tunekit.errors import RecipeError
from tunekit.planner.variants import read_values, to_words
from tunekit.recipe.reading.parse import to_inline_yaml

MAX_RUNS = 100
"""Runs in one sweep: more is no table that anybody reads."""

DIGITS = 3
"""Of a number that is drawn: more would be written and not meant."""

LOG_FACTOR = 10
"""Ratio between the ends of a range, each above zero, from which on its scale is logarithmic."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SPAN = re.compile(rf"(?:(log|linear):)?({_NUMBER}?)\.\.({_NUMBER})")
_WHOLE = re.compile(r"[-+]?\d+")

Number = int | float
Changes = dict[str, Any]
"""Values by their dotted keys."""


@dataclass(frozen=True)
class Span:
    """A range that values are drawn from.

    Attributes:
        low: Its least value; whole numbers are drawn where both ends are whole.
        high: Its greatest.
        log: Whether its scale is logarithmic.
    """

    low: Number
    high: Number
    log: bool

    @property
    def is_whole(self) -> bool:
        """True if whole numbers are drawn."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def at(self, share: float) -> Number:
        """The value that has a share, from 0 to 1, of the range below it."""
        top = self.high + 1 if self.is_whole else self.high
        value = self.low * (top / self.low) ** share if self.log else self.low + share * (top - self.low)
        return self.rounded(math.floor(value) if self.is_whole else value)

    def rounded(self, value: float) -> Number:
        """A value with as many digits as are meant."""
        near = round(value) if self.is_whole else float(f"{value:.{DIGITS}g}")
        return min(max(near, self.low), self.high)

    def __str__(self) -> str:
        return f"{'log' if self.log else 'linear'}:{self.low}..{self.high}"


Axis = Span | tuple[Any, ...]
"""Values to try of one key."""


def read_words(words: Sequence[str]) -> tuple[dict[str, Axis], list[str]]:
    """Return the axes by the keys of the recipe, and the words that change the recipe for all.

    Args:
        words: Each a `key=value`, of which those with several values or a range are tried.

    Raises:
        RecipeError: A word cannot be read.
    """
    axes: dict[str, Axis] = {}
    overrides = []
    for word in words:
        key, equals, written = word.partition("=")
        if equals and not written.strip():
            raise RecipeError(f"{word}: no value after '='", hint="write key=value,value such as adapter.rank=8,16")
        axis = _axis(word, written.strip())
        if axis is None:
            overrides.append(word)
        elif key.strip() in axes:
            raise RecipeError(f"{word}: {key.strip()} is set twice", hint="pass all its values in one argument")
        else:
            axes[key.strip()] = axis
    return axes, overrides


def axes_of(values: Mapping[str, Sequence[Any] | str | Span]) -> dict[str, Axis]:
    """The same from values by their keys: lists, or ranges in words such as `1e-5..1e-3`.

    Raises:
        RecipeError: There is nothing to try of a key.
    """
    axes: dict[str, Axis] = {}
    for key, values_text in values.items():
        if isinstance(values_text, str):
            axis: Axis = read_span(f"{key}={values_text}", values_text) or ()
        else:
            axis = values_text if isinstance(values_text, Span) else _distinct(key, values_text)
        if not axis:
            raise RecipeError(f"{key}: no values to try", hint="pass a list, or a range such as '1e-5..1e-3'")
        axes[key] = axis
    return axes


def read_span(word: str, written: str) -> Span | None:
    """A range, of a text that is one.

    Raises:
        RecipeError: Its ends are no range.
    """
    match = _SPAN.fullmatch(written)
    if match is None or not match[2]:
        return None
    low, high = (int(end) if _WHOLE.fullmatch(end) else float(end) for end in match.groups()[1:])
    if not low < high:
        raise RecipeError(f"{word}: {low} is not below {high}", hint="write the lower bound first")
    if match[1] == "log" and low <= 0:
        raise RecipeError(f"{word}: a log scale cannot start at {low}", hint="start above zero, or use linear:")
    log = match[1] == "log" if match[1] else low > 0 and high >= LOG_FACTOR * low
    return Span(low, high, log)


def _axis(word: str, written: str) -> Axis | None:
    """Return the axis of a key; None where it has one value for all."""
    span = read_span(word, written)
    if span is not None or "," not in written:
        return span
    try:
        ((key, values),) = read_values([word]).items()
    except RecipeError:
        hint = "write key=value,value such as adapter.rank=8,16"
        raise RecipeError(f"{word}: invalid list of values", hint=hint) from None
    return _distinct(key, values) if len(values) > 1 else None


def _distinct(key: str, values: Sequence[Any]) -> tuple[Any, ...]:
    written = [to_inline_yaml(value) for value in values]
    twice = next((word for number, word in enumerate(written) if word in written[:number]), None)
    if twice is not None:
        raise RecipeError(f"{key}: duplicate value {twice}", hint="list each value once")
    return tuple(values)


def grid(axes: Mapping[str, Axis]) -> list[Changes]:
    """Every combination. The last key changes fastest.

    Raises:
        RecipeError: There is a range among them, or they are too many.
    """
    spans = [key for key, axis in axes.items() if isinstance(axis, Span)]
    if spans:
        problem = f"{', '.join(spans)}: a grid needs lists, not ranges"
        raise RecipeError(problem, hint="sample ranges with --random N or --optuna N")
    lists = {key: axis for key, axis in axes.items() if not isinstance(axis, Span)}
    numbers = [len(values) for values in lists.values()]
    if prod(numbers) > MAX_RUNS:
        words = f"{' x '.join(map(str, numbers))} = {prod(numbers)}"
        problem = f"{words} runs exceed the limit of {MAX_RUNS} per sweep"
        raise RecipeError(problem, hint="try fewer values, or sample with --random N")
    return [dict(zip(lists, chosen, strict=True)) for chosen in product(*lists.values())]


def drawn(axes: Mapping[str, Axis], num: int, seed: int) -> list[Changes]:
    """Combinations by chance, each another one.

    Raises:
        RecipeError: There are not as many.
    """
    check_number(axes, num)
    chance = random.Random(seed)
    combinations: dict[str, Changes] = {}
    for _ in range(1000 * num):
        changes = {
            key: axis.at(chance.random()) if isinstance(axis, Span) else chance.choice(axis)
            for key, axis in axes.items()
        }
        combinations.setdefault(words_of(changes), changes)
        if len(combinations) == num:
            break
    return list(combinations.values())


def check_number(axes: Mapping[str, Axis], num: int) -> None:
    """Refuse to draw more than there is, or than a sweep holds.

    Raises:
        RecipeError: It is.
    """
    if num > MAX_RUNS:
        raise RecipeError(f"{num} runs exceed the limit of {MAX_RUNS} per sweep", hint="sample fewer")
    sizes = [
        (axis.high - axis.low + 1 if axis.is_whole else math.inf) if isinstance(axis, Span) else len(axis)
        for axis in axes.values()
    ]
    if num > prod(sizes):
        problem = f"{num} runs exceed the {prod(sizes)} combinations"
        raise RecipeError(problem, hint="sample fewer, or omit the number to try all")


def corners(axes: Mapping[str, Axis]) -> list[Changes]:
    """Combinations in which each value, and each end of a range, is there once at least."""
    columns = {key: (axis.low, axis.high) if isinstance(axis, Span) else axis for key, axis in axes.items()}
    return [
        {key: column[number % len(column)] for key, column in columns.items()}
        for number in range(max(map(len, columns.values())))
    ]


def words_of(changes: Mapping[str, Any]) -> str:
    """Changes in a line."""
    return " ".join(to_words(changes))
