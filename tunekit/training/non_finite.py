"""Losses and gradients that are not numbers, or infinite, seen by all processes before a step changes anything.

One such step makes all weights so, and what was trained is lost. So every step is looked at, whether it is logged or
not: each process looks at the losses of its micro-batches and at the norm of the gradients of all, and tells the others
in one small exchange over the processors' network, because a loss may be bad where no other process sees it. All decide
alike then: to end the run, to leave the step out, or to go back.

A step that is left out changes neither weights nor optimizer states; the schedule counts it. It is written down, and
left out again whenever it comes again, so that a run that is resumed is the run that was not interrupted.

With fp16 gradients overflow now and then, and the scaler leaves the step out and lowers the scale: that is no fault,
as long as there is a scale to lower.

On an accelerator this waits once a step until the backward pass is done, for losses and norm together; with DeepSpeed,
which has the norm on the processor by then, for the losses alone.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tunekit.errors import NonFiniteError, RollbackError
from tunekit.planner.plan import Plan
from tunekit.process.collectives import any_of, of_all, same_everywhere
from tunekit.runs.record import Record
from tunekit.runs.small_files import read_list
from tunekit.training.batch_rows import Rows

if TYPE_CHECKING:
    from torch import Tensor

    from tunekit.methods.run_trainer import RunTrainer

LEFT_OUT = "left_out.json"
"""File of a run folder with the steps that are left out: of each its number, what was wrong, and its rows."""

NUM_NAMED = 8
"""Rows that are named in a message; the file has all of them."""


class Guard:
    """Looks at every step of a trainer whose model is wrapped.

    Args:
        trainer: The trainer.
        plan: What is done with a step that is not finite.
        record: Where it is told.
    """

    def __init__(self, trainer: "RunTrainer", plan: Plan, record: Record) -> None:
        self.trainer = trainer
        self.train = plan.recipe.train
        usual = plan.recipe.method.default_learning_rate(plan.recipe.adapter.type)
        self._lower = min(plan.recipe.learning_rate / 10, usual)
        self.record = record
        self.rows = Rows(trainer, record.run, plan, record.place)
        self.leaves_out = False
        """True if the current step changes nothing."""
        self._left_out = same_everywhere(left_out(record.run.path), record.place)
        self._scales = plan.autocast and plan.dtype == "float16"
        self._measures = trainer.metrics
        self._batches: list[Any] = []
        self._losses: list[Tensor] = []
        self._loss_before: Tensor | None = None
        self._watch()

    def _watch(self) -> None:
        """Stand behind what the trainer does in a step."""
        trainer = self.trainer

        def training_step(compute: Callable[..., Any], model: Any, inputs: Any, *given: Any) -> "Tensor":
            if not self._batches:
                self._loss_before = trainer.summed_loss.clone()
                self.leaves_out = False
            self._batches.append(inputs)
            loss: Tensor = compute(model, inputs, *given)
            return loss

        def noted_backward(backward: Callable[..., Any], loss: "Tensor", **given: Any) -> None:
            self._losses.append(loss.detach())
            backward(loss, **given)

        def get_grad_norm(take_norm: Callable[..., Any], *given: Any, **named: Any) -> Any:
            norm = take_norm(*given, **named)
            if not trainer.is_deepspeed_enabled:
                self._look(norm)
                if self.leaves_out:
                    # No optimizer changes anything where there are no gradients, nor its states.
                    trainer.optimizer.zero_grad()
            return self._settled(norm)

        trainer.wrap("training_step", training_step)
        trainer.wrap("backward", noted_backward)
        trainer.wrap("grad_norm", get_grad_norm)
        if trainer.is_deepspeed_enabled:
            self._watch_deepspeed(trainer.model_wrapped.optimizer)

    def _watch_deepspeed(self, optimizer: Any) -> None:
        """Stand where DeepSpeed, which takes the step within the backward pass, knows the norm and has changed nothing.

        Both of its optimizers then adjust the scale of fp16, and leave a step out that overflows (deepspeed 0.19,
        `DeepSpeedZeroOptimizer.step` and `DeepSpeedZeroOptimizer_Stage3.step`).
        """
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        assert isinstance(optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3), type(optimizer)
        adjust = optimizer._update_scale

        def look_and_adjust(overflows: bool = False) -> None:
            self._look(math.inf if overflows else 0.0)
            # Where gradients are finite and a loss is not, the scale is good.
            adjust(overflows)
            optimizer.overflow = overflows or self.leaves_out

        optimizer._update_scale = look_and_adjust

    def _look(self, norm: "Tensor | float") -> None:
        """Tell the others of this process's losses and norm, and decide with them. Called by all together."""
        place, step = self.record.place, self.trainer.state.global_step + 1
        losses, norm = self._numbers(norm)
        bad = {number: loss for number, loss in enumerate(losses) if not math.isfinite(loss)}
        bad_norm = not math.isfinite(norm) and not self._is_scaled()
        is_loss, is_norm = any_of((bool(bad), bad_norm), place)
        if step in self._left_out:
            self.leaves_out = True
        elif is_loss or is_norm:
            # Where gradients alone are not finite, any row may be why.
            numbers = bad if is_loss else range(len(self._batches))
            mine = self.rows.name(step, {number: self._batches[number] for number in numbers})
            gathered = of_all((bad, mine), place)
            rows = list(dict.fromkeys(row for _, own in gathered for row in own))
            self._decide(step, f"{_problem(step, [losses for losses, _ in gathered])}, for {_listed(rows)}", rows)

    def _numbers(self, norm: "Tensor | float") -> tuple[list[float], float]:
        """The losses of the micro-batches and the norm, brought here at once."""
        loss_tensors = [loss.float().reshape(1) for loss in self._losses]
        if not isinstance(norm, torch.Tensor):
            return torch.cat(loss_tensors).tolist(), norm
        if isinstance(norm, torch.distributed.tensor.DTensor):
            norm = norm.full_tensor()
        *losses, here = torch.cat([*loss_tensors, norm.float().reshape(1).to(loss_tensors[0].device)]).tolist()
        return losses, here

    def _is_scaled(self) -> bool:
        """Return whether gradients may overflow because of loss scaling, and will be scaled less."""
        if not self._scales:
            return False
        if self.trainer.is_deepspeed_enabled:
            return True  # It raises by itself where there is nothing to lower.
        scaler = self.trainer.accelerator.scaler
        return bool(scaler.get_scale() > 1)

    def _decide(self, step: int, problem: str, rows: list[str]) -> None:
        """Do what the recipe says, in all processes alike."""
        policy, most = self.train.non_finite, self.train.max_non_finite
        if policy == "stop":
            raise NonFiniteError(
                problem,
                hint="lower train.learning_rate, look at these rows, or leave such steps out: train.non_finite=skip",
                changes=[f"train.learning_rate={self._lower:g}"],
            )
        if len(self._left_out) == most:
            raise NonFiniteError(
                f"{problem}; {most} such steps were left out before",
                hint="lower train.learning_rate, look at these rows, or raise train.max_non_finite",
                changes=[f"train.learning_rate={self._lower:g}"],
            )
        self._left_out.add(step)
        if self.record.place.is_main:
            _write(self.record.run.path, {"step": step, "problem": problem, "rows": rows})
        if policy == "rollback":
            raise RollbackError(problem, hint="the step will be left out: `tunekit resume` goes on")
        self.leaves_out = True
        self.record.write(
            "warning",
            message=f"{problem}: the step changes nothing ({len(self._left_out)} of {most} that may)",
            left_out=step,
            rows=rows,
        )

    def _settled(self, norm: Any) -> Any:
        """The norm to be logged, once the step is decided and its losses are counted."""
        trainer = self.trainer
        self._batches, self._losses = [], []
        if not self.leaves_out:
            return norm
        # What is logged is a mean over the steps that were taken.
        assert self._loss_before is not None
        trainer.summed_loss.copy_(self._loss_before)
        trainer.logged_step += 1
        measures = self._measures["train"]
        for name, values in list(measures.items()):
            measures[name] = [value for value in values if math.isfinite(value)]
            if not measures[name]:
                del measures[name]
        if trainer.is_deepspeed_enabled:
            # The schedule counts the step.
            trainer.model_wrapped.optimizer.overflow = False
        return None


