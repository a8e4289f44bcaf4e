"""Share of collectives in a step: one step of a run, traced by torch's profiler.

Exchanges go on while a process computes, so no clock of its own tells how long they take. The profiler does, and costs
time itself: it is on for one step of each process, and off in all others. That step counts in every figure of the run
like the others; turning the profiler on and off lies outside of it, and counts in none.

With gloo an exchange lasts from when it is asked for to when its result is there; with NCCL as long as its kernel runs
on the device. Either includes waiting for processes that come to it later. What several do at once is counted once.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

import torch
from torch.profiler import ProfilerActivity, profile

from tunekit.planner.plan import Plan

if TYPE_CHECKING:
    from accelerate import Accelerator

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

    def begin_step(self, accelerator: "Accelerator") -> None:
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
        whole = (self._began, self._now())
        self._profile.stop()
        assert self._profile.profiler is not None
        assert self._profile.profiler.kineto_results is not None
        exchanges: list[Span] = []
        kernels: list[Span] = []
        for event in self._profile.profiler.kineto_results.events():
            span = (event.start_ns(), event.end_ns())
            if self.plan.device.kind == "cpu" and event.name().startswith(GLOO):
                exchanges.append(span)
            elif event.activity_type() == "kernel":
                (exchanges if event.name().startswith(NCCL) else kernels).append(span)
        self._profile = None
        if self.plan.device.kind == "cuda" and not kernels:
            return True  # Many containers forbid to look at the device: that is no word of exchanges.
        seconds, step_seconds = covered_seconds(exchanges, whole), covered_seconds([whole], whole)
        exposed = None if self.plan.device.kind == "cpu" else exposed_seconds(exchanges, kernels, whole) / step_seconds
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
