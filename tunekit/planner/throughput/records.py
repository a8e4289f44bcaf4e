"""Records of finished runs that inform the plan of the next one on the same device.

Goodput of a long run: some time goes into checkpoints, and some is lost when hardware fails.

Of a run that saves every `t` seconds, each time standing still for `c`, on machines that fail every `M` seconds and
take `r` to start again, the useful share is 1 - c/t - t/(2M) - r/M: a failure costs half an interval on average. It
is largest at t = sqrt(2 c M) (Young, doi.org/10.1145/361147.361115, 1974; Daly, doi.org/10.1016/j.future.2004.11.016,
2006).
"""

import math
from collections.abc import Sequence
from statistics import median

from tunekit.planner.facts import Device, Facts
from tunekit.planner.layout import Layout
from tunekit.planner.memory.states import Dtype

MIN_ALLOCATED_BYTES = 2**30
"""Runs with less tell nothing of the reserve: torch takes memory in pieces of 20 MiB and more (`kLargeBuffer` in its
CUDACachingAllocator), which are much of little. A choice, not a measurement."""


class RunRecord(Facts):
    """Record of a finished run."""

    device: str
    """Name of the device."""
    model_type: str
    adapter: str
    dtype: Dtype
    num_params: int
    flops_per_token: float
    """As its plan counted them."""
    tokens_per_second: float
    """Of all devices together."""
    method: str = "sft"
    """Methods compute and wait for different things: GRPO's steps generate answers."""
    by_vllm: bool = False
    """True if vLLM generated them."""
    generation_share: float | None = None
    """Share of the steps in which answers were generated; None where there were none, or it was not measured."""
    peak_memory_bytes: int
    planned_memory_bytes: int
    layout: Layout = Layout()
    """Layout of the run: another layout waits for other collectives."""
    num_nodes: int = 1
    planned_tensor_bytes: int | None = None
    """Planned bytes of tensors alone."""
    peak_allocated_bytes: int | None = None
    """Most that its tensors took; None where torch does not count it, as on a CPU."""
    peak_reserved_bytes: int | None = None
    """Most that torch took of the device for them."""

    @property
    def flops_per_second(self) -> float:
        """FLOP/s that each device achieved; padding and data movement are in it as lost time."""
        return self.tokens_per_second * self.flops_per_token / self.layout.num_processes

    @property
    def computing_flops_per_second(self) -> float:
        """The same in the part of the steps in which no answers were generated."""
        return self.flops_per_second / (1 - (self.generation_share or 0))

    @property
    def memory_share(self) -> float:
        """Measured over planned memory."""
        return self.peak_memory_bytes / self.planned_memory_bytes

    @property
    def reserve_share(self) -> float | None:
        """Bytes beyond the planned tensors, as a share of them; None where that is not known.

        Tensors that the plan did not foresee count as reserve. Fewer than planned are no reason to reserve less: rows
        may just have been shorter than the longest that the plan reckons with.
        """
        planned, allocated, reserved = self.planned_tensor_bytes, self.peak_allocated_bytes, self.peak_reserved_bytes
        if planned is None or allocated is None or reserved is None or allocated < MIN_ALLOCATED_BYTES:
            return None
        return reserved / allocated * max(1.0, allocated / planned) - 1


def reserve_share(records: Sequence[RunRecord], device: Device) -> tuple[float, str] | None:
    """Return the allocator's overhead by the user's own runs on a device, as a share of the tensors, and its
    description.

    The median, which a run of another kind does not move. None where no run tells. On a CPU none does: what is resident
    there beyond the tensors depends on what else the process did.

    Args:
        records: Finished runs.
        device: Where.
    """
    shares = [
        record.reserve_share for record in records if record.device == device.name and record.reserve_share is not None
    ]
    if not shares:
        return None
    share = median(shares)
    runs = "1 run" if len(shares) == 1 else f"{len(shares)} runs"
    return share, f"from {runs} on this device"


