"""Evaluation of a model that calls tools or acts in an environment, by the loop of its trainer.

A row has the same episode at every evaluation of a run, also of those during training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunekit.data.formats.row_formats import Row
from tunekit.evaluation.bootstrap import Figure
from tunekit.evaluation.generative import reward_figures, reward_values, scores_of
from tunekit.evaluation.losses import Told, Values
from tunekit.inference.episode_trial import HeldOut, play
from tunekit.inference.inference_model import Loaded
from tunekit.methods.rewards.load import RewardFunction
from tunekit.planner.plan import Plan
from tunekit.recipe.methods.on_policy import RewardedMethod
from tunekit.runs.evaluation_result import Score


@dataclass(frozen=True)
class Episodes:
    """Prompts of a run whose answers have several turns.

    Attributes:
        of: The rows.
        rows: A prompt each, and the columns that rewards and environment read.
        plan: The plan of the run.
        method: Its method, with the rewards and the sampling of the evaluation.
        functions: The rewards, loaded.
        own_rewards: Figures of rewards that the environment gives itself.
        settings: Episodes at once, and how their tokens are chosen.
        seed: Random seed of sampling.
    """

    of: str
    rows: Sequence[Row]
    plan: Plan
    method: RewardedMethod
    functions: Sequence[RewardFunction]
    own_rewards: Sequence[Figure]
    settings: HeldOut
    seed: int
    needs_before: bool = False

    def measure(self, loaded: Loaded, tell: Told) -> Values:
        """Return what each reward gives to each episode, lengths, and calls."""
        played = play(
            self.plan,
            self.method,
            loaded.model,
            loaded.tokenizer,
            self.rows,
            lambda done: tell(done, len(self.rows)),
            seed=self.seed,
            held_out=self.settings,
        )
        episodes = played.episodes

        def column(values: Sequence[Any]) -> np.ndarray:
            return np.array(values, dtype=np.float64)

        rewards: Mapping[str, np.ndarray] = {
            name: column([episode.values[place] for episode in episodes]) for place, name in enumerate(played.names)
        }
        return {
            **reward_values(rewards, played.weights),
            "completions/mean_length": column([episode.num_tokens for episode in episodes]),
            "completions/clipped_ratio": column([episode.is_truncated for episode in episodes]),
            "tools/call_frequency": column([episode.num_calls for episode in episodes]),
            "tools/broken": column([episode.num_broken for episode in episodes]),
            "tools/lost": column([episode.is_lost for episode in episodes]),
        }

    def scores(self, after: Values, before: Values | None) -> list[Score]:
        """The mean of each reward, of their weighted sum where there are several, of lengths and calls."""
        figures = [*reward_figures(self.functions, self.method.rewards), *self.own_rewards]
        return scores_of(self.of, figures, after, before)
