"""Callbacks of a trainer: events of its steps, heartbeats, and stops at boundaries.

Progress is kept in memory: a mark takes about a microsecond, and a step has a few of them. Layers count progress in the
forward pass, and through their outputs in the backward pass, so that a pass that takes minutes does not count as a
hang; that takes some ten microseconds per layer.

Training may stop at a boundary: after a step, or between two batches of an evaluation, in all processes alike. At each
boundary they exchange stop requests and the time left, and decide the same from the same figures.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.modeling_layers import GradientCheckpointingLayer

from tunekit.estimates.memory.memory import Part
from tunekit.estimates.throughput.speed import STORAGE_BYTES_PER_SECOND
from tunekit.methods.run_trainer import RunTrainer
from tunekit.planner.decisions.environment import BYTES_PER_TRAINED
from tunekit.planner.plan import Plan, Schedule
from tunekit.process.signals import MARGIN_SECONDS, Wishes
from tunekit.process.watchdog import Heart, largest, same_everywhere
from tunekit.recipe.methods import is_rewarded
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.runs.checkpoints.complete import Newest
from tunekit.runs.record import Record
from tunekit.runs.run import Run
from tunekit.runs.small_files import COMMAND, Place
from tunekit.training.answers import NUM_SHOWN, Answers
from tunekit.training.checkpointing.save import Saver
from tunekit.training.engines import deepspeed
from tunekit.training.engines.engine import check_gradients, verify
from tunekit.training.health_warnings import Trends
from tunekit.training.measured_memory import held_bytes, resident_bytes, tensors_of
from tunekit.training.non_finite import Guard
from tunekit.training.timing import WINDOW_STEPS, Ranks, Timing, Trace

if TYPE_CHECKING:
    from tunekit.methods.environments.episodes import Host

LONG_SECONDS = 1e9
"""Stand-in for an end that is not in sight, where infinity could not be told from NaN."""


WHO = ("", COMMAND, "SIGINT", "SIGUSR1", "SIGHUP", "SIGTERM")
"""Sources of a stop request, by the number that processes exchange; none is the first."""


class Watch(TrainerCallback):  # type: ignore[misc]
    """Writes logged metrics, evaluations and checkpoints as events, with tokens per second of the steps alone.

    Args:
        record: Record of the run, for events and status.
        plan: The plan of the run.
        heart: Heartbeats of the process.
    """

    trainer: RunTrainer
    """The trainer, once there is one."""
    before_training: Callable[[], None]
    """Hook that runs on the model before the first step, when it is on its device."""
    guard: Guard
    """Detector of non-finite steps, from the first one on."""

    def __init__(self, record: Record, plan: Plan, heart: Heart) -> None:
        self.record = record
        self.plan = plan
        self.heart = heart
        self.held: dict[Part, int] = {}
        """Bytes held by part: those of the model when training begins, all of them after the first step."""
        self._held_in_step = False
        self.context_bytes: int | None = None
        """Resident bytes when training began, besides the model."""
        self.timing = Timing(plan)
        self.trace = Trace(plan)
        self.ranks = Ranks(self.timing, self.trace)
        self.num_tokens = 0
        """Tokens trained on so far by all processes, padding not counted."""
        self.num_tokens_before = 0
        """Those before the checkpoint that the run goes on from."""
        self.evaluated_step: int | None = None
        """Step of the last evaluation."""
        self.tool_hosts: Sequence[Host] = ()
        """Processes of tools and environments, which end with the work."""
        self._answers: Answers | None = None
        self._shown_step = 0
        self._lost_reasons: set[str] = set()
        self._logged_tokens = 0
        self._logged = self.timing.seconds()

    @cached_property
    def _trends(self) -> Trends:
        """Warnings about what was logged, with the figures and the warnings of earlier attempts."""
        events = self.record.run.events()
        logs = [event for event in events if event["event"] == "log"]
        return Trends(self.plan.recipe.method, logs, [event["trend"] for event in events if "trend" in event])

    def enter(self, phase: str) -> None:
        """Begin a phase of the run."""
        self.record.enter(phase)
        self.heart.mark(phase)

    def on_epoch_begin(self, *_: object, **__: object) -> None:
        """Wait for micro-batches from here on."""
        self.timing.mark()

    def on_train_begin(self, *_: object, model: Module, optimizer: Optimizer, **__: object) -> None:
        """Measure the model, and verify the engine against the plan."""
        self.record.write("engine", **verify(self.trainer, self.plan))
        self.held = self._held(model, None)
        self.context_bytes = resident_bytes() - sum(self.held.values())
        if is_rewarded(method := self.plan.recipe.method):
            self._answers = Answers(self.trainer.answer_logs, method.num_generations)
        self.before_training()
        self.guard = Guard(self.trainer, self.plan, self.record)
        self.record.enter("training")
        self.timing.attach(self.trainer, optimizer)

    def go_on(self, num_tokens: int) -> None:
        """Take over the counts of the checkpoint that the run resumes from, if it does.

        Args:
            num_tokens: Tokens that were trained on.
        """
        self.num_tokens = self.num_tokens_before = self._logged_tokens = num_tokens
        evaluated = [logs["step"] for logs in self.trainer.state.log_history if "eval_loss" in logs]
        self.evaluated_step = evaluated[-1] if evaluated else None

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        """Mark the start of the optimizer step."""
        if not self._held_in_step and not self.guard.leaves_out:
            check_gradients(self.trainer, self.plan)
        self.heart.mark("optimizer")

    def on_optimizer_step(self, *_: object, model: Module, optimizer: Optimizer, **__: object) -> None:
        """Measure all that stays, once: the first gradients are still there."""
        if not self._held_in_step and not self.guard.leaves_out:
            self._held_in_step = True
            self.held = self._held(model, optimizer)

    def _held(self, model: Module, optimizer: Optimizer | None) -> dict[Part, int]:
        if self.trainer.is_deepspeed_enabled:
            return held_bytes(deepspeed.held(self.trainer, self.plan))
        return held_bytes(tensors_of(model, optimizer, full=isinstance(self.plan.recipe.adapter, FullAdapter)))

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Start the clock of a step."""
        self.timing.begin_step()
        self.trace.begin_step(self.trainer.accelerator)
        self.timing.mark()

    def on_step_end(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        """Stop the clock of a step, update the status, and at times compare the processes."""
        self.timing.end_step()
        self.heart.mark("logging")
        is_traced = self.trace.end_step(state.global_step)
        self.record.update_status(step=state.global_step)
        if is_traced or state.global_step % WINDOW_STEPS == 0:
            self.compare_ranks()

    def on_log(self, args: object, state: TrainerState, control: object, logs: dict[str, float], **_: object) -> None:
        """Write what the trainer logged."""
        # Steps behind the last ones that were logged come with the trainer's own summary.
        self.num_tokens = int(logs.get("num_tokens", self.num_tokens))
        if "eval_loss" in logs:
            self.evaluated_step = state.global_step
            if self._answers is not None:
                self._answers.look()
            figures = {name: value for name, value in logs.items() if name.startswith("eval_")}
            self.record.write("eval", step=state.global_step, **figures)
        elif "loss" in logs:
            self._write_step(state.global_step, logs)
            self.timing.mark()

    def _write_step(self, step: int, logs: dict[str, float]) -> None:
        now = self.timing.seconds()
        seconds = {part: now[part] - before for part, before in self._logged.items()}
        tokens = self.num_tokens - self._logged_tokens
        self._logged, self._logged_tokens = now, self.num_tokens
        figures = {**rates(self.plan, tokens, seconds["step_seconds"]), **seconds, **logs}
        self.record.write("log", step=step, **figures)
        if self.record.place.is_main:
            self._tell(step, figures)

    def _tell(self, step: int, logs: dict[str, float | None]) -> None:
        """Record answers now and then, and warnings from the metrics so far."""
        num_steps = self.trainer.state.max_steps
        due = self._shown_step == 0 or step == num_steps or step >= self._shown_step + num_steps / NUM_SHOWN
        answers = self._answers.look() if self._answers is not None and due else None
        if answers is not None:
            self._shown_step = step
            self.record.write("completions", step=step, **answers)
        for name, message in self._trends.add(step, logs):
            self.record.write("warning", message=f"step {step}: {message}", trend=name)

    def tell_lost(self, score: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand around the rewards of answers: warn of each reason for lost episodes and calls, once."""
        rewards = score(*args, **kwargs)
        for reason in self.trainer.lost_reasons:
            if reason not in self._lost_reasons:
                self._lost_reasons.add(reason)
                self.record.write("warning", message=f"step {self.trainer.state.global_step + 1}: {reason}")
        return rewards

    def end_tools(self) -> None:
        """End the processes of tools and environments."""
        for host in self.tool_hosts:
            host.close()

    def on_evaluate(self, *_: object, **__: object) -> None:
        """Stop the clock of an evaluation."""
        self.timing.evaluation_seconds += self.timing.mark()

    def on_save(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        """Stop the clock of saving, and record the times of the processes."""
        self.timing.saving_seconds += self.timing.mark()
        self.compare_ranks()
        self.record.write("ranks", step=state.global_step, ranks=self.ranks.reports)

    def on_train_end(self, *_: object, **__: object) -> None:
        """Record that no further step follows."""
        self.heart.mark("ending")
        self.timing.mark()

    def on_result_saved(self) -> None:
        """Stop the clock of saving, and gather the times of the processes for the last time. Called by all together."""
        self.timing.saving_seconds += self.timing.mark()
        self.compare_ranks()

    def compare_ranks(self) -> None:
        """Gather the times of the processes, and warn of slow ones. Called by all together."""
        self.ranks.exchange()
        for report, own, peers in self.ranks.newly_slow():
            rank, node = report["rank"], report["node"]
            self.record.write(
                "warning",
                message=f"rank {rank} on {node} is slow: its data and forward pass take {own:.3g} s per step, "
                f"{own / peers - 1:.0%} more than the {peers:.3g} s of the other processes, which wait for it",
                rank=rank,
                node=node,
            )
        self.timing.mark()


def rates(plan: Plan, num_tokens: float, seconds: float) -> dict[str, float | None]:
    """Return the speed of all processes together, by the names of the `log` event.

    Args:
        plan: The plan. It knows what a token takes, and the peak of the device where its sheet says one.
        num_tokens: Tokens that all of them trained on, padding not counted.
        seconds: How long that took.
    """
    if not seconds:
        return {"tokens_per_second": None, "model_flops_per_second": None, "mfu": None}
    tokens_per_second = num_tokens / seconds
    achieved = share = None
    if plan.speed is not None and plan.speed.peak_flops_per_second is not None:
        achieved = tokens_per_second * plan.speed.model_flops_per_token
        share = achieved / (plan.speed.peak_flops_per_second * plan.layout.num_processes)
    return {"tokens_per_second": tokens_per_second, "model_flops_per_second": achieved, "mfu": share}


def follow_layers(model: Module, heart: Heart) -> list[RemovableHandle]:
    """Hook the layers of a model to count progress; the hooks can be removed."""

    # Functions, which a copy of a model shares with it; a heart cannot be copied.
    def on_gradient(_: Any) -> None:
        heart.move()

    def on_layer(_: Any, __: Any, output: Any) -> None:
        heart.move()
        passed = output[0] if isinstance(output, tuple) else output
        if isinstance(passed, torch.Tensor) and passed.requires_grad:
            passed.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    return [layer.register_forward_hook(on_layer) for layer in layers]


def follow(trainer: RunTrainer, heart: Heart, layers: list[RemovableHandle]) -> None:
    """Have a trainer mark its activities.

    Args:
        trainer: The trainer, before its model is wrapped.
        heart: Heartbeats of the process.
        layers: The hooks of its model's layers, which would break compiled graphs.
    """
    if trainer.args.torch_compile:
        for hook in layers:
            hook.remove()

    def take_batches(take: Callable[..., Any], rows: Iterator[Any], *args: Any) -> Any:
        heart.mark("data", trainer.state.global_step + 1)
        return take(_moving(rows, heart), *args)

    def evaluate_batch(predict: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        heart.move()
        return predict(*args, **kwargs)

    trainer.wrap("batches_of_step", take_batches)
    trainer.wrap("prediction_step", evaluate_batch)
    trainer.wrap("training_step", partial(_begin, heart, "forward"))
    trainer.wrap("backward", partial(_begin, heart, "backward"))
    trainer.wrap("save_checkpoint", partial(_begin, heart, "saving"))
    trainer.wrap("evaluate", partial(_do, heart, "evaluation"))
    trainer.wrap("generate", partial(_generate, heart))
    trainer.wrap("await_rollouts", partial(_do, heart, "generation"))
    trainer.wrap("tool_calls", partial(_do, heart, "tools"))
    trainer.wrap("calculate_rewards", partial(_do, heart, "rewards"))
    for host in trainer.tool_hosts:
        host.on_call = heart.move


def _begin(heart: Heart, at: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call that starts an activity, which lasts until the next one."""
    heart.mark(at)
    return call(*args, **kwargs)


def _do(heart: Heart, at: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call that is an activity, and return to the one before."""
    before = heart.at
    heart.mark(at)
    answer = call(*args, **kwargs)
    heart.mark(before)
    return answer


def _generate(heart: Heart, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Generate answers; of later turns processes have different numbers, so that these count as no activity."""
    if heart.at == "tools":
        heart.move()
        return call(*args, **kwargs)
    return _do(heart, "generation", call, *args, **kwargs)


def _moving(rows: Iterator[Any], heart: Heart) -> Iterator[Any]:
    for row in rows:
        heart.move()
        yield row


class EvaluationLeft(Exception):
    """An evaluation was left in all processes, as the run stops."""


class Boundary(TrainerCallback):  # type: ignore[misc]
    """Stops a training after the step, with a checkpoint if there is time for one.

    Args:
        plan: The plan, with the steps that can have a checkpoint.
        wishes: Stop requests, as far as this process knows.
        saver: Saver of the checkpoints, which knows their duration.
    """

    def __init__(self, plan: Plan, wishes: Wishes, saver: Saver) -> None:
        self.has_stopped = False
        """True once the training was stopped; alike in all processes."""
        self._plan = plan
        self._wishes = wishes
        self._saver = saver
        self._step_began = 0.0
        self._step_seconds = 0.0
        self._planned_save_seconds = plan.num_trainable_params * BYTES_PER_TRAINED / STORAGE_BYTES_PER_SECOND

    def attach(self, trainer: RunTrainer) -> None:
        """Attach to a trainer, whose checkpoints are those of the saver."""

        def evaluate_aside(evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with _same_random_numbers_after():
                try:
                    return evaluate(*args, **kwargs)
                except EvaluationLeft:
                    trainer.metrics["eval"].clear()
                    raise

        def finish_or_leave(finish_step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            _, _, model, trial, *_ = args
            try:
                finish_step(*args, **kwargs)
            except EvaluationLeft:
                # What comes behind an evaluation.
                if trainer.control.should_save:
                    trainer.save_checkpoint(model, trial)
                    trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

        def save_in_time(save: Callable[..., Any], model: Any, trial: Any) -> None:
            with self.saving():
                save(model, trial)

        trainer.wrap("evaluate", evaluate_aside)
        trainer.wrap("finish_step", finish_or_leave)
        trainer.wrap("save_checkpoint", save_in_time)
        trainer.add_callback(self)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While a checkpoint is made. One that goes on in the background is waited for at the end."""
        self._wishes.is_saving = True
        yield
        self._wishes.is_saving = self.has_stopped

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Leave stop requests to the end of the step from here on."""
        self._step_began = time.monotonic()
        if not self._wishes.at_boundaries:
            self._wishes.check()
            self._wishes.save_seconds = self._planned_save_seconds
            self._wishes.at_boundaries = True

    def on_substep_end(self, *_: object, **__: object) -> None:
        """Interrupt if the run is to stop at once: Python's own interrupt may have been dropped."""
        self._wishes.check()

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Stop the training if any process was asked to."""
        self._step_seconds = time.monotonic() - self._step_began
        if self._saver.seconds:
            self._wishes.save_seconds = fmean(self._saver.seconds)
        self._decide(state, control)

    def on_prediction_step(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Leave the evaluation if the run is to stop.

        Raises:
            EvaluationLeft: It is.
        """
        if self._decide(state, control):
            raise EvaluationLeft

    def on_save(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        """Stop the training with the checkpoint just written if that was requested during the save."""
        if not self.has_stopped and (source := self._told()[0]):
            self._stop(source, control, saves=False)

    def has_ended(self) -> bool:
        """Return whether the run is to stop here, after the last step. Called by all processes together."""
        if not self.has_stopped and (source := self._told()[0]):
            self.has_stopped = True
            self._wishes.learn(WHO[round(source)])
        return self.has_stopped

    def _decide(self, state: TrainerState, control: TrainerControl) -> bool:
        """Stop the training here if requested, and return whether it is."""
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

    def _stop(self, asked: float, control: TrainerControl, *, saves: bool) -> None:
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
        return largest(mine, self._saver.record.place)


def evaluation_is_due(run: Run, schedule: Schedule, newest: Newest, place: Place) -> bool:
    """Return whether the evaluation of the step that a run resumes from was interrupted, or not begun.

    It is also where it came after the checkpoint, which early stopping counts by. The main process decides.
    """
    step = newest.step
    if schedule.eval_steps is None or (step % schedule.eval_steps and step < schedule.num_steps):
        return False
    is_done = place.is_main and any(event["event"] == "eval" and event["step"] == step for event in run.events())
    is_done = is_done and (newest.patience is None or newest.patience.step == step)
    return not same_everywhere(is_done, place)


@contextlib.contextmanager
def _same_random_numbers_after() -> Iterator[None]:
    """Restore the random state afterwards, as if nothing had been drawn within it."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpy_state)
