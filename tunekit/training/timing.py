"""Time of a run by part, and the share of collectives in a step.

Time of a run by part, by the clock of each process, and the process that keeps the others waiting.

Processes that train together end every step at the same time, however fast each of them is: who is done first waits in
an exchange, and exchanges hide behind computing. So the length of a step says nothing of who is slow. What a process
does by itself does: `Timing.own` is the time in which it gets its rows and goes forward through the layers, measured
inside of what an engine adds to them, where nobody is waited for. Backward passes are not in it; they take as many
times longer for a slow process as forward passes do. How long exchanges take no clock here tells: they go on while a
process computes (see `tunekit.training.timing`).

On CUDA the layers are timed by events on the device's own queue, read at the end of the step, when the trainer has
looked at the losses and they are over; nothing is waited for that is not over by then. All else is the time of the
processor that gives the work: what a device still computes when a part ends counts to the next one, and the trainer
waits for the device once in each micro-batch.

Share of collectives in a step: one step of a run, traced by torch's profiler.

Exchanges go on while a process computes, so no clock of its own tells how long they take. The profiler does, and costs
time itself: it is on for one step of each process, and off in all others. That step counts in every figure of the run
like the others; turning the profiler on and off lies outside of it, and counts in none.

With gloo an exchange lasts from when it is asked for to when its result is there; with NCCL as long as its kernel runs
on the device. Either includes waiting for processes that come to it later. What several do at once is counted once.
"""

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any, TypedDict

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import distributed
from torch._C._autograd import DeviceType
from torch.nn import Module
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_layers import GradientCheckpointingLayer

from tunekit.methods.run_trainer import RunTrainer
from tunekit.planner.plan import Plan
from tunekit.recipe.methods import generates
from tunekit.training.measured_memory import Peaks, peaks

TRACED_STEP = 3
"""Step of a process that is traced. In the first two DDP chooses its buckets and ZeRO-3 learns the order of the layers.
A run with fewer steps is not traced."""

GLOO = ("gloo:", "c10d::")
"""Prefixes of the names of collectives between processors: of transfers, and of their requests and copies."""

NCCL = "nccl"
"""Prefixes of the names of kernels that communicate."""

Span = tuple[int, int]
"""Start and end of an interval, in nanoseconds since the epoch."""


class Communication(TypedDict):
    """Time of a process in collectives in one step; None where there was none or it could not be traced."""

    communication_step: int | None
    """The step of the run that was looked at."""
    communication_seconds: float | None
    """While any exchange went on, also where the process computed meanwhile."""
    communication_share: float | None
    """Of that step's time."""
    exposed_share: float | None
    """Of that step's time, what of this went on while the device computed nothing. Known on CUDA alone."""


class Trace:
    """The profiler of a process.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.found = Communication(
            communication_step=None, communication_seconds=None, communication_share=None, exposed_share=None
        )
        self._num_begun = 0
        self._profile: profile | None = None
        self._began = 0

    def begin_step(self, accelerator: Accelerator) -> None:
        """A step begins: turn the profiler on if it is the one to look at. Called by all processes together."""
        self._num_begun += 1
        if self._num_begun != TRACED_STEP or self.plan.layout.num_processes == 1:
            return
        # On CUDA its kernels tell all. What the processor did would be many times as much to write down.
        activity = ProfilerActivity.CPU if self.plan.device.kind == "cpu" else ProfilerActivity.CUDA
        self._profile = profile(activities=[activity])
        self._profile.start()
        # Who has it on first would wait in the step's first exchange for those who have not.
        accelerator.wait_for_everyone()
        self._began = self._now()

    def end_step(self, step: int) -> bool:
        """A step has ended: turn the profiler off if it is on, and say whether it was.

        Args:
            step: The step of the run.
        """
        if self._profile is None:
            return False
        whole, is_cpu = (self._began, self._now()), self.plan.device.kind == "cpu"
        self._profile.stop()
        assert self._profile.profiler is not None and self._profile.profiler.kineto_results is not None
        exchanges: list[Span] = []
        kernels: list[Span] = []
        for event in self._profile.profiler.kineto_results.events():
            span = (event.start_ns(), event.end_ns())
            if is_cpu and event.name().startswith(GLOO):
                exchanges.append(span)
            elif _is_kernel(event):
                (exchanges if event.name().startswith(NCCL) else kernels).append(span)
        self._profile = None
        if self.plan.device.kind == "cuda" and not kernels:
            return True  # Many containers forbid to look at the device: that is no word of exchanges.
        seconds, step_seconds = covered_seconds(exchanges, whole), covered_seconds([whole], whole)
        exposed = None if is_cpu else exposed_seconds(exchanges, kernels, whole) / step_seconds
        self.found = Communication(
            communication_step=step,
            communication_seconds=seconds,
            communication_share=seconds / step_seconds,
            exposed_share=exposed,
        )
        return True

    def _now(self) -> int:
        if self.plan.device.kind == "cuda":
            torch.cuda.synchronize()
        return time.time_ns()


def _is_kernel(event: Any) -> bool:
    """Return whether an event of the profiler is a kernel of the device, which torch 2.11 does not tell itself."""
    on_device = event.device_type() != DeviceType.CPU and not event.is_user_annotation()
    return on_device and not event.name().startswith(("Memcpy", "Memset"))


def covered_seconds(spans: Iterable[Span], whole: Span) -> float:
    """Return the time that spans cover within another, overlaps counted once."""
    covered, (reached, end) = 0, whole
    for began, ended in sorted(spans):
        began, ended = max(began, reached), min(ended, end)
        if ended > began:
            covered += ended - began
            reached = ended
    return covered / 1e9


def exposed_seconds(exchanges: list[Span], kernels: list[Span], whole: Span) -> float:
    """Return the time of collectives within a span while no kernel computes."""
    return covered_seconds([*exchanges, *kernels], whole) - covered_seconds(kernels, whole)


WINDOW_STEPS = 20
"""Steps after which processes are compared, by their median step: no single long row, checkpoint or hiccup tells in it.
Lengths of rows that differ by half of their mean make it differ by 14 % at a micro-batch of one row."""

SLOW_SHARE = 0.25
"""Share by which a slow process takes longer than the others, in two consecutive windows. What is random in one window
is another's turn in the next; what is a quarter slower costs all the others a fifth of their time."""


