"""Replay: groups of completions without signal are replaced by groups of earlier steps (RePO, arXiv 2506.09340).

TRL had a trainer with such a buffer (`GRPOWithReplayBufferTrainer`), which kept the groups with the largest advantages,
however old. Here the newest groups with signal are kept. Each carries the log-probabilities by the model that gave it,
so that the loss clips the ratio of its tokens as that of any completion which is not of the current model.

All processes hold all groups, and draw by the seed of the run and the step: so a resumed run, which is given the
buffer of its checkpoint, draws the same ones.
"""

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from trl.models.utils import disable_gradient_checkpointing

from tunekit.methods.generation import whole_sequences
from tunekit.methods.rollouts.groups import OF_TOKENS, PROMPTS, Groups, filled, fills_of, merge

if TYPE_CHECKING:
    from tunekit.methods.run_trainer import RunTrainer


class ReplayBuffer:
    """Replaces groups of completions without signal by earlier ones.

    The trainer has the groups that are kept, the newest last: tensors by TRL's names, `(completions, tokens)`, and the
    step that generated them.

    Args:
        trainer: A trainer of TRL's that learns from rewarded groups.
        groups: Its groups.
        size: Groups that are kept.
        seed: Seed of the groups that are drawn.
        pad_token_id: Token that fills shorter completions.
    """

    def __init__(self, trainer: "RunTrainer", groups: Groups, size: int, seed: int, pad_token_id: int) -> None:
        trainer.replayed_groups = []
        self._trainer = trainer
        self._groups = groups
        self._size = size
        self._seed = seed
        self._fills = fills_of(pad_token_id)
        self._pad_token_id = pad_token_id
        trainer.wrap("score_answers", self._score)

    def _score(self, score: Callable[..., Any], rows: list[Mapping[str, Any]]) -> Any:
        """Generate completions to rows and score them, and replace groups without signal."""
        scored: dict[str, Any] = score(rows)
        trainer = self._trainer
        if not trainer.model.training:
            return scored
        if "old_per_token_logps" not in scored:
            scored["old_per_token_logps"] = self._log_probs(scored)
        has_signal = self._groups.has_signal
        places = (~has_signal).nonzero().flatten().tolist()
        earlier = trainer.replayed_groups or []
        step = trainer.state.global_step
        rng = random.Random(f"{self._seed}/{step}/replay")
        drawn = dict(zip(places, rng.sample(earlier, min(len(places), len(earlier))), strict=False))
        fresh = self._fresh(scored, has_signal, step)
        if drawn:
            replaces = torch.zeros_like(has_signal)
            replaces[list(drawn)] = True
            own = self._groups.own(replaces, len(rows))
            scored = merge(scored, self._laid(scored, drawn), own, self._pad_token_id)
            self._groups.count_again(scored)
        metrics = trainer.metrics["train"]
        metrics["replay/frac_replayed"].append(len(drawn) / len(has_signal))
        if drawn:
            metrics["replay/age"].append(sum(step - int(group["step"]) for group in drawn.values()) / len(drawn))
        trainer.replayed_groups = [*earlier, *fresh][-self._size :]
        return scored

    def _log_probs(self, scored: Mapping[str, Any]) -> torch.Tensor:
        """Return the log-probabilities of completions by the model that gave them, `(completions, tokens)`."""
        trainer = self._trainer
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
            log_probs: torch.Tensor = trainer.token_scores(
                trainer.model, *whole_sequences(scored), batch_size=trainer.args.per_device_train_batch_size
            )[0]
        return log_probs

    def _fresh(self, scored: Mapping[str, Any], has_signal: torch.Tensor, step: int) -> list[dict[str, torch.Tensor]]:
        """Return the groups with signal of all processes, without padding that all their completions have."""
        accelerator, size = self._trainer.accelerator, self._groups.size
        whole = {"advantages": accelerator.gather(scored["advantages"]).cpu()}
        for name in self._names(scored):
            even = accelerator.pad_across_processes(
                scored[name], dim=1, pad_index=self._fills[name], pad_first=name in PROMPTS
            )
            whole[name] = accelerator.gather(even).cpu()
        fresh = []
        for place in has_signal.nonzero().flatten().tolist():
            group = {name: value[place * size : (place + 1) * size] for name, value in whole.items()}
            prompt = int(group["prompt_mask"].any(0).sum())
            length = int(group["completion_mask"].any(0).sum())
            for name in self._names(scored):
                value = group[name]
                # A ratio may be one of whole completions.
                cut = value if value.shape[1] == 1 else value[:, -prompt:] if name in PROMPTS else value[:, :length]
                group[name] = cut.clone()
            fresh.append({**group, "step": torch.tensor(step)})
        return fresh

    def _laid(self, scored: Mapping[str, Any], drawn: Mapping[int, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        """Return tensors as of `scored`, with the completions of groups in the places of this process.

        Args:
            scored: The batch of this process.
            drawn: Groups by the places that they take among those of all processes.
        """
        num_own, size = len(scored["advantages"]), self._groups.size
        start = self._trainer.accelerator.process_index * num_own
        places = [(index, *divmod(start + index, size)) for index in range(num_own)]
        places = [(index, group, place) for index, group, place in places if group in drawn]
        laid = {"advantages": torch.zeros_like(scored["advantages"])}
        for index, group, place in places:
            laid["advantages"][index] = drawn[group]["advantages"][place]
        for name in self._names(scored):
            value, is_prompt = scored[name], name in PROMPTS
            width = max([value.shape[1], *(group[name].shape[1] for group in drawn.values())])
            laid[name] = value.new_full((num_own, width), self._fills[name])
            for index, group, place in places:
                row = drawn[group][name][place : place + 1].to(value)
                laid[name][index] = filled(row, width, self._fills[name], left=is_prompt)[0]
        return laid

    @staticmethod
    def _names(scored: Mapping[str, Any]) -> list[str]:
        return [name for name in (*PROMPTS, *OF_TOKENS) if name in scored]
