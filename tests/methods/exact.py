"""What a step of a trainer did, and the same model in float64 to work it out again.

The trainer is the one that a run builds, and it is trained with; its gradients are read before the optimizer's step.
The other side shares nothing with it but the files of the model and the trained weights: one sequence at a time and
without padding, the adapter added to the weights by hand, and a log-softmax that is written out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from tunekit.api import verbs
from tunekit.process.watchdog import Heart
from tunekit.runs.record import Record
from tunekit.runs.small_files import Place
from tunekit.training.callbacks import Watch
from tunekit.training.train import build as build_run

RANK, ALPHA = 4, 16

LORA = {"type": "lora", "rank": RANK, "alpha": ALPHA, "target_modules": ["q_proj", "v_proj", "down_proj"]}

MAX_LOSS, MAX_GRADIENT = 1e-5, 1e-5
"""Largest differences from float64: of a loss, in its own size or in nats; and of all gradients together, as a share of
their norm. The log-probability of an answer of 40 tokens is some 200 nats here, where numbers of float32 are 1.5e-5
apart; a beta of 0.3 makes 5e-6 of that. Products of float32 round at 6e-8, in sums of some thousand of them."""


@dataclass
class Step:
    """An optimizer step, as it was seen from outside."""

    before: dict[str, Tensor]
    """The trained weights that its gradients were computed at, by their names in the model."""
    losses: list[float] = field(default_factory=list)
    """Of each micro-batch, as it is before it is divided by their number."""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """What each micro-batch's loss was computed from."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)


class Steps(TrainerCallback):
    """Sees the steps of a trainer."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_step_begin(self, args, state, control, model, **kwargs):
        self.steps.append(Step(trained(model)))

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
        self.steps[-1].gradients = {name: gradient.clone() for name, gradient in gradients.items()}

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.steps[-1].logs = dict(logs)


def trained(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


def build(recipe: dict[str, Any]) -> Trainer:
    """The trainer of a run on this processor, as its only process builds it."""
    run = verbs.make_run(recipe)
    plan, record = run.plan, Record(run, Place())
    assert (plan.device.kind, plan.dtype) == ("cpu", "float32")
    watch = Watch(record, plan, Heart(run, Place()))
    watch.before_training = lambda: None
    trainer, _ = build_run(watch, plan.schedule)
    return trainer


def take_steps(recipe: dict[str, Any], *, moved: float, seed: int) -> list[Step]:
    """Train as a recipe says.

    Args:
        recipe: The recipe.
        moved: How far weights are moved before the first step, so that the model is not its own reference.
        seed: Of where they are moved to, and of what is generated.
    """
    steps, trainer = Steps(), build(recipe)
    trainer.add_callback(steps)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight.add_(moved * torch.randn_like(weight))
    compute = trainer.compute_loss

    def watched(model, inputs, *args, **kwargs):
        loss = compute(model, inputs, *args, **kwargs)
        steps.steps[-1].inputs.append(dict(inputs))
        steps.steps[-1].losses.append(float(loss.detach()))
        return loss

    trainer.compute_loss = watched
    trainer.train()
    return steps.steps


class Exact:
    """A model in float64, with weights of its own to differentiate by.

    Args:
        folder: Its files.
        weights: What is trained, by name: weights of the model, or LoRA's factors. None where nothing is.
    """

    def __init__(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        self.model.requires_grad_(False)
        self.weights = {name: value.double().requires_grad_() for name, value in (weights or {}).items()}

    def _whole(self) -> dict[str, Tensor]:
        """Weights that take the place of the model's own: W + alpha / rank B A (arXiv 2106.09685)."""
        replaced = {}
        for name, value in self.weights.items():
            if "lora_A" not in name:
                if "lora_B" not in name:
                    replaced[name] = value
                continue
            other = self.weights[name.replace("lora_A", "lora_B")]
            inner = name.removeprefix("base_model.model.").replace(".lora_A.default", "")
            replaced[inner] = self.model.get_parameter(inner) + ALPHA / RANK * other @ value
        return replaced

    def scores(self, ids: Sequence[int]) -> Tensor:
        """Log-probabilities (length - 1, vocabulary) of each token behind the first."""
        given = {"input_ids": torch.tensor([ids])}
        logits = torch.func.functional_call(self.model, self._whole(), (), given).logits[0, :-1]
        highest = logits.max(dim=-1, keepdim=True).values
        return logits - highest - (logits - highest).exp().sum(dim=-1, keepdim=True).log()

    def log_probs(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Log-probabilities (answer,) of the tokens of an answer."""
        scores = self.scores([*prompt, *answer])[len(prompt) - 1 :]
        return scores[range(len(answer)), list(answer)]

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        names = list(self.weights)
        found = torch.autograd.grad(loss, [self.weights[name] for name in names])
        return dict(zip(names, found, strict=True))


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """How far gradients are from the exact ones, as a share of the norm of these."""
    assert set(found) == set(exact)
    apart = sum(float((found[name].double() - exact[name]).square().sum()) for name in exact)
    return (apart / sum(float(value.square().sum()) for value in exact.values())) ** 0.5
