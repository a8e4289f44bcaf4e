"""Groups of completions of a step: which of them have signal, and how others take their places.

A group whose completions all have the same reward has no advantages, and takes its place in a step for nothing.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from tunekit.methods.generation import group_rewards

if TYPE_CHECKING:
    from tunekit.methods.run_trainer import RunTrainer

PROMPTS = ("prompt_ids", "prompt_mask")
"""Names of TRL's tensors of prompts, `(answers, tokens)`, padded on the left (trl 1.16)."""

OF_TOKENS = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)
"""Names of those of completions, padded on the right; the ratio has one value where it is of whole completions."""


class Groups:
    """The groups of a generated batch, of all processes.

    Args:
        trainer: A trainer of TRL's that learns from rewarded groups.

    Attributes:
        has_signal: Whether the completions of each group have different rewards, `(groups,)`.
    """

    has_signal: torch.Tensor

    def __init__(self, trainer: "RunTrainer") -> None:
        self._trainer = trainer
        trainer.wrap("calculate_rewards", self._keep_signal)

    @property
    def size(self) -> int:
        """Completions of a group."""
        size: int = self._trainer.num_generations
        return size

    def _keep_signal(self, calculate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rewards = calculate(*args, **kwargs)
        if self._trainer.model.training:
            total = group_rewards(rewards, self._trainer.reward_weights, self.size)
            high = total.masked_fill(total.isnan(), -torch.inf).amax(1)
            low = total.masked_fill(total.isnan(), torch.inf).amin(1)
            self.has_signal = high > low
        return rewards

    def own(self, groups: torch.Tensor, num_own: int) -> torch.Tensor:
        """Return the value of its group for each completion of this process.

        Args:
            groups: A value of each group, `(groups,)`.
            num_own: Completions of this process.
        """
        start = self._trainer.accelerator.process_index * num_own
        return groups.repeat_interleave(self.size)[start : start + num_own]

    def count_again(self, scored: dict[str, Any]) -> None:
        """Count the tokens of a batch in which completions were replaced."""
        mask = scored["completion_mask"] * scored.get("tool_mask", 1)
        scored["num_items_in_batch"] = self._trainer.accelerator.gather(mask.sum()).sum()


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
    fills = fills_of(pad_token_id)
    merged = dict(scored)
    for name in (*PROMPTS, *OF_TOKENS):
        if name in scored:
            old, new = scored[name], drawn[name]
            length = max(old.shape[1], new.shape[1])
            old, new = (filled(value, length, fills[name], left=name in PROMPTS) for value in (old, new))
            merged[name] = torch.where(replaces[:, None], new, old)
    merged["advantages"] = torch.where(replaces, drawn["advantages"], scored["advantages"])
    return merged


def fills_of(pad_token_id: int) -> dict[str, int]:
    """Return what tensors are padded with, by name."""
    own = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "tool_mask": 1}
    return {name: own.get(name, 0) for name in (*PROMPTS, *OF_TOKENS)}


def filled(value: torch.Tensor, length: int, fill: int, *, left: bool) -> torch.Tensor:
    """Return rows padded to a length, `(answers, length)`."""
    num_missing = length - value.shape[1]
    return pad(value, (num_missing, 0) if left else (0, num_missing), value=fill)