DEVICE_SECONDS_PER_FAILURE = 54 * 16384 / 419 * 86400
"""Seconds of one device between failures that stop a run: 2,112 days. Llama 3 405B was interrupted 419 times without
plan in 54 days on 16,384 H100 (arXiv 2407.21783, section 3.3.4, 78 % of them hardware). Spot machines are taken away
far more often, which is not in it."""

RESTART_SECONDS = 600.0
"""From a failure until steps are made again: a choice. The run above was useful for more than 90 % of its time, so
that an interruption cost at most 54 days / 10 / 419 = 19 minutes, what it had to compute again included."""

STORAGE_BYTES_PER_SECOND = 1e9
"""Write rate of one node: an assumption, to be replaced by the time of the first checkpoint."""

WORTH_SAYING = 0.05
"""Failures that are to be expected in a run from which on a plan speaks of them: a choice."""


class Goodput(Facts):
    """Expected share of useful time of a run."""

    share: float
    """Useful time over all time, with checkpoints at `save_steps`."""
    num_failures: float
    """That are to be expected."""
    hours_between_failures: float
    save_steps: int
    """Steps between checkpoints: those asked for, or else the best."""
    best_save_steps: int
    save_seconds: float
    """For which a checkpoint stops the training."""

    def words(self) -> str:
        """Describe the expectation in one line."""
        if self.num_failures < 1:
            failures = f"a failure with a chance of {1 - math.exp(-self.num_failures):.0%}"
        else:
            failures = f"{self.num_failures:,.1f} failures to be expected"
        sentence = f"{self.share:.1%} of the time is useful: {failures} (one in {_hours(self.hours_between_failures)})"
        loses = f"a checkpoint every {self.best_save_steps:,} steps loses least"
        if self.save_steps != self.best_save_steps:
            loses = f"with a checkpoint every {self.save_steps:,} steps; {loses}"
        return f"{sentence}, {loses}, if it stops the training for {self.save_seconds:,.1f} s"


def goodput_of(
    *,
    num_devices: int,
    num_writers: int,
    num_steps: int,
    step_seconds: float,
    checkpoint_bytes: float,
    save_steps: int | None,
    restart_seconds: float = RESTART_SECONDS,
    storage_bytes_per_second: float = STORAGE_BYTES_PER_SECOND,
) -> Goodput | None:
    """Estimate the share of useful time of a run; None for a run that will hardly see a failure.

    Args:
        num_devices: Devices in use; the failure of one stops them all.
        num_writers: Machines that write their parts of a checkpoint at the same time.
        num_steps: Optimizer steps of the run.
        step_seconds: Time of each.
        checkpoint_bytes: Size of a checkpoint.
        save_steps: Steps between checkpoints, None for the best number.
        restart_seconds: From a failure until steps are made again.
        storage_bytes_per_second: What one node writes.
    """
    between = DEVICE_SECONDS_PER_FAILURE / num_devices
    expected = num_steps * step_seconds / between
    if expected < WORTH_SAYING:
        return None
    stall = checkpoint_bytes / num_writers / storage_bytes_per_second
    best = max(1, min(num_steps, round(best_interval_seconds(stall, between) / step_seconds)))
    steps = save_steps or best
    share = useful_share(steps * step_seconds, stall, between, restart_seconds)
    return Goodput(
        share=share,
        num_failures=expected / share,
        hours_between_failures=between / 3600,
        save_steps=steps,
        best_save_steps=best,
        save_seconds=stall,
    )


def best_interval_seconds(save_seconds: float, between_failures_seconds: float) -> float:
    """Time between checkpoints that loses least: sqrt(2 c M)."""
    return math.sqrt(2 * save_seconds * between_failures_seconds)


def useful_share(
    interval_seconds: float, save_seconds: float, between_failures_seconds: float, restart_seconds: float
) -> float:
    """Useful time over all time: 1 - c/t - t/(2M) - r/M, but never below a hundredth, where it does not hold."""
    lost = save_seconds / interval_seconds + (interval_seconds / 2 + restart_seconds) / between_failures_seconds
    return max(0.01, 1 - lost)


def _hours(hours: float) -> str:
    return f"{hours / 24:,.0f} days" if hours >= 48 else f"{hours:,.1f} hours"
