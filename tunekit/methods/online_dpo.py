"""Online direct preference optimization (arXiv 2402.04792): the model's own completions, compared by rewards.

TRL's OnlineDPOTrainer (trl 1.16, experimental) makes the logits of all tokens whole, generates for each micro-batch by
itself, and takes the first of two completions with equal rewards for the better one. Here completions are generated and
rewarded by GRPOTrainer, and a group whose rewards are equal has no preference.

The completions of a group may lie in different micro-batches and processes. So all are scored once before the step, by
the model that is about to be trained, which gives the loss of each pair and its derivative by the log-probability of
either completion. A micro-batch then adds its own completions' part of the gradient.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from tunekit.methods.arguments import Parts
from tunekit.methods.generation import group_rewards, rewarded_trainer, whole_sequences
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.online_dpo import OnlineDPOMethod


def build(method: OnlineDPOMethod, parts: Parts) -> RunTrainer:
    """Build a trainer over prompts.

    Args:
        method: The groups, and what else goes to GRPOConfig.
        parts: All else. Rows have a column `prompt` of texts or messages, and others for the rewards.
    """
    return rewarded_trainer(
        OnlineDPOTrainer,
        GRPOConfig,
        method,
        parts,
        {"loss_type": method.loss_type},
        # The model that is scored before a step is the one that is trained in it.
        disable_dropout=True,
        vllm_importance_sampling_correction=False,
    )


class OnlineDPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose loss is DPO's, of the completions with the highest and the lowest reward of each group.

    Args:
        loss_type: `sigmoid` or `ipo`.
        args: Arguments of GRPOTrainer.
        given: What else it takes.
    """

    def __init__(self, *, loss_type: str, args: GRPOConfig, **given: Any) -> None:
        # GRPOTrainer divides logits by the temperature wherever it scores completions, and DPO's rewards are of the
        # model as it is.
        args.generation_kwargs = {**(args.generation_kwargs or {}), "temperature": args.temperature}
        args.temperature = 1.0
        super().__init__(args=args, **given)
        self._preference_loss = loss_type

    def _calculate_rewards(self, *args: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args)
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Generate and reward completions, and add the loss of each and its slope to them, `(completions,)`."""
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        num_generations = self.num_generations if mode == "train" else self.num_generations_eval
        mask = scored["completion_mask"]
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            log_probs, _ = self._score(self.model, scored, self.args.per_device_train_batch_size)
            own = ((log_probs - scored["ref_per_token_logps"]) * mask).sum(1)
        ratios = self.accelerator.gather(own).view(-1, num_generations)
        is_masked = self.accelerator.gather(mask.sum(1) == 0).view(-1, num_generations)
        rewards = group_rewards(self._rewards, self.reward_weights, num_generations)
        pairs = Pairs.of(rewards.masked_fill(is_masked, torch.nan), ratios)
        # Their mean over completions is that of the pairs over groups.
        losses, slopes = (value * num_generations for value in pairs.losses(self._preference_loss, self.beta))
        start = self.accelerator.process_index * len(own)
        scored["pair_losses"] = losses.flatten()[start : start + len(own)]
        scored["pair_slopes"] = slopes.flatten()[start : start + len(own)]
        for name, value in pairs.measures(self.beta).items():
            self._metrics[mode][name].append(value)
        return scored

    def _score(self, model: Any, scored: dict[str, Any], batch_size: int | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the tokens of completions, each `(completions, tokens)`."""
        log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
            model, *whole_sequences(scored), batch_size=batch_size, compute_entropy=True
        )
        return log_probs, entropies

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The mean loss of the groups, as the micro-batch's share of it."""
        log_probs, entropies = self._score(model, inputs)
        mask = inputs["completion_mask"]
        mode = "train" if self.model.training else "eval"
        weighted = inputs["pair_slopes"] * (log_probs * mask).sum(1)
        # The value of the loss, with the gradient by these completions.
        of_completions = inputs["pair_losses"] + weighted - weighted.detach()
        loss: Tensor = of_completions.mean()
        log_ratio = (inputs["ref_per_token_logps"] - log_probs).detach()
        kl = log_ratio.exp() - log_ratio - 1
        sums = torch.stack([(kl * mask).sum(), (entropies.detach() * mask).sum(), mask.sum()])
        kl_sum, entropy_sum, num_tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
        self._metrics[mode]["kl"].append(kl_sum / max(1.0, num_tokens))
        self._metrics[mode]["entropy"].append(entropy_sum / max(1.0, num_tokens))
        return loss / (self.current_gradient_accumulation_steps if mode == "train" else 1)


@dataclass(frozen=True)
class Pairs:
    """The best and the worst completion of each group.

    Attributes:
        ratios: Log-probabilities of completions less those by the reference, `(groups, completions)`.
        best: Place of the completion with the highest reward, `(groups, 1)`.
        worst: Place of the one with the lowest, `(groups, 1)`.
        differ: Whether the two have different rewards, `(groups, 1)`.
    """

    ratios: Tensor
    best: Tensor
    worst: Tensor
    differ: Tensor

    @classmethod
    def of(cls, rewards: Tensor, ratios: Tensor) -> "Pairs":
        """Return the pairs of groups.

        Args:
            rewards: Rewards, `(groups, completions)`; NaN where a completion has none.
            ratios: See above.
        """
        highest, best = rewards.nan_to_num(nan=-torch.inf).max(1, keepdim=True)
        lowest, worst = rewards.nan_to_num(nan=torch.inf).min(1, keepdim=True)
        return cls(ratios, best, worst, highest > lowest)

    @property
    def margins(self) -> Tensor:
        """By how much the best is likelier than the worst, against the reference, in nats, `(groups, 1)`."""
        return self.ratios.gather(1, self.best) - self.ratios.gather(1, self.worst)

    def losses(self, loss_type: str, beta: float) -> tuple[Tensor, Tensor]:
        """Return the losses, half of a pair's for either completion, and their derivatives by its log-probability.

        Args:
            loss_type: `sigmoid` or `ipo`.
            beta: Factor on the log-ratios.
        """
        margins = self.margins
        if loss_type == "sigmoid":
            losses, slopes = -logsigmoid(beta * margins), -beta * torch.sigmoid(-beta * margins)
        else:
            excess = margins - 1 / (2 * beta)
            losses, slopes = excess**2, 2 * excess
        losses, slopes = losses * self.differ, slopes * self.differ
        none = torch.zeros_like(self.ratios)
        halves = none.scatter_add(1, self.best, losses / 2).scatter_add(1, self.worst, losses / 2)
        return halves, none.scatter_add(1, self.best, slopes).scatter_add(1, self.worst, -slopes)

    def measures(self, beta: float) -> dict[str, float]:
        """Return the implicit rewards of pairs, by TRL's names; none where no group has a preference."""
        chosen = beta * self.ratios.gather(1, self.best)[self.differ]
        rejected = beta * self.ratios.gather(1, self.worst)[self.differ]
        if not len(chosen):
            return {}
        margins = chosen - rejected
        return {
            "rewards/chosen": chosen.mean().item(),
            "rewards/rejected": rejected.mean().item(),
            "rewards/margins": margins.mean().item(),
            "rewards/accuracies": (margins > 0).float().mean().item(),
        }
