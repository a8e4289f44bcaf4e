"""Restarts of a LoRA adapter (ReLoRA, arXiv 2307.05695): it is merged into the base weights, and begins anew.

A restart comes between two steps. It adds B A to the frozen weights, draws a new A, sets B to 0, and sets the smallest
of the optimizer's states of both to 0 (section 3). The learning rate then rises again to that of the schedule. All of
that depends on the seed and the step alone, so that processes agree and a resumed run has the same bits. What was
merged is kept in the main process, since checkpoints and the result apply to the base as it was.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from peft.tuners.lora import LoraLayer
from transformers import TrainerCallback

from tunekit.models.base_parts import add, keep_merged, matrices
from tunekit.recipe.sections.adapters import LoraAdapter, ReloraSection

if TYPE_CHECKING:
    from transformers import TrainerState

    from tunekit.methods.run_trainer import RunTrainer

STATES = {"exp_avg", "exp_avg_sq"}
"""States of AdamW."""


class Restarts(TrainerCallback):  # type: ignore[misc]
    """Restarts of the adapter of a run.

    Args:
        trainer: The trainer, before its model is wrapped.
        adapter: The section.
        seed: The recipe's seed.
    """

    def __init__(self, trainer: "RunTrainer", adapter: LoraAdapter, seed: int) -> None:
        assert adapter.relora is not None
        self.relora = adapter.relora
        self._trainer, self._adapter, self._seed = trainer, adapter, seed
        trainer.wrap("create_scheduler", self._create_scheduler)
        trainer.add_callback(self)

    def _create_scheduler(self, create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Create the schedule with its restarts; they come after its first step, whose rate is set already."""
        scheduler = create(*args, **kwargs)
        scheduler.lr_lambdas = [with_restarts(rate, self.relora) for rate in scheduler.lr_lambdas]
        return scheduler

    def on_step_end(self, args: object, state: "TrainerState", *_: object, **__: object) -> None:
        """Restart the adapter where it is due, before the step's checkpoint and evaluation."""
        if state.global_step % self.relora.steps == 0 and state.global_step < state.max_steps:
            self._restart(state.global_step)

    @torch.no_grad()
    def _restart(self, step: int) -> None:
        model, optimizer = cast(Any, self._trainer.model), self._trainer.optimizer
        if self._trainer.args.should_save:
            keep_merged(model, matrices(model))
        device = self._trainer.args.device
        # What dropout draws goes on as it would have.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self._seed + step)
            for layer in (cast(Any, module) for module in model.modules() if isinstance(module, LoraLayer)):
                pair = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                add(layer, pair)
                layer.reset_lora_parameters("default", self._adapter.init_lora_weights)
                for matrix in pair:
                    # A matrix has no states yet where all steps were skipped.
                    states = optimizer.state.get(matrix, {})
                    for name in STATES & states.keys():
                        prune(states[name], self.relora.prune_ratio)


def with_restarts(rate: Callable[[int], float], relora: ReloraSection) -> Callable[[int], float]:
    """Return a schedule that rises again to another one after each restart (section 3).

    Args:
        rate: The factor of the learning rate by the number of steps that were taken.
        relora: When it restarts.
    """

    def of(step: int) -> float:
        since = step % relora.steps
        is_rising = step >= relora.steps and since < relora.warmup_steps
        return rate(step) * since / relora.warmup_steps if is_rising else rate(step)

    return of


def prune(values: torch.Tensor, ratio: float) -> None:
    """Set a share of a tensor's values to 0: those of the smallest magnitude.

    Args:
        values: The tensor.
        ratio: The share. Of values that are equal to the largest of these, all go.
    """
    num = round(ratio * values.numel())
    if num:
        magnitudes = values.abs()
        values.masked_fill_(magnitudes <= magnitudes.flatten().kthvalue(num).values, 0)
