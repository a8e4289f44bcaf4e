"""Ranks that a run distributes among modules by importance (AdaLoRA, arXiv 2303.10512), as PEFT's allocator does.

The loss that keeps directions orthogonal is of the weights alone, so its gradient is added once a step, to those that
all processes have summed: PEFT adds it to each micro-batch of models that compute their loss themselves. Values of
directions that lose their rank are set to 0, and come back where they matter, until the last steps. So checkpoints
hold all directions, with the importance of each; only the result is cut to the ranks that are left.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from tunekit.recipe.sections.adapters import AdaloraAdapter

if TYPE_CHECKING:
    from transformers import TrainerState

    from tunekit.methods.run_trainer import RunTrainer

STATES = "rank_allocator.safetensors"
"""File of a checkpoint with the importance of what is trained, and the ranks that are left."""

_PATTERN = "rank_pattern."


class RankAllocation(TrainerCallback):  # type: ignore[misc]
    """Distribution of ranks in a run.

    Args:
        trainer: The trainer, before its model is wrapped.
        adapter: The section.
        num_steps: Optimizer steps of the run.
    """

    def __init__(self, trainer: "RunTrainer", adapter: AdaloraAdapter, num_steps: int) -> None:
        self._trainer, self._adapter, self._num_steps = trainer, adapter, num_steps
        self._tuner, self._config = cast(Any, trainer.model).base_model, trainer.model.peft_config["default"]
        self._pattern: dict[str, list[bool]] | None = None
        self._config.tinit, self._config.tfinal, self._config.deltaT = adapter.tinit, adapter.tfinal, adapter.deltaT
        self._config.beta1, self._config.beta2 = adapter.beta1, adapter.beta2
        self._weight = adapter.orth_reg_weight
        self._config.total_step = num_steps
        # PEFT would add the loss of directions to that of a model with labels.
        self._config.orth_reg_weight = 0.0
        self._allocator.beta1, self._allocator.beta2 = adapter.beta1, adapter.beta2
        trainer.wrap("training_step", self._add_gradients)
        trainer.wrap("save_optimizer", self._save)
        trainer.wrap("load_optimizer", self._load)
        trainer.add_callback(self)

    @property
    def _allocator(self) -> Any:
        return self._tuner.rankallocator

    def _add_gradients(self, training_step: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Add the loss of directions, and its gradients, to those of a step's last micro-batch."""
        loss = training_step(*args, **kwargs)
        if self._trainer.accelerator.sync_gradients and self._weight:
            loss = loss + add_orthogonality(self._tuner.model, self._weight)
        return loss

    def on_optimizer_step(self, args: object, state: "TrainerState", *_: object, **__: object) -> None:
        """Distribute ranks after the step, while its gradients are there; a skipped one has none."""
        directions = [weight for name, weight in self._tuner.model.named_parameters() if "lora_A." in name]
        if any(weight.grad is None for weight in directions):
            return
        self._config.rank_pattern = self._pattern
        self._tuner.update_and_allocate(state.global_step + 1)
        # With it PEFT would leave out directions of what it saves.
        self._pattern, self._config.rank_pattern = self._config.rank_pattern, None

    def finish(self) -> None:
        """Have PEFT save the ranks that are left, where they stay, and what the run was asked for."""
        self._config.orth_reg_weight = self._weight
        if self._trainer.state.global_step >= self._num_steps - self._adapter.tfinal:
            self._config.rank_pattern = self._pattern

    def _save(self, save: Callable[..., None], folder: str) -> None:
        save(folder)
        if not self._trainer.args.should_save:
            return
        states: dict[str, Tensor] = {}
        for kind in ("exp_avg_ipt", "exp_avg_unc"):
            states |= {f"{kind}.{name}": tensor.contiguous() for name, tensor in vars(self._allocator)[kind].items()}
        states |= {_PATTERN + name: torch.tensor(ranks) for name, ranks in (self._pattern or {}).items()}
        save_file(states, Path(folder) / STATES)

    def _load(self, load: Callable[..., None], folder: str) -> None:
        load(folder)
        if folder is None:
            return
        device = self._trainer.args.device
        states = {name: value.to(device) for name, value in load_file(Path(folder) / STATES).items()}
        for kind in ("exp_avg_ipt", "exp_avg_unc"):
            setattr(self._allocator, kind, _below(states, f"{kind}."))
        self._allocator.ipt = {name: torch.zeros_like(value) for name, value in self._allocator.exp_avg_ipt.items()}
        self._pattern = {name: ranks.tolist() for name, ranks in _below(states, _PATTERN).items()} or None


def _below(states: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the states whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in states.items() if name.startswith(prefix)}


def add_orthogonality(model: torch.nn.Module, weight: float) -> Tensor:
    """Return the weighted loss of directions that are not orthogonal, and add its gradients (equation 4).

    Args:
        model: The model with an adapter of AdaLoRA.
        weight: Its weight.
    """
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    directions = [(name, one) for name, one in named if "lora_A." in name or "lora_B." in name]
    total = torch.zeros((), device=directions[0][1].device)
    with torch.enable_grad():
        for name, parameter in directions:
            gram = parameter @ parameter.T if "lora_A." in name else parameter.T @ parameter
            loss = weight / len(directions) * torch.linalg.matrix_norm(gram - torch.eye(len(gram), device=gram.device))
            (gradient,) = torch.autograd.grad(loss, parameter)
            if parameter.grad is not None:
                parameter.grad += gradient
            total += loss.detach()
    return total
