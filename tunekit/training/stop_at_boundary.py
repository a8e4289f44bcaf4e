"""Boundaries at which training may end: after a step, or between two batches of an evaluation, in all processes alike.

At each of these all of them tell each other whether one is to end, and what each knows of the time that is left. From
the same figures all decide the same.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import distributed
from transformers import TrainerCallback

from tunekit.estimates.throughput.speed import STORAGE_BYTES_PER_SECOND
from tunekit.planner.decisions.environment import BYTES_PER_TRAINED
from tunekit.planner.plan import Plan
from tunekit.process.collectives import same_everywhere
from tunekit.process.signals import MARGIN_SECONDS, Wishes
from tunekit.runs.run import Run
from tunekit.runs.small_files import COMMAND, Place
from tunekit.training.checkpointing.save import Saver

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from tunekit.methods.run_trainer import RunTrainer

LONG_SECONDS = 1e9
"""Stand-in for an end that is not in sight, where infinity could not be told from NaN."""


WHO = ("", COMMAND, "SIGINT", "SIGUSR1", "SIGHUP", "SIGTERM")
"""Sources of a stop request, by the number that processes exchange; none is the first."""


class EvaluationLeft(Exception):
    """An evaluation was left in all processes, as the run is to end."""


class Boundary(TrainerCallback):  # type: ignore[misc]
    """Ends a training that is to end, after the step, with a checkpoint if there is time for one.

    Args:
        plan: It knows of which steps a checkpoint can be made.
        wishes: Whether the run is to end, as far as this process knows.
        saver: Which knows how long a checkpoint takes.
    """

    def __init__(self, plan: Plan, wishes: Wishes, saver: Saver) -> None:
        self.has_stopped = False
        """True once the training was ended; alike in all processes."""
        self._plan = plan
        self._wishes = wishes
        self._saver = saver
        self._step_began = 0.0
        self._step_seconds = 0.0
        planned = plan.num_trainable_params * BYTES_PER_TRAINED / STORAGE_BYTES_PER_SECOND
        self._planned_save_seconds = planned

    def attach(self, trainer: "RunTrainer") -> None:
        """Mind this trainer, whose checkpoints are those of the saver."""

        def evaluate_aside(evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with _same_random_numbers_after():
                try:
                    return evaluate(*args, **kwargs)
                except EvaluationLeft:
                    trainer.metrics["eval"].clear()
                    raise

        def finish_or_leave(
            finish_step: Callable[..., Any],
            tr_loss: Any,
            grad_norm: Any,
            model: Any,
            trial: Any,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            try:
                finish_step(tr_loss, grad_norm, model, trial, *args, **kwargs)
            except EvaluationLeft:
                # What comes behind an evaluation.
                if trainer.control.should_save:
                    trainer.save_checkpoint(model, trial)
                    trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

        def save_in_time(save: Callable[..., Any], model: Any, trial: Any) -> None:
            self._wishes.is_saving = True
            save(model, trial)
            # One that goes on in the background is waited for at the end.
            self._wishes.is_saving = self.has_stopped

        trainer.wrap("evaluate", evaluate_aside)
        trainer.wrap("finish_step", finish_or_leave)
        trainer.wrap("save_checkpoint", save_in_time)
        trainer.add_callback(self)

    def on_step_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """From here on the end of a step is waited for."""
        self._step_began = time.monotonic()
        if not self._wishes.at_boundaries:
            self._wishes.check()
            self._wishes.save_seconds = self._planned_save_seconds
            self._wishes.at_boundaries = True

    def on_substep_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """End here if the run is to end at once: what Python raised for it may have been dropped."""
        self._wishes.check()

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """End the training if that is wished of any process."""
        self._step_seconds = time.monotonic() - self._step_began
        if self._saver.num_saved:
            self._wishes.save_seconds = self._saver.seconds / self._saver.num_saved
        self._decide(state, control)

    def on_prediction_step(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Leave the evaluation if the run is to end.

        Raises:
            EvaluationLeft: It is.
        """
        if self._decide(state, control):
            raise EvaluationLeft

    def on_save(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """End the training with the checkpoint that is just written if that was wished meanwhile."""
        if not self.has_stopped and (source := self._told()[0]):
            self._stop(source, control, saves=False)

    def has_ended(self) -> bool:
        """Return whether the run is to end here, behind the last step. Called by all processes together."""
        if not self.has_stopped and (source := self._told()[0]):
            self.has_stopped = True
            self._wishes.learn(WHO[round(source)])
        return self.has_stopped

    def _decide(self, state: "TrainerState", control: "TrainerControl") -> bool:
        """End the training here if it is to end; whether it is."""
        source, hurry, step_seconds, save_seconds = self._told()
        if not source:
            return False
        schedule = self._plan.schedule
        assert schedule is not None
        num_more = -state.global_step % schedule.save_together
        margin = min(MARGIN_SECONDS, self._plan.recipe.parallel.grace_seconds / 5)
        fits = num_more * step_seconds + save_seconds + margin <= -hurry
        if num_more and fits and state.global_step < state.max_steps:
            # With the answers of this step more steps are to be computed, before a checkpoint can be made.
            return False
        can_save = state.global_step > 0 and not num_more and self._plan.layout.why_not_resumed is None
        self._wishes.is_late = can_save and not fits
        self._stop(source, control, saves=can_save and fits)
        return True

    def _stop(self, asked: float, control: "TrainerControl", *, saves: bool) -> None:
        self.has_stopped = True
        self._wishes.learn(WHO[round(asked)])
        control.should_training_stop = True
        control.should_evaluate = False
        control.should_save = saves

    def _told(self) -> Sequence[float]:
        """Return the source of a stop request (0: none), minus the least time left, and the longest step and save."""
        wishes = self._wishes
        wishes.check()
        mine = [
            0.0 if wishes.asked is None else WHO.index(wishes.asked.by),
            -min(wishes.seconds_left, LONG_SECONDS),
            self._step_seconds,
            wishes.save_seconds,
        ]
        if not distributed.is_initialized():
            return mine
        gathered = torch.tensor(mine, dtype=torch.float64)
        distributed.all_reduce(gathered, distributed.ReduceOp.MAX)
        values: list[float] = gathered.tolist()
        return values


def evaluation_is_due(run: Run, step: int, place: Place) -> bool:
    """Return whether the evaluation of a step that a run resumes from was interrupted, or not begun; the main process
    decides.
    """
    schedule = run.plan.schedule
    assert schedule is not None
    if schedule.eval_steps is None or (step % schedule.eval_steps and step < schedule.num_steps):
        return False
    is_done = place.is_main and any(event["event"] == "eval" and event["step"] == step for event in run.events())
    return not same_everywhere(is_done, place)


@contextlib.contextmanager
def _same_random_numbers_after() -> Iterator[None]:
    """Have what follows draw as if nothing had been drawn within it, by an evaluation or by a part of one."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpy_state)
