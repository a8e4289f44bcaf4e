"""Measured memory of a run: in all, and by the parts of its plan."""

import ctypes
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import psutil

from tunekit.estimates.memory.memory import Part
from tunekit.planner.decisions.shortage import Shortage
from tunekit.planner.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""As torch's allocators write them."""

OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Messages of torch's errors for exhausted memory: its allocator or the driver, its allocator on a CPU, and cuBLAS."""


MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
"""Numbers of parameters in glibc's malloc.h, by the variable that sets them where a process begins."""


def set_allocator(environment: Mapping[str, str]) -> None:
    """Give this process, which runs already, the sizes of a plan from which glibc gives memory back.

    Args:
        environment: The variables of a plan.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    for name, parameter in MALLOPT.items():
        if environment.get(name, "").isdigit():
            ctypes.CDLL(None).mallopt(parameter, int(environment[name]))


def tensors_of(model: "Module", optimizer: "Optimizer | None", *, full: bool) -> "dict[Part, Iterable[Tensor]]":
    """Return the tensors of each part: weights, adapters, gradients and optimizer states.

    Args:
        model: The model with its adapter.
        optimizer: Its optimizer, None before there is one.
        full: Whether the weights themselves are trained, so that what is trained is no adapter.
    """
    from tunekit.models.quantization import stored_tensors
    from tunekit.models.sharded_4bit import scales_of_sharded

    parameters = list(model.parameters())
    weights = [parameter for parameter in parameters if full or not parameter.requires_grad]
    states = [] if optimizer is None else [value for held in optimizer.state.values() for value in held.values()]
    return {
        "weights": [*(tensor for weight in weights for tensor in stored_tensors(weight)), *scales_of_sharded(model)],
        "adapters": [parameter for parameter in parameters if not full and parameter.requires_grad],
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer": states,
    }


def held_bytes(parts: "Mapping[Part, Iterable[Tensor]]") -> dict[Part, int]:
    """Return the bytes of each part's tensors in this process, without parts that it has nothing of."""
    sizes = {part: _sum_bytes(tensors) for part, tensors in parts.items()}
    return {part: size for part, size in sizes.items() if size}


def _sum_bytes(tensors: "Iterable[Tensor]") -> int:
    """Bytes of tensors in this process, what is shared counted once. Of a divided one it has a part."""
    from torch import is_tensor
    from torch.distributed.tensor import DTensor

    local_tensors = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in local_tensors if is_tensor(tensor)}.values())


class Peaks(TypedDict):
    """The most memory that a process used, by the names of the `result` event; None where torch does not count it."""

    peak_memory_bytes: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None


def peaks(plan: Plan) -> Peaks:
    """The most memory that this process used so far."""
    if plan.device.kind == "cuda":
        import torch

        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return Peaks(peak_memory_bytes=reserved, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Peaks(peak_memory_bytes=resident, peak_allocated_bytes=None, peak_reserved_bytes=None)


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Return whether an error reports exhausted memory, on an accelerator or on a CPU."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def resident_bytes() -> int:
    """Main memory that this process holds now."""
    resident: int = psutil.Process().memory_info().rss
    return resident


def shortage(plan: Plan, held: dict[Part, int], context_bytes: int | None, error: BaseException) -> Shortage:
    """Return the memory at the time of an out-of-memory error. Call it while the error is handled: it keeps the tensors
    alive.

    Args:
        plan: What was planned.
        held: Parts that were measured.
        context_bytes: What was resident besides them, where that was measured.
        error: One that `is_out_of_memory`.
    """
    match = re.search(r"tried to allocate ([\d.]+) (\w+)", str(error), re.IGNORECASE)
    asked_bytes = int(float(match[1]) * UNITS[match[2]]) if match else 0
    short = partial(Shortage, planned=plan.memory, held=held, asked_bytes=asked_bytes)
    if plan.device.kind == "cpu":
        resident = resident_bytes()
        context = resident if context_bytes is None else context_bytes
        return short(context_bytes=context, taken_bytes=max(0, resident - context))
    from torch import cuda

    free, taken, allocated = cuda.mem_get_info()[0], cuda.memory_reserved(), cuda.memory_allocated()
    return short(context_bytes=None, taken_bytes=taken, free_bytes=free, allocated_bytes=allocated)
