"""Watches a trainer from inside and turns what it sees into events and status."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from tunekit.estimates.memory.memory import Part
from tunekit.planner.plan import Plan
from tunekit.process.watchdog import Heart
from tunekit.recipe.methods import is_rewarded
from tunekit.runs.record import Record
from tunekit.training.answers import NUM_SHOWN, Answers
from tunekit.training.health_warnings import Trends
from tunekit.training.non_finite import Guard
from tunekit.training.timing import WINDOW_STEPS, Ranks, Timing, Trace
from tunekit.training.verify import held_bytes, resident_bytes, verify, zero_held_bytes

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


class Watch(TrainerCallback):  # type: ignore[misc]
    """Writes logged metrics, evaluations and checkpoints as events, with tokens per second of the steps alone.

    Args:
        record: Where events go, and the status that follows the steps.
        heart: Where the process says at what it is.
        full: Whether the weights themselves are trained, and no adapter.
    """

    trainer: "Trainer"
    """The trainer, once there is one."""
    before_training: Callable[[], None]
    """Hook that runs on the model before the first step, when it is on its device."""
    guard: Guard
    """Detector of non-finite steps, from the first one on."""

    def __init__(self, record: Record, heart: Heart, *, full: bool) -> None:
        self.record = record
        self.heart = heart
        self.plan = record.run.plan
        self.full = full
        self.held: dict[Part, int] = {}
        """Bytes held by part: those of the model when training begins, all of them after the first step."""
        self._held_in_step = False
        self.context_bytes: int | None = None
        """Resident bytes when training began, besides the model."""
        self.timing = Timing(record.run.plan)
        self.trace = Trace(record.run.plan)
        self.ranks = Ranks(self.timing, self.trace)
        self.num_tokens = 0
        """Tokens trained on so far by all processes, padding not counted."""
        self.num_tokens_before = 0
        """Those before the checkpoint that the run goes on from."""
        self.evaluated_step: int | None = None
        """Step of the last evaluation."""
        events = record.run.events() if record.place.is_main else []
        self._trends = Trends(
            self.plan.recipe.method,
            [event for event in events if event["event"] == "log"],
            [event["trend"] for event in events if "trend" in event],
        )
        self._answers: Answers | None = None
        self._shown_step = 0
        self._logged_tokens = 0
        self._logged = self._seconds()

    @property
    def is_in_step(self) -> bool:
        """True during a step, rather than an evaluation."""
        return self.timing.is_in_step

    def _seconds(self) -> dict[str, float]:
        timing = self.timing
        generation = {"generation_seconds": timing.generation_seconds} if timing.generates else {}
        return {
            "step_seconds": timing.step_seconds,
            "data_seconds": timing.data_seconds,
            "optimizer_seconds": timing.optimizer_seconds,
            **generation,
        }

    def on_epoch_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Wait for micro-batches from here on."""
        self.timing.mark()

    def on_train_begin(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        model: "Module",
        optimizer: "Optimizer",
        **kwargs: Any,
    ) -> None:
        """Measure the model, and see that what runs is what was planned."""
        self.record.write("engine", **verify(self.trainer, self.plan))
        self.held = self._held(model, None)
        self.context_bytes = resident_bytes() - sum(self.held.values())
        method = self.plan.recipe.method
        if is_rewarded(method):
            self._answers = Answers(self.trainer.answer_logs, method.num_generations)
        self.before_training()
        self.guard = Guard(self.trainer, self.plan, self.record)
        self.record.enter("training")
        self.timing.attach(self.trainer, optimizer)

    def go_on(self, num_tokens: int) -> None:
        """Take over what was done before the checkpoint that the run goes on from, if it does.

        Args:
            num_tokens: Tokens that were trained on.
        """
        self.num_tokens = self.num_tokens_before = self._logged_tokens = num_tokens
        evaluated = [logs["step"] for logs in self.trainer.state.log_history if "eval_loss" in logs]
        self.evaluated_step = evaluated[-1] if evaluated else None

    def on_pre_optimizer_step(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Say that weights are updated from here on."""
        self.heart.mark("optimizer")

    def on_optimizer_step(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        model: "Module",
        optimizer: "Optimizer",
        **kwargs: Any,
    ) -> None:
        """Measure all that stays, once: the first gradients are still there."""
        if not self._held_in_step and not self.guard.leaves_out:
            self._held_in_step = True
            self.held = self._held(model, optimizer)

    def _held(self, model: "Module", optimizer: "Optimizer | None") -> dict[Part, int]:
        if self.trainer.is_deepspeed_enabled:
            return zero_held_bytes(self.trainer, self.plan)
        return held_bytes(model, optimizer, full=self.full)

    def on_step_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Start the clock of a step."""
        self.timing.begin_step()
        self.trace.begin_step(self.trainer.accelerator)
        self.timing.mark()

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Stop the clock of a step, tell the status, and at times compare the processes."""
        self.timing.end_step()
        self.heart.mark("logging")
        is_traced = self.trace.end_step(state.global_step)
        self.record.update_status(step=state.global_step)
        if is_traced or state.global_step % WINDOW_STEPS == 0:
            self.compare_ranks()

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        """Write what the trainer logged."""
        # Steps behind the last ones that were logged come with the trainer's own summary.
        self.num_tokens = int(logs.get("num_tokens", self.num_tokens))
        if "eval_loss" in logs:
            self.evaluated_step = state.global_step
            if self._answers is not None:
                self._answers.look()
            self.record.write(
                "eval", step=state.global_step, **{k: v for k, v in logs.items() if k.startswith("eval_")}
            )
        elif "loss" in logs:
            self._write_step(state.global_step, logs)
            self.timing.mark()

    def _write_step(self, step: int, logs: dict[str, float]) -> None:
        now = self._seconds()
        seconds = {part: now[part] - before for part, before in self._logged.items()}
        tokens = self.num_tokens - self._logged_tokens
        self._logged, self._logged_tokens = now, self.num_tokens
        figures = {**rates(self.plan, tokens, seconds["step_seconds"]), **seconds, **logs}
        self.record.write("log", step=step, **figures)
        if self.record.place.is_main:
            self._tell(step, figures)

    def _tell(self, step: int, logs: dict[str, float | None]) -> None:
        """Show answers now and then, and warn of what the figures so far tell."""
        num_steps = self.trainer.state.max_steps
        due = self._shown_step == 0 or step == num_steps or step >= self._shown_step + num_steps / NUM_SHOWN
        answers = self._answers.look() if self._answers is not None and due else None
        if answers is not None:
            self._shown_step = step
            self.record.write("completions", step=step, **answers)
        for name, message in self._trends.add(step, logs):
            self.record.write("warning", message=f"step {step}: {message}", trend=name)

    def on_evaluate(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Stop the clock of an evaluation."""
        self.timing.evaluation_seconds += self.timing.mark()

    def on_save(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Stop the clock of saving, and say how the processes do."""
        self.timing.saving_seconds += self.timing.mark()
        self.compare_ranks()
        self.record.write("ranks", step=state.global_step, ranks=self.ranks.reports)

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Record that no further step follows."""
        self.heart.mark("ending")
        self.timing.mark()

    def on_result_saved(self) -> None:
        """Stop the clock of saving, and hear of the other processes for the last time. Called by all together."""
        self.timing.saving_seconds += self.timing.mark()
        self.compare_ranks()

    def compare_ranks(self) -> None:
        """Exchange how the processes do, and warn of those that keep the others waiting. Called by all together."""
        self.ranks.exchange()
        for report, own, peers in self.ranks.newly_slow():
            rank, node = report["rank"], report["node"]
            self.record.write(
                "warning",
                message=f"rank {rank} on {node} is slow: in a step its rows and the forward pass take {own:.3g} s, "
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
