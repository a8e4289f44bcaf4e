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
from tunekit.inference.inference_model import Answer, Loaded, MediaPrompt, Sampling, answer
from tunekit.methods.rewards.load import RewardFunction, reward_arguments
from tunekit.recipe.sections.rewards import ExactMatchReward, MathReward, NumericMatchReward, RegexReward, Reward
from tunekit.runs.evaluation_result import Score

_SHARES = (ExactMatchReward, NumericMatchReward, RegexReward, MathReward)
"""Rewards that are right or wrong."""

CALLS = (
    Figure("tools/call_frequency", "calls per episode", ".2f", None),
    Figure("tools/broken", "calls per episode that cannot be read", ".2f", higher_is_better=False),
    Figure("tools/lost", "lost episodes", ".1%", higher_is_better=False),
)
"""Figures of answers with calls of tools."""


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
        with_media: Prompts with media, by their numbers.
    """

    of: str
    rows: Sequence[Row]
    rewards: Sequence[Reward]
    functions: Sequence[RewardFunction]
    ids: Sequence[Sequence[int]]
    sampling: Sampling
    batch_size: int
    with_media: Mapping[int, MediaPrompt] = field(default_factory=dict)
    needs_before: bool = False

    def measure(self, loaded: Loaded, tell: Told) -> Values:
        """Return the value that each reward gives to each answer, and the lengths of the answers."""
        answers: dict[int, Answer] = {}
        batches = answer(loaded, self.ids, self.sampling, batch_size=self.batch_size, with_media=self.with_media)
        for number, (single,) in batches:
            answers[number] = single
            tell(len(answers), len(self.ids))
        answered = [answers[number] for number in range(len(self.ids))]
        texts, ids = [single.text for single in answered], [single.ids for single in answered]
        batch = reward_arguments(self.rows, texts, ids)
        rewards = {single.__name__: np.array(single(**batch), dtype=np.float64) for single in self.functions}
        return {
            **reward_values(rewards, [reward.weight for reward in self.rewards]),
            "completions/mean_length": np.array([single.num_tokens for single in answered], dtype=np.float64),
            "completions/clipped_ratio": np.array([single.reason == "length" for single in answered], dtype=np.float64),
        }

    def scores(self, after: Values, before: Values | None) -> list[Score]:
        """The mean of each reward, of their weighted sum where there are several, and of the answers' lengths."""
        return scores_of(self.of, reward_figures(self.functions, self.rewards), after, before)


def reward_values(rewards: Mapping[str, np.ndarray], weights: Sequence[float]) -> dict[str, np.ndarray]:
    """Return the values of rewards by their names in metrics, and their weighted sum where there are several."""
    values = {f"rewards/{name}/mean": given for name, given in rewards.items()}
    if len(rewards) > 1:
        weighted = [weight * given for weight, given in zip(weights, rewards.values(), strict=True)]
        values["reward"] = np.asarray(np.nansum(weighted, axis=0))
    return values


def reward_figures(functions: Sequence[RewardFunction], rewards: Sequence[Reward]) -> list[Figure]:
    """Return what the means of rewards are called, and how they are written."""
    return [
        reward_figure(function.__name__, is_share=isinstance(reward, _SHARES))
        for function, reward in zip(functions, rewards, strict=True)
    ]


def reward_figure(name: str, *, is_share: bool = False) -> Figure:
    """Return what the mean of a reward is called, and how it is written."""
    return Figure(f"rewards/{name}/mean", name, ".1%" if is_share else ".3f", higher_is_better=True)


def scores_of(of: str, rewards: Sequence[Figure], after: Values, before: Values | None) -> list[Score]:
    """Return the scores of answers: of their sum where there is one, of each reward, and of what else was measured."""
    total = [Figure("reward", "reward, weighted sum", ".3f", higher_is_better=True)] if "reward" in after else []
    lengths = (logged_figure("completions/mean_length"), logged_figure("completions/clipped_ratio", higher=False))
    calls = [figure for figure in CALLS if figure.name in after]
    rows_of_scores = []
    for figure in (*total, *rewards, *lengths, *calls):
        samples = [None if side is None else _sample(side[figure.name]) for side in (after, before)]
        if samples[0] is not None and samples[0].num_rows:
            unheard = samples[1] is not None and not samples[1].num_rows
            rows_of_scores.append(scored(figure, of, samples[0], None if unheard else samples[1]))
    return rows_of_scores


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
