"""Generative evaluation: prompts whose answers are scored by rewards, as in training.

Both sides answer the same prompts, each reward judges all answers, and a row of which a reward has nothing to say does
not count for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunekit.data.formats.row_formats import Row
from tunekit.data.sources.rows import Rows
from tunekit.errors import DataError
from tunekit.evaluation.bootstrap import Figure, Sample, scored
from tunekit.evaluation.losses import Told, Values, logged_figure
from tunekit.inference.inference_model import Answer, Loaded, Pictured, Sampling, answer
from tunekit.methods.rewards.load import RewardFunction, reward_arguments
from tunekit.recipe.sections.rewards import ExactMatchReward, MathReward, NumericMatchReward, RegexReward, Reward
from tunekit.runs.evaluation_result import Score

_SHARES = (ExactMatchReward, NumericMatchReward, RegexReward, MathReward)
"""Rewards that are right or wrong."""


@dataclass(frozen=True)
class Questions:
    """Prompts, and what judges the answers.

    Attributes:
        of: The rows.
        rows: A prompt each, and the columns that rewards read.
        rewards: What judges, as a recipe has it.
        functions: The same, loaded.
        ids: Token ids of each prompt.
        sampling: How answers are drawn.
        batch_size: Answers that are given at once.
        pictured: Prompts with pictures, by their numbers.
    """

    of: str
    rows: Sequence[Row]
    rewards: Sequence[Reward]
    functions: Sequence[RewardFunction]
    ids: Sequence[Sequence[int]]
    sampling: Sampling
    batch_size: int
    pictured: Mapping[int, Pictured] = field(default_factory=dict)
    needs_before: bool = False

    def measure(self, loaded: Loaded, tell: Told) -> Values:
        """Return the value that each reward gives to each answer, and the lengths of the answers."""
        answers: dict[int, Answer] = {}
        batches = answer(loaded, self.ids, self.sampling, batch_size=self.batch_size, pictured=self.pictured)
        for number, (single,) in batches:
            answers[number] = single
            tell(len(answers), len(self.ids))
        answered = [answers[number] for number in range(len(self.ids))]
        texts, ids = [single.text for single in answered], [single.ids for single in answered]
        batch = reward_arguments(self.rows, texts, ids)
        rewards = {single.__name__: np.array(single(**batch), dtype=np.float64) for single in self.functions}
        return {
            **{f"rewards/{name}/mean": values for name, values in rewards.items()},
            "completions/mean_length": np.array([single.num_tokens for single in answered], dtype=np.float64),
            "completions/clipped_ratio": np.array([single.reason == "length" for single in answered], dtype=np.float64),
        }

    def scores(self, after: Values, before: Values | None) -> list[Score]:
        """The mean of each reward, of their weighted sum where there are several, and of the answers' lengths."""
        names = [f"rewards/{function.__name__}/mean" for function in self.functions]
        figures = [
            Figure(name, function.__name__, ".1%" if isinstance(reward, _SHARES) else ".3f", higher_is_better=True)
            for name, function, reward in zip(names, self.functions, self.rewards, strict=True)
        ]
        ours, theirs = dict(after), None if before is None else dict(before)
        if len(names) > 1:
            for values in (ours, theirs):
                if values is not None:
                    values["reward"] = self._total(values, names)
            figures.insert(0, Figure("reward", "reward, weighted sum", ".3f", higher_is_better=True))
        figures += (logged_figure("completions/mean_length"), logged_figure("completions/clipped_ratio", higher=False))
        rows_of_scores = []
        for figure in figures:
            samples = [None if side is None else _sample(side[figure.name]) for side in (ours, theirs)]
            if samples[0] is not None and samples[0].num_rows:
                unheard = samples[1] is not None and not samples[1].num_rows
                rows_of_scores.append(scored(figure, self.of, samples[0], None if unheard else samples[1]))
        return rows_of_scores

    def _total(self, values: Values, names: Sequence[str]) -> np.ndarray:
        weighted = [reward.weight * values[name] for reward, name in zip(self.rewards, names, strict=True)]
        return np.asarray(np.nansum(weighted, axis=0))


def _sample(values: np.ndarray) -> Sample:
    """A figure of the rows that have one."""
    finite = ~np.isnan(values)
    return Sample(np.where(finite, values, 0.0), finite.astype(np.float64))


def questions_in(rows: Rows) -> list[Row]:
    """Rows as prompts with what is expected: of a conversation the last answer, of a completion all of it.

    Raises:
        DataError: They hold nothing that can be asked.
    """
    if rows.format == "prompts":
        return list(rows.rows)
    if rows.format == "prompt_completion":
        return [{"prompt": row["prompt"], "answer": _text(row["completion"])} for row in rows.rows]
    if rows.format == "messages":
        return [_last_turn(row, rows.place(index)) for index, row in enumerate(rows.rows)]
    problem = f"{rows.source}: rows of {rows.read_as or rows.format} have no prompts"
    raise DataError(problem, hint="use rows with a prompt and the column that the metric reads, such as answer")


def _last_turn(row: Row, place: str) -> Row:
    messages = row["messages"]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        problem = f"{place}: conversation does not end with an assistant message"
        raise DataError(problem, hint="remove or complete the row")
    columns = {name: value for name, value in row.items() if name != "messages"}
    return {"prompt": messages[:-1], "answer": messages[-1]["content"], **columns}


def _text(value: Any) -> str:
    return str(value[-1]["content"]) if isinstance(value, list) else str(value)
