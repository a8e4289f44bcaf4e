"""Dynamic sampling: groups of completions without signal are replaced by those of other prompts (DAPO, arXiv
2503.14476).

A group whose completions all have the same reward has no advantages, and takes its place in a step for nothing. Its
prompt is replaced by another one, drawn by the seed of the run, the step and the attempt alone: so a resumed run draws
the same ones, and so do all processes. Processes that divide the weights generate together, hence each attempt
generates for all groups, and the groups that have signal already stay as they are.
"""

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from tunekit.methods.generation import group_rewards

if TYPE_CHECKING:
    from tunekit.methods.run_trainer import RunTrainer

_PROMPTS = ("prompt_ids", "prompt_mask")
"""Names of TRL's tensors of prompts, `(answers, tokens)`, padded on the left (trl 1.16)."""

_OF_TOKENS = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)
"""Names of those of completions, padded on the right; the ratio has one value where it is of whole completions."""


class DynamicSampling:
    """Replaces groups of completions without signal.

    Args:
        trainer: A trainer of TRL's that learns from rewarded groups.
        num_times: Attempts at most per generated batch.
        seed: Seed of the prompts that are drawn.
        pad_token_id: Token that fills shorter completions.
    """

    def __init__(self, trainer: "RunTrainer", num_times: int, seed: int, pad_token_id: int) -> None:
        self._trainer = trainer
        self._pad_token_id = pad_token_id
        self._num_times = num_times
        self._seed = seed
        trainer.wrap("calculate_rewards", self._keep_rewards)
        trainer.wrap("score_answers", self._score)

    def _keep_rewards(self, calculate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._rewards = calculate(*args, **kwargs)
        return self._rewards

    def _score(self, score: Callable[..., Any], rows: list[Mapping[str, Any]]) -> Any:
        """Generate completions to rows and score them, until each group has signal or no attempt is left."""
        scored = score(rows)
        trainer = self._trainer
        if not trainer.model.training:
            return scored
        metrics = trainer.metrics["train"]
        has_signal = self._signal()
        num_attempts = 0
        while not has_signal.all() and num_attempts < self._num_times:
            num_attempts += 1
            drawn = score(self._rows(num_attempts, len(rows), len(has_signal)))
            replaces = ~has_signal & self._signal()
            scored = merge(scored, drawn, self._own(replaces, len(rows)), self._pad_token_id)
            has_signal |= replaces
        if num_attempts:
            mask = scored["completion_mask"] * scored.get("tool_mask", 1)
            scored["num_items_in_batch"] = trainer.accelerator.gather(mask.sum()).sum()
            # Of the batch that is trained on, in place of a mean over attempts.
            metrics["frac_reward_zero_std"][-num_attempts - 1 :] = [float((~has_signal).float().mean())]
        metrics["resample_times"].append(float(num_attempts))
        return scored

    def _signal(self) -> torch.Tensor:
        """Return for each group of all processes whether its completions have different rewards."""
        trainer = self._trainer
        total = group_rewards(self._rewards, trainer.reward_weights, trainer.num_generations)
        high = total.masked_fill(total.isnan(), -torch.inf).amax(1)
        low = total.masked_fill(total.isnan(), torch.inf).amin(1)
        differ: torch.Tensor = high > low
        return differ

    def _rows(self, attempt: int, num_own: int, num_groups: int) -> list[Mapping[str, Any]]:
        """Return the rows of this process for another attempt."""
        trainer = self._trainer
        rng = random.Random(f"{self._seed}/{trainer.state.global_step}/{attempt}")
        num_rows = len(trainer.train_dataset)
        drawn = [rng.randrange(num_rows) for _ in range(num_groups)]
        of_all = [index for index in drawn for _ in range(trainer.num_generations)]
        start = trainer.accelerator.process_index * num_own
        return [trainer.train_dataset[index] for index in of_all[start : start + num_own]]

    def _own(self, groups: torch.Tensor, num_own: int) -> torch.Tensor:
        """Return for each completion of this process whether its group is among some."""
        start = self._trainer.accelerator.process_index * num_own
        return groups.repeat_interleave(self._trainer.num_generations)[start : start + num_own]


def merge(
    scored: Mapping[str, Any], drawn: Mapping[str, Any], replaces: torch.Tensor, pad_token_id: int
) -> dict[str, Any]:
    """Return scored completions with some of them replaced.

    Args:
        scored: Tensors by TRL's names, `(answers, tokens)` or `(answers,)`, and others that stay.
        drawn: The same of other completions, of other lengths.
        replaces: Whether a completion is replaced, `(answers,)`.
        pad_token_id: Token that fills shorter ones.
    """
    fills = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "tool_mask": 1}
    merged = dict(scored)
    for name in (*_PROMPTS, *_OF_TOKENS):
        if name in scored:
            old, new = scored[name], drawn[name]
            length = max(old.shape[1], new.shape[1])
            old, new = (_filled(value, length, fills.get(name, 0), left=name in _PROMPTS) for value in (old, new))
            merged[name] = torch.where(replaces[:, None], new, old)
    merged["advantages"] = torch.where(replaces, drawn["advantages"], scored["advantages"])
    return merged


def _filled(value: torch.Tensor, length: int, fill: int, *, left: bool) -> torch.Tensor:
    num_missing = length - value.shape[1]
    return pad(value, (num_missing, 0) if left else (0, num_missing), value=fill)
