"""Rewards: the user's own functions, of TRL's signature, held to what they must return.

A reward is called with `prompts`, `completions` and the other columns of the rows, a list each, and returns a number
for each completion, or None for one that it has nothing to say of.
"""

import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tunekit.errors import RunError
from tunekit.recipe.functions import find_function
from tunekit.recipe.rewards import FunctionReward, Reward

_SHOWN = 200
"""Letters of a prompt and of a completion that an error shows."""


def load_rewards(rewards: Sequence[Reward]) -> list[Callable[..., Any]]:
    """The functions that a recipe names, each called as TRL calls it.

    Raises:
        RecipeError: One of them is not there.
    """
    paths = [reward.path for reward in rewards if isinstance(reward, FunctionReward)]
    names = [path.rpartition(":")[2] for path in paths]
    return [
        _checked(path, find_function(path), name if names.count(name) == 1 else path)
        for path, name in zip(paths, names, strict=True)
    ]


def _checked(path: str, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A reward that says what is wrong with what it returns, under the name that its metrics have."""

    def reward(**columns: Any) -> list[float | None]:
        try:
            returned = function(**columns)
        except Exception as error:  # the function is the user's: it may raise anything
            raise _raised(path, function, columns, error) from error
        return _values(path, returned, columns)

    reward.__name__ = name
    return reward


def _values(path: str, returned: Any, columns: dict[str, Any]) -> list[float | None]:
    """What a reward returned, as one number or None for each completion.

    Raises:
        RunError: It is something else.
    """
    wanted = len(columns["completions"])
    try:
        values = list(returned)
    except TypeError:
        raise RunError(
            f"method.rewards: {path} returned a value of type {type(returned).__name__}, not a list",
            hint="return a list with a number for each completion",
        ) from None
    if len(values) != wanted:
        raise RunError(
            f"method.rewards: {path} returned {len(values)} values for {wanted} completions; the first was "
            f"{_shown(columns, 0)}",
            hint="return one number for each completion, None where there is nothing to say",
        )
    return [None if value is None else _number(path, value, columns, index) for index, value in enumerate(values)]


def _number(path: str, value: Any, columns: dict[str, Any], index: int) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    shown = value if isinstance(value, int | float | str) else f"a value of type {type(value).__name__}"
    raise RunError(
        f"method.rewards: {path} returned {shown} for {_shown(columns, index)}",
        hint="return a finite number, or None where there is nothing to say",
    )


def _raised(path: str, function: Callable[..., Any], columns: dict[str, Any], error: Exception) -> RunError:
    """A reward raised: where, why, and for which row, which is found by giving it one row after another."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())[:_SHOWN]
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return RunError(
        f"method.rewards: {path} raised {what} ({where.filename}:{where.lineno}) for {_culprit(function, columns)}",
        hint="a reward must take every completion; let it return 0 or None where it cannot judge",
    )


def _culprit(function: Callable[..., Any], columns: dict[str, Any]) -> str:
    for index in range(len(columns["completions"])):
        alone = {name: [value[index]] if isinstance(value, list) else value for name, value in columns.items()}
        try:
            function(**alone)
        except Exception:  # noqa: BLE001  (the row that it fails on is what is looked for)
            return _shown(columns, index)
    return f"all completions together, and for none alone; the first was {_shown(columns, 0)}"


def _shown(columns: dict[str, Any], index: int) -> str:
    """A prompt and its completion, cut."""
    prompt, completion = (_text(columns[name][index]) for name in ("prompts", "completions"))
    return f"prompt {prompt!r}, completion {completion!r}"


def _text(value: Any) -> str:
    """A text, or the last of several messages."""
    text = str(value[-1]["content"]) if isinstance(value, list) else str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
