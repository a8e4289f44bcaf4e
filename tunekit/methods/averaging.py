"""Averages of trained weights in the place of the weights: for evaluations, in checkpoints and in the result.

An optimizer that keeps an average has two modes. transformers switches it to the average to evaluate, and back to what
is trained at the next step (5.24); tunekit switches it before a checkpoint and at the end. The mode is saved with the
states, so that a resumed run switches back itself, with the same bits. `schedule_free_adamw` brings both modes along.
Any other optimizer is given them here with an exponential moving average, which is `AveragedModel` of
`torch.optim.swa_utils` but for where it is: in the optimizer's states, by the weights, divided and saved as these are.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

if TYPE_CHECKING:
    from tunekit.methods.run_trainer import RunTrainer

EMA = "ema"
"""Name of a weight's average among its states; that of the trained weight, while the model has the average."""

TRAINS = "train_mode"
"""Name of the mode in the optimizer's groups, as in those of schedulefree: false while the model has the average."""


def save_averages(trainer: "RunTrainer", ema_decay: float | None) -> None:
    """Have a trainer's checkpoints hold the averaged weights of its optimizer.

    Args:
        trainer: The trainer, before it makes its optimizer.
        ema_decay: Decay of an exponential moving average to be kept; None where the optimizer has an average itself.
    """

    def save(save_checkpoint: Callable[..., None], *args: Any) -> None:
        trainer.optimizer.eval()
        save_checkpoint(*args)

    trainer.wrap("save_checkpoint", save)
    if ema_decay is None:
        return
    decay = ema_decay

    def create(create_optimizer: Callable[..., Any], *args: Any) -> Any:
        optimizer = create_optimizer(*args)
        MovingAverage(trainer, optimizer, decay)
        return optimizer

    trainer.wrap("create_optimizer", create)


class MovingAverage:
    """Exponential moving average of the weights that an optimizer updates.

    As in `AveragedModel`, the average begins with the weights of the first step, and is decayed in every step after it.
    A weight without a gradient has no states, and so no average yet: it is its own.

    Args:
        trainer: The trainer, before training.
        optimizer: Its optimizer, which is given the methods `train` and `eval`.
        decay: Share of the average in the next one.
    """

    def __init__(self, trainer: "RunTrainer", optimizer: Any, decay: float) -> None:
        self.trainer = trainer
        self.optimizer = optimizer
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._starts: dict[Tensor, Tensor] = {}
        for group in optimizer.param_groups:
            group[TRAINS] = True
        optimizer.train, optimizer.eval = self.train, self.eval
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def train(self) -> None:
        """Give the model the weights that are trained."""
        self._switch(trains=True)

    def eval(self) -> None:
        """Give the model the averaged weights."""
        self._switch(trains=False)

    @torch.no_grad()
    def _switch(self, *, trains: bool) -> None:
        for group in self.optimizer.param_groups:
            if group[TRAINS] == trains:
                continue
            group[TRAINS] = trains
            for weight in group["params"]:
                if EMA in self._states(weight):
                    values, average = _local(weight), _local(self._states(weight)[EMA])
                    former = values.clone()
                    values.copy_(average)
                    average.copy_(former)
        # Without a backward pass, weights that FSDP2 has gathered to evaluate stay as they were.
        for module in self.trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def _before_step(self, *_: object) -> None:
        """Keep the weights whose first gradient comes later than that of others: their averages begin with them."""
        if any(EMA in self._states(weight) for weight in self._weights()):
            late = (weight for weight in self._weights() if weight.grad is not None and not self._states(weight))
            self._starts = {weight: weight.detach().clone() for weight in late}

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        """Update the average with what was updated; a step that is skipped has no gradients."""
        if all(weight.grad is None for weight in self._weights()):
            return
        averaged = [weight for weight in self._weights() if EMA in self._states(weight)]
        for weight in self._weights():
            if weight.grad is not None and EMA not in self._states(weight):
                start = self._starts.pop(weight, None)
                if start is not None:
                    averaged.append(weight)
                self.optimizer.state[weight][EMA] = weight.detach().clone() if start is None else start
        if averaged:
            averages = [_local(self._states(weight)[EMA]) for weight in averaged]
            self._update(averages, [_local(weight) for weight in averaged], None)

    def _weights(self) -> Iterable[Tensor]:
        return (weight for group in self.optimizer.param_groups for weight in group["params"])

    def _states(self, weight: Tensor) -> dict[str, Any]:
        """Return the states of a weight; the optimizer itself would begin them."""
        states: dict[str, Any] = self.optimizer.state.get(weight, {})
        return states


def _local(tensor: Tensor) -> Tensor:
    """Return the values that this process has."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
