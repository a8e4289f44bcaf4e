"""From a recipe's rewards to what TRL calls: functions of its signature, held to what they must return.

A reward is called with `prompts`, `completions` and the other columns of the rows, a list each, and returns a number
for each completion, or None for one that it has nothing to say of. Those that come with tunekit are held to the same
as the user's own.

Before training: whether the rows have what the rewards read in them.
"""

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tunekit.data.media.answers import with_images
from tunekit.data.sources.rows import Rows
from tunekit.errors import DataError, RunError, TunekitError
from tunekit.methods.rewards.answers import Answers, Judge, UnjudgedError
from tunekit.recipe.functions import find_function
from tunekit.recipe.sections.rewards import FunctionReward, Reward

_SHOWN = 200
"""Letters of a prompt and of a completion that an error shows."""

RewardFunction = Callable[..., list[float | None]]
"""Reward function as TRL calls it. Its metrics are named by its `__name__`."""


def reward_arguments(
    rows: Sequence[Mapping[str, Any]], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Build the keyword arguments that TRL passes to a reward: lists as long as there are answers.

    Args:
        rows: The row of each answer, whose pictures are decoded here.
        texts: The answers.
        token_ids: Tokens of each answer.
    """
    from transformers import TrainerState

    rows = [with_images(dict(row)) for row in rows]
    prompts = [row["prompt"] for row in rows]
    columns = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return {
        "prompts": prompts,
        "completions": [
            [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ],
        "completion_ids": [list(ids) for ids in token_ids],
        **{name: [row.get(name) for row in rows] for name in columns},
        "trainer_state": TrainerState(),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }


def load_rewards(rewards: Sequence[Reward], *, device: str) -> list[RewardFunction]:
    """The rewards of a recipe, each called as TRL calls it.

    Args:
        rewards: The rewards.
        device: Where reward models are.

    Raises:
        RecipeError: A function of the user's own is not there.
        DependencyError: A package that a reward needs is not installed.
    """
    loaded = []
    for reward, name in zip(rewards, reward_names(rewards), strict=True):
        if isinstance(reward, FunctionReward):
            loaded.append(_checked(reward.path, find_function(reward.path), name))
        else:
            judge = judge_of(reward)
            judge.load(device)
            loaded.append(_checked(name, _called_by_trl(judge, name), name))
    return loaded


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """The names of the rewards in metrics: the function's or the type, with more to it where two have the same."""
    short = [
        reward.path.rpartition(":")[2] if isinstance(reward, FunctionReward) else reward.type for reward in rewards
    ]
    long = [
        reward.path if isinstance(reward, FunctionReward) else f"{reward.type}_{short[:place].count(reward.type) + 1}"
        for place, reward in enumerate(rewards)
    ]
    return [first if short.count(first) == 1 else other for first, other in zip(short, long, strict=True)]


def judge_of(reward: Reward) -> Judge:
    """A reward that comes with tunekit.

    Raises:
        DependencyError: A package that it needs is not installed.
    """
    from tunekit.methods.rewards import code, judge, maths, model, text

    modules = {"math": maths, "code": code, "reward_model": model, "judge": judge}
    judge_for: Callable[[Any], Judge] = vars(modules.get(reward.type, text))[reward.type]
    return judge_for(reward)


def _called_by_trl(judge: Judge, name: str) -> Callable[..., list[float]]:
    def reward(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        def fault(index: int, what: str) -> RunError:
            example = _shown({"prompts": prompts, "completions": completions}, index)
            return RunError(f"method.rewards: {name}: {what}, for {example}")

        column_values = [None] * len(completions) if judge.column is None else columns.get(judge.column)
        if column_values is None:
            raise fault(0, f"rows have no column {judge.column!r}")
        expected = list(column_values)
        for index, value in enumerate(column_values if judge.column is not None else ()):
            try:
                expected[index] = judge.read(value)
            except ValueError as error:
                raise fault(index, f"the column {judge.column!r} {error}") from None
        try:
            return judge.score(Answers(prompts, completions, expected, completion_ids))
        except UnjudgedError as error:
            raise fault(error.index, error.what) from None

    return reward


def _checked(path: str, function: Callable[..., Any], name: str) -> RewardFunction:
    """A reward that says what is wrong with what it returns, under the name that its metrics have."""

    def reward(**columns: Any) -> list[float | None]:
        try:
            returned = function(**columns)
        except TunekitError:
            raise
        except Exception as error:  # the function is the user's: it may raise anything
            raise _raised(path, function, columns, error) from error
        return _values(path, returned, columns)

    reward.__name__ = name
    return reward


def _values(path: str, returned: Any, columns: dict[str, Any]) -> list[float | None]:
    """Return the result of a reward as one number or None for each completion.

    Raises:
        RunError: It is something else.
    """
    num_expected = len(columns["completions"])
    try:
        values = list(returned)
    except TypeError:
        problem = f"method.rewards: {path} returned a value of type {type(returned).__name__}, not a list"
        raise RunError(problem, hint="return a list with one number per completion") from None
    if len(values) != num_expected:
        raise RunError(
            f"method.rewards: {path} returned {len(values)} values for {num_expected} completions; the first was "
            f"{_shown(columns, 0)}",
            hint="return one number per completion, or None if the reward does not apply",
        )
    return [None if value is None else _number(path, value, columns, index) for index, value in enumerate(values)]


def _number(path: str, value: Any, columns: dict[str, Any], index: int) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    shown_value = value if isinstance(value, float | str) else f"a value of type {type(value).__name__}"
    if isinstance(value, int):
        shown_value = f"an integer of {value.bit_length():,} bits"
    problem = f"method.rewards: {path} returned {shown_value} for {_shown(columns, index)}"
    raise RunError(problem, hint="return a finite number, or None if the reward does not apply")


def _raised(path: str, function: Callable[..., Any], columns: dict[str, Any], error: Exception) -> RunError:
    """A reward raised: where, why, and for which row, which is found by giving it one row after another."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())[:_SHOWN]
    what = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return RunError(
        f"method.rewards: {path} raised {what} ({where.filename}:{where.lineno}) for {_culprit(function, columns)}",
        hint="a reward must accept every completion; return 0 or None for those it cannot score",
    )


def _culprit(function: Callable[..., Any], columns: dict[str, Any]) -> str:
    for index in range(len(columns["completions"])):
        alone = {name: [value[index]] if isinstance(value, list) else value for name, value in columns.items()}
        try:
            function(**alone)
        except Exception:  # noqa: BLE001  (the row that it fails on is what is looked for)
            return _shown(columns, index)
    return f"all completions together, but for none alone; the first was {_shown(columns, 0)}"


def _shown(columns: dict[str, Any], index: int) -> str:
    """A prompt and its completion, cut."""
    prompt, completion = (_text(columns[name][index]) for name in ("prompts", "completions"))
    return f"prompt {prompt!r}, completion {completion!r}"


def _text(value: Any) -> str:
    """A text, or the last of several messages."""
    text = str(value[-1]["content"]) if isinstance(value, list) else str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


_PROMPT = ("prompt", "tools")


def check_rows(rewards: Sequence[Reward], sources: Iterable[Rows]) -> None:
    """Read in every row what each reward that comes with tunekit reads there.

    Raises:
        DataError: A row lacks a column, or has something else in it.
        DependencyError: A package that a reward needs is not installed.
    """
    reading = _reading(rewards)
    for rows in sources if reading else ():
        for index, row in enumerate(rows.rows):
            for name, (judge, column) in reading.items():
                _check_row(name, judge, column, row, rows.place(index))


def columns_read(rewards: Sequence[Reward]) -> dict[str, str]:
    """The columns that rewards which come with tunekit read, by the rewards' names."""
    return {name: column for name, (_, column) in _reading(rewards).items()}


def _reading(rewards: Sequence[Reward]) -> dict[str, tuple[Judge, str]]:
    """The rewards that come with tunekit and read a column, by their names, with the column."""
    named = zip(reward_names(rewards), rewards, strict=True)
    judges = [(name, judge_of(reward)) for name, reward in named if not isinstance(reward, FunctionReward)]
    return {name: (judge, judge.column) for name, judge in judges if judge.column is not None}


def _check_row(name: str, judge: Judge, column: str, row: dict[str, object], place: str) -> None:
    if column not in row:
        column_names = ", ".join(other for other in row if other not in _PROMPT)
        raise DataError(
            f"{place}: method.rewards: {name} reads the column {column!r}, which the row lacks",
            hint=f"set its column; available besides the prompt: {column_names}"
            if column_names
            else "the row has only a prompt",
        )
    try:
        judge.read(row[column])
    except ValueError as error:
        text = str(row[column])
        text = text if len(text) <= 60 else text[:60] + "..."
        problem = f"{place}: method.rewards: {name} cannot use the column {column!r}: {text!r} {error}"
        raise DataError(problem, hint="correct the row, or set another column") from None
