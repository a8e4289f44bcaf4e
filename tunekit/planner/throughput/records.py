"""Records of finished runs that inform the plan of the next one on the same device."""

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
