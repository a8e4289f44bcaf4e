"""Dynamic sampling: groups of completions without signal are replaced by those of other prompts (DAPO, arXiv
2503.14476).

The prompt of such a group is replaced by another one, drawn by the seed of the run, the step and the attempt alone: so
a resumed run draws the same ones, and so do all processes. Processes that divide the weights generate together, hence
each attempt generates for all groups, and the groups that have signal already stay as they are.
"""

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunekit.methods.rollouts.groups import Groups, merge

if TYPE_CHECKING:
    from tunekit.methods.run_trainer import RunTrainer


class DynamicSampling:
    """Replaces groups of completions without signal.

    Args:
        trainer: A trainer of TRL's that learns from rewarded groups.
        groups: Its groups.
        num_times: Attempts at most per generated batch.
        seed: Seed of the prompts that are drawn.
        pad_token_id: Token that fills shorter completions.
    """

    def __init__(self, trainer: "RunTrainer", groups: Groups, num_times: int, seed: int, pad_token_id: int) -> None:
        self._trainer = trainer
        self._groups = groups
        self._pad_token_id = pad_token_id
        self._num_times = num_times
        self._seed = seed
        trainer.wrap("score_answers", self._score)

    def _score(self, score: Callable[..., Any], rows: list[Mapping[str, Any]]) -> Any:
        """Generate completions to rows and score them, until each group has signal or no attempt is left."""
        scored = score(rows)
        trainer = self._trainer
        if not trainer.model.training:
            return scored
        metrics = trainer.metrics["train"]
        has_signal = self._groups.has_signal
        num_attempts = 0
        while not has_signal.all() and num_attempts < self._num_times:
            num_attempts += 1
            drawn = score(self._rows(num_attempts, len(rows), len(has_signal)))
            replaces = ~has_signal & self._groups.has_signal
            scored = merge(scored, drawn, self._groups.own(replaces, len(rows)), self._pad_token_id)
            has_signal = has_signal | replaces
        if num_attempts:
            self._groups.has_signal = has_signal
            self._groups.count_again(scored)
            # Of the batch that is trained on, in place of a mean over attempts.
            metrics["frac_reward_zero_std"][-num_attempts - 1 :] = [float((~has_signal).float().mean())]
        metrics["resample_times"].append(float(num_attempts))
        return scored

    def _rows(self, attempt: int, num_own: int, num_groups: int) -> list[Mapping[str, Any]]:
        """Return the rows of this process for another attempt."""
        trainer = self._trainer
        rng = random.Random(f"{self._seed}/{trainer.state.global_step}/{attempt}")
        num_rows = len(trainer.train_dataset)
        drawn = [rng.randrange(num_rows) for _ in range(num_groups)]
        of_all = [index for index in drawn for _ in range(trainer.num_generations)]
        start = trainer.accelerator.process_index * num_own
        return [trainer.train_dataset[index] for index in of_all[start : start + num_own]]
