"""Watches a trainer from inside and turns what it sees into events and status."""

import math
import time
from threading import Event
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from tunekit.errors import RunError
from tunekit.planner.memory import Part
from tunekit.run.checkpoint import CHECKPOINTS, complete
from tunekit.run.memory import held_bytes, resident_bytes
from tunekit.run.record import Record
from tunekit.run.verify import verify

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class Watch(TrainerCallback):  # type: ignore[misc]
    """Writes logged metrics, evaluations and checkpoints as events, with tokens per second of the steps alone.

    Args:
        record: Where events go, and the status that follows the steps.
        asked_to_stop: Set when the user interrupted; the run ends with the step at the latest.
        full: Whether the weights themselves are trained, and no adapter.
    """

    trainer: "Trainer"
    """The trainer, once there is one."""

    def __init__(self, record: Record, asked_to_stop: Event, *, full: bool) -> None:
        self.record = record
        self.plan = record.run.plan
        self.asked_to_stop = asked_to_stop
        self.full = full
        self.held: dict[Part, int] = {}
        """Bytes held by part: those of the model when training begins, all of them after the first step."""
        self.context_bytes: int | None = None
        """What was resident when training began, besides the model."""
        self.is_in_step = False
        """Whether a step is being computed, rather than an evaluation."""
        self.seconds = 0.0
        """Time spent in optimizer steps, without evaluations and checkpoints."""
        self.data_seconds = 0.0
        """Time in which steps waited for their micro-batches, besides."""
        self.optimizer_seconds = 0.0
        """Of the steps, time in which the optimizer updated the weights. What a device still computes when a part ends
        counts to the next one; the trainer waits for the device once in each micro-batch, to look at its loss."""
        self.num_tokens = 0.0
        """Tokens trained on so far, padding not counted."""
        self.evaluated_step: int | None = None
        """Step of the last evaluation."""
        self._logged_seconds = 0.0
        self._step_began = 0.0
        self._update_began = 0.0
        self._waiting_since = 0.0

    def on_epoch_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Wait for micro-batches from here on."""
        self._waiting_since = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Start the clock of an update."""
        self._update_began = time.perf_counter()

    def on_train_begin(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        model: "Module",
        **kwargs: Any,
    ) -> None:
        """Measure the model, and see that what runs is what was planned."""
        self.record.write("engine", **verify(self.trainer, self.plan))
        self.held = held_bytes(model, None, full=self.full)
        self.context_bytes = resident_bytes() - sum(self.held.values())

    def on_optimizer_step(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        model: "Module",
        optimizer: "Optimizer",
        **kwargs: Any,
    ) -> None:
        """Stop the clock of an update, and measure all that stays, once: the first gradients are still there."""
        self.optimizer_seconds += time.perf_counter() - self._update_began
        if "gradients" not in self.held:
            self.held = held_bytes(model, optimizer, full=self.full)

    def on_step_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Start the clock of a step."""
        self.is_in_step = True
        self._step_began = time.perf_counter()
        self.data_seconds += self._step_began - self._waiting_since

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Stop the clock of a step and tell the status."""
        self.is_in_step = False
        self._waiting_since = time.perf_counter()
        self.seconds += self._waiting_since - self._step_began
        self.record.update_status(step=state.global_step)
        if self.asked_to_stop.is_set():
            raise KeyboardInterrupt

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        """Write what the trainer logged; a loss that is not a number ends the run."""
        if "eval_loss" in logs:
            self.evaluated_step = state.global_step
            self.record.write(
                "eval", step=state.global_step, **{k: v for k, v in logs.items() if k.startswith("eval_")}
            )
        elif "loss" in logs:
            self._write_step(state.global_step, logs)
        self._waiting_since = time.perf_counter()

    def _write_step(self, step: int, logs: dict[str, float]) -> None:
        seconds = self.seconds - self._logged_seconds
        tokens = logs.get("num_tokens", 0.0) - self.num_tokens
        self._logged_seconds, self.num_tokens = self.seconds, logs.get("num_tokens", 0.0)
        self.record.write("log", step=step, tokens_per_second=tokens / seconds if seconds else None, **logs)
        if not math.isfinite(logs["loss"]) or not math.isfinite(logs.get("grad_norm", 0.0)):
            raise RunError(
                f"step {step}: the loss is {logs['loss']} and the gradient norm {logs.get('grad_norm')}",
                hint="lower train.learning_rate, or look at the rows of this step",
            )

    def on_save(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Say where a checkpoint was written, once every process has done its part."""
        path = self.record.run.path / CHECKPOINTS / f"checkpoint-{state.global_step}"
        self.trainer.accelerator.wait_for_everyone()
        if self.record.place.is_main:
            complete(path, self.plan, step=state.global_step)
        self.record.write("checkpoint", step=state.global_step, path=str(path))
        self._waiting_since = time.perf_counter()