def left_out(run_folder: Path) -> set[int]:
    """The steps of a run that are left out."""
    return {record["step"] for record in _read(run_folder)}


def _read(run_folder: Path) -> list[dict[str, Any]]:
    try:
        return read_list(run_folder / LEFT_OUT)
    except FileNotFoundError:
        return []


def _write(run_folder: Path, one: dict[str, Any]) -> None:
    draft = run_folder / f".{LEFT_OUT}"
    draft.write_text(json.dumps([*_read(run_folder), one], ensure_ascii=False, indent=2), encoding="utf-8")
    draft.replace(run_folder / LEFT_OUT)


def _problem(step: int, losses: Sequence[dict[int, float]]) -> str:
    """Describe the fault of a step, by the losses of micro-batches that each process found to be bad."""
    bad = {rank: next(iter(own.values())) for rank, own in enumerate(losses) if own}
    if not bad:
        return f"step {step}: the gradient norm is not finite, and the loss is"
    descriptions = (f"{loss}{f' in rank {rank}' * (len(losses) > 1)}" for rank, loss in bad.items())
    return f"step {step}: the loss is {' and '.join(descriptions)}"


def _listed(rows: list[str]) -> str:
    more = f" and {len(rows) - NUM_NAMED} more" if len(rows) > NUM_NAMED else ""
    return ", ".join(rows[:NUM_NAMED]) + more