class RankReport(Peaks, Communication):
    """A process as the `ranks` event and the result tell of it."""

    rank: int
    node: str
    step_seconds: float
    data_seconds: float
    forward_seconds: float
    """Of its own, in the layers."""
    wait_seconds: float
    """At least, for the slowest of each step: by how much less of its own it had to do."""


class Timing:
    """Seconds of a process by what it did, and at times those of all.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.step_seconds = 0.0
        """Optimizer steps, without evaluations and checkpoints. Waiting for other processes is in it."""
        self.data_seconds = 0.0
        """Waiting for micro-batches between the steps, this process's and those of others."""
        self.optimizer_seconds = 0.0
        """Of the steps, updating weights. What ZeRO gathers afterwards is not in it."""
        self.generates = generates(plan.recipe.method)
        """True if the model learns from answers that it generates."""
        self.generation_seconds = 0.0
        """Of the steps, generating answers. Where weights are divided, waiting for other processes is in it."""
        self.forward_seconds = 0.0
        """Of the steps, in the forward passes of the layers, where no other process is waited for."""
        self.evaluation_seconds = 0.0
        self.saving_seconds = 0.0
        """Writing checkpoints and the result."""
        self.own: list[float] = []
        """Seconds of each step that a process had to itself, since they were last told to the others."""
        self.is_in_step = False
        """True during a step, rather than an evaluation."""
        self._marked = 0.0
        self._update_began = 0.0
        self._row_seconds = 0.0
        self._begun: dict[Module, Any] = {}
        self._passed: list[tuple[Any, Any]] = []

    def attach(self, trainer: RunTrainer, optimizer: Optimizer) -> None:
        """Put clocks into a trainer whose model is wrapped: on its layers, its optimizer, and on how it gets rows."""
        trainer.wrap("batches_of_step", lambda take, rows, *args: take(self._timed(rows), *args))
        trainer.wrap("generate", self._generate)
        inner = _torch_optimizer(optimizer)
        inner.register_step_pre_hook(self._on_update)
        inner.register_step_post_hook(self._on_updated)
        # A hook with a clock would split what is compiled.
        if not trainer.args.torch_compile and not self.plan.torch_compile:
            for layer in self._clocked(trainer.model_wrapped):
                # Behind what the engine does before a layer, and before what it does behind it.
                layer.register_forward_pre_hook(self._on_layer)
                layer.register_forward_hook(self._on_layer_passed, prepend=True)
        self.mark()

    def _clocked(self, model: Module) -> Iterator[Module]:
        """Yield the modules that compute without collectives: layers, and with ZeRO-3, which gathers within them, their
        products.
        """
        for layer in _layers(model):
            if self.plan.layout.strategy == "zero3":
                yield from (part for part in layer.modules() if next(part.children(), None) is None)
            else:
                yield layer

    def mark(self) -> float:
        """Begin another part, and return how long the last one took."""
        before, self._marked = self._marked, time.perf_counter()
        return self._marked - before

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the steps so far and of their parts, by the names of the `log` event."""
        seconds = {
            "step_seconds": self.step_seconds,
            "data_seconds": self.data_seconds,
            "optimizer_seconds": self.optimizer_seconds,
        }
        return seconds | ({"generation_seconds": self.generation_seconds} if self.generates else {})

    def begin_step(self) -> None:
        """The micro-batches of a step are there."""
        self.data_seconds += self.mark()
        self.is_in_step = True

    def end_step(self) -> None:
        """The weights are updated."""
        self.step_seconds += self.mark()
        self.is_in_step = False
        forward = sum(_between(*marks) for marks in self._passed)
        self.forward_seconds += forward
        self.own.append(self._row_seconds + forward)
        self._passed, self._row_seconds = [], 0.0

    def _timed(self, rows: Iterator[Any]) -> Iterator[Any]:
        began = time.perf_counter()
        for batch in rows:
            self._row_seconds += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        answers = generate(*args, **kwargs)
        if self.is_in_step:
            self.generation_seconds += time.perf_counter() - began
        return answers

    def _now(self) -> Any:
        if self.plan.device.kind == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _on_layer(self, layer: Module, _: Any) -> None:
        if self.is_in_step:
            self._begun[layer] = self._now()

    def _on_layer_passed(self, layer: Module, *_: Any) -> None:
        # One that was computed again, and not to its end, has no end here.
        if self.is_in_step and layer in self._begun:
            self._passed.append((self._begun.pop(layer), self._now()))

    def _on_update(self, *_: Any) -> None:
        self._update_began = time.perf_counter()

    def _on_updated(self, *_: Any) -> None:
        self.optimizer_seconds += time.perf_counter() - self._update_began


class Ranks:
    """Times and memory of all processes of a run; known to the main one.

    Args:
        timing: That of this process.
        trace: What it found of its exchanges.
    """

    def __init__(self, timing: Timing, trace: Trace) -> None:
        self.timing = timing
        self.trace = trace
        self.steps: list[list[float]] = []
        """By rank, what each had to itself in the steps that were not yet compared."""
        self.waited: list[float] = []
        """By rank, how long it waited for the slowest of each step at least."""
        self.reports: list[RankReport] = []
        """As last told."""
        self._slow: set[int] = set()
        self._named: set[int] = set()

    def exchange(self) -> None:
        """Tell the main process of this one. Called by all processes together."""
        timing = self.timing
        mine = RankReport(
            rank=0,
            node=platform.node(),
            step_seconds=timing.step_seconds,
            data_seconds=timing.data_seconds,
            forward_seconds=timing.forward_seconds,
            wait_seconds=0.0,
            **peaks(timing.plan),
            **self.trace.found,
        )
        gathered = _gather((mine, timing.own))
        timing.own = []
        if not gathered:
            return
        own = [steps for _, steps in gathered]
        longest = [max(step) for step in zip(*own, strict=True)]
        self.steps = self.steps or [[] for _ in own]
        self.waited = self.waited or [0.0 for _ in own]
        self.reports = [report for report, _ in gathered]
        for rank, (report, steps) in enumerate(zip(self.reports, own, strict=True)):
            self.steps[rank] += steps
            self.waited[rank] += sum(longest) - sum(steps)
            report["rank"], report["wait_seconds"] = rank, self.waited[rank]

    def newly_slow(self) -> list[tuple[RankReport, float, float]]:
        """Processes that were slow in this window and the one before, each told once.

        Returns:
            Of each its report, and its median step and that of the others in seconds.
        """
        if not self.steps or len(self.steps[0]) < WINDOW_STEPS:
            return []
        slow = slow_ranks(self.steps)
        slow_again = [rank for rank in slow if rank in self._slow and rank not in self._named]
        self._slow, self.steps = set(slow), []
        self._named.update(slow_again)
        return [(self.reports[rank], *slow[rank]) for rank in slow_again]


def slow_ranks(steps: Sequence[Sequence[float]]) -> dict[int, tuple[float, float]]:
    """Ranks that take longer than the others by more than SLOW_SHARE, with their median step and that of the others.

    Args:
        steps: By rank, seconds of each step that it had to itself.
    """
    medians = [median(own) for own in steps]
    medians_of_others = [median(medians[:rank] + medians[rank + 1 :] or [own]) for rank, own in enumerate(medians)]
    return {
        rank: (own, other)
        for rank, (own, other) in enumerate(zip(medians, medians_of_others, strict=True))
        if own > (1 + SLOW_SHARE) * other
    }


def _gather(mine: Any) -> list[Any]:
    """Gather the values of all processes in the main one; empty in others."""
    if not distributed.is_initialized():
        return [mine]
    is_main = distributed.get_rank() == 0
    gathered: list[Any] | None = [None] * distributed.get_world_size() if is_main else None
    distributed.gather_object(mine, gathered)
    return gathered or []


def _between(begun: Any, ended: Any) -> float:
    """Seconds between two marks of `Timing`, on the processor or on the device."""
    if isinstance(begun, float):
        return float(ended - begun)
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000


def _layers(model: Module) -> Iterator[Module]:
    """The layers of a model, none of them in another."""
    for child in model.children():
        yield from [child] if isinstance(child, GradientCheckpointingLayer) else _layers(child)


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer that updates weights, inside of what Accelerate and DeepSpeed put around it."""
    while isinstance(optimizer, AcceleratedOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
