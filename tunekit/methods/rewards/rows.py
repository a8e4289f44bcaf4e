"""Before training: whether the rows have what the rewards read in them."""

from collections.abc import Iterable, Sequence

from tunekit.data.sources.rows import Rows
from tunekit.errors import DataError
from tunekit.methods.rewards.answers import Judge
from tunekit.methods.rewards.load import judge_of, reward_names
from tunekit.recipe.sections.rewards import FunctionReward, Reward

_PROMPT = ("prompt", "tools")


def check_rows(rewards: Sequence[Reward], sources: Iterable[Rows]) -> None:
    """Read in every row what each reward that comes with tunekit reads there.

    Raises:
        DataError: A row lacks a column, or has something else in it.
        DependencyError: A package that a reward needs is not installed.
    """
    named = list(zip(rewards, reward_names(rewards), strict=True))
    judges = [(name, judge_of(reward)) for reward, name in named if not isinstance(reward, FunctionReward)]
    reading = [(name, judge) for name, judge in judges if judge.column is not None]
    for rows in sources if reading else ():
        for index, row in enumerate(rows.rows):
            for name, judge in reading:
                _check_row(name, judge, row, rows.place(index))


def columns_read(rewards: Sequence[Reward]) -> dict[str, str]:
    """The columns that rewards which come with tunekit read, by the rewards' names."""
    named = zip(rewards, reward_names(rewards), strict=True)
    judges = [(name, judge_of(reward)) for reward, name in named if not isinstance(reward, FunctionReward)]
    return {name: judge.column for name, judge in judges if judge.column is not None}


def _check_row(name: str, judge: Judge, row: dict[str, object], place: str) -> None:
    if judge.column not in row:
        column_names = ", ".join(column for column in row if column not in _PROMPT)
        raise DataError(
            f"{place}: method.rewards: {name} reads the column {judge.column!r}, and the row has no such one",
            hint=f"set its column: besides the prompt there is {column_names}"
            if column_names
            else "the row has a prompt alone",
        )
    try:
        judge.read(row[judge.column])
    except ValueError as error:
        text = str(row[judge.column])
        text = text if len(text) <= 60 else text[:60] + "..."
        raise DataError(
            f"{place}: method.rewards: {name} cannot use the column {judge.column!r}: {text!r} {error}",
            hint="correct the row, or name another column",
        ) from None
