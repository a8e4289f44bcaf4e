"""Check what was built against its plan: the layout before the first step, and the measured memory.

A look at what was built, in every process, before the first step: is it what was planned?

Several set-ups of these libraries run something else than what they were asked for and say nothing. So nothing is
believed that can be looked at: the number of processes, the engine, the placement of real parameters, their types, and
whether the optimizer has them.

Measured memory of a run: in all, and by the parts of its plan.
"""

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import psutil

from tunekit.errors import RunError
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import Part
from tunekit.planner.decisions.shortage import Shortage
from tunekit.planner.plan import Plan
from tunekit.training.engines import deepspeed, fsdp2

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer
    from transformers import Trainer


COMPUTE = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Types of the products by Accelerate's names of mixed precision."""


NAMES = {"fsdp": "dp_shard", "tp": "tp"}
"""Accelerate's names for the dimensions of transformers' mesh."""


def verify(trainer: "Trainer", plan: Plan) -> dict[str, Any]:
    """Compare the engine of a trainer whose model is wrapped with the plan.

    Returns:
        What runs, for the `engine` event.

    Raises:
        RunError: It is not what was planned.
    """
    _verify_processes(trainer, plan)
    args, accelerator = trainer.args, trainer.accelerator
    accumulation = accelerator.gradient_state.plugin_kwargs
    actual = {
        "num_processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "micro_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "sync_each_batch": bool(accumulation.get("sync_each_batch")),
        **_found(trainer, plan),
    }
    _none("not divided as planned", actual.pop("misplaced"))
    _none("not updated by the optimizer", actual.pop("not_updated"))
    for what, planned in _planned(plan).items():
        _same(what, planned, actual[what])
    return actual


def _planned(plan: Plan) -> dict[str, Any]:
    """Return the planned configuration."""
    layout = plan.layout
    planned = {
        "num_processes": layout.num_processes,
        "device": plan.device.kind,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "sync_each_batch": layout.sync_each_batch,
        "engine": layout.strategy,
        "mesh": planned_mesh(layout),
        "trained_dtype": "float32",
        "compute_dtype": plan.dtype,
        "reduce_dtype": plan.reduce_dtype,
    }
    if layout.strategy == "fsdp2" and layout.tp_size == 1:
        planned["reshard_after_forward"] = layout.reshard_after_forward
    if layout.strategy.startswith("zero"):
        planned |= deepspeed.planned(plan)
    return planned


def planned_mesh(layout: Layout) -> dict[str, int]:
    """The sizes of a layout by Accelerate's names, those of one device left out."""
    sizes = {
        "dp_replicate": layout.dp_replicate_size,
        "dp_shard": layout.dp_shard_size,
        "cp": layout.cp_size,
        "sp": layout.sp_size,
        "tp": layout.tp_size,
    }
    return {name: size for name, size in sizes.items() if size > 1}


def _verify_processes(trainer: "Trainer", plan: Plan) -> None:
    """See that all who count the processes agree: otherwise each may train by itself, on the same rows."""
    import torch

    is_group = torch.distributed.is_initialized()
    _same("processes of the group", plan.layout.num_processes, torch.distributed.get_world_size() if is_group else 1)
    _same("processes by WORLD_SIZE", plan.layout.num_processes, int(os.environ.get("WORLD_SIZE", "1")))
    _same("processes of the trainer", plan.layout.num_processes, trainer.args.world_size)


def _found(trainer: "Trainer", plan: Plan) -> dict[str, Any]:
    """Return the running configuration, whatever was planned, by the names of the `engine` event.

    Besides these, `misplaced` and `not_updated` name parameters that are not where they should be, or are trained by
    nobody.
    """
    if trainer.is_deepspeed_enabled:
        return deepspeed.found(trainer, plan)
    actual = {"trained_dtype": _trained_dtype(trainer), "not_updated": _not_updated(trainer)}
    if trainer.accelerator.is_fsdp2:
        return actual | fsdp2.found(trainer, plan)
    if trainer.is_distributed_loading_by_transformers:
        return actual | _divided_at_load(trainer)
    return actual | _whole(trainer)


def _whole(trainer: "Trainer") -> dict[str, Any]:
    """Return the configuration where each process holds all: alone, or in DDP, which sums gradients in their own dtype.

    A process that was started as the only one of a group is alone, though Accelerate wraps its model too.
    """
    from torch.nn.parallel import DistributedDataParallel

    wrapped = trainer.model_wrapped
    is_ddp = isinstance(wrapped, DistributedDataParallel) and wrapped.process_group.size() > 1
    return {
        "engine": "ddp" if is_ddp else "single",
        "mesh": {"dp_replicate": wrapped.process_group.size()} if is_ddp else {},
        "compute_dtype": _autocast_dtype(trainer),
        "reduce_dtype": _trained_dtype(trainer),
        "local_share": 1.0,
        "misplaced": [],
    }


def _divided_at_load(trainer: "Trainer") -> dict[str, Any]:
    """Return the configuration where transformers divided the model. Gradients have the dtype of the trained
    parameters.
    """
    from torch.distributed.tensor import DTensor

    parameters = dict(trainer.model.named_parameters())
    meshes = [parameter.device_mesh for parameter in parameters.values() if isinstance(parameter, DTensor)]
    mesh = max(meshes, key=lambda mesh: mesh.size())
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    matrices = {name: parameter for name, parameter in parameters.items() if parameter.dim() > 1}
    num_bytes, total = fsdp2.held_bytes(trainer.model)
    return {
        "engine": "fsdp2",
        "mesh": {NAMES[name]: size for name, size in sizes.items() if size > 1},
        "compute_dtype": _autocast_dtype(trainer),
        "reduce_dtype": _trained_dtype(trainer),
        "local_share": round(num_bytes / total, 4),
        "misplaced": [
            name
            for name, matrix in matrices.items()
            if not isinstance(matrix, DTensor) or matrix.device_mesh.size() != mesh.size()
        ],
    }


def _autocast_dtype(trainer: "Trainer") -> str:
    """Type of the products, where Accelerate casts by a forward method of its own; it does where the device can."""
    casts = trainer.accelerator.native_amp and "_original_forward" in vars(trainer.model)
    return COMPUTE[trainer.accelerator.mixed_precision] if casts else "float32"


def _trained_dtype(trainer: "Trainer") -> str:
    kinds = {str(parameter.dtype) for parameter in trainer.model.parameters() if parameter.requires_grad}
    return ", ".join(sorted(kind.removeprefix("torch.") for kind in kinds))


def _not_updated(trainer: "Trainer") -> list[str]:
    """Trained parameters that the optimizer does not have: another tensor took their place in it, or in the model."""
    groups = trainer.optimizer.param_groups
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    parameters = trainer.model.named_parameters()
    return [name for name, parameter in parameters if parameter.requires_grad and id(parameter) not in updated]


def _none(what: str, names: Sequence[str]) -> None:
    if names:
        raise RunError(
            f"{what}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}",
            hint="this is a fault of the set-up: `tunekit doctor`",
        )


def _same(what: str, planned: object, found: object) -> None:
    if planned != found:
        raise RunError(
            f"{what}: {planned} planned, {found} found", hint="this is a fault of the set-up: `tunekit doctor`"
        )


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


def held_bytes(model: "Module", optimizer: "Optimizer | None", *, full: bool) -> dict[Part, int]:
    """Bytes that are held by part: those of weights, and of adapters, gradients and optimizer states where there are.

    Args:
        model: The model with its adapter.
        optimizer: Its optimizer, None before there is one.
        full: Whether the weights themselves are trained, so that what is trained is no adapter.
    """
    parameters = list(model.parameters())
    adapters = [] if full else [parameter for parameter in parameters if parameter.requires_grad]
    weights = parameters if full else [parameter for parameter in parameters if not parameter.requires_grad]
    parts: dict[Part, int] = {
        "weights": _sum_bytes(tensor for parameter in weights for tensor in _stored(parameter)),
        "adapters": _sum_bytes(adapters),
        "gradients": _sum_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": 0 if optimizer is None else _sum_bytes(_states(optimizer)),
    }
    return {part: size for part, size in parts.items() if size}


def zero_held_bytes(trainer: "Trainer", plan: Plan) -> dict[Part, int]:
    """The same where DeepSpeed divides the model: bytes of what this process has of it."""
    sizes = {part: _sum_bytes(tensors) for part, tensors in deepspeed.held(trainer, plan).items()}
    return {part: size for part, size in sizes.items() if size}


def _stored(parameter: "Parameter") -> "Iterator[Tensor]":
    """A parameter, and what bitsandbytes keeps besides one that it quantised to 4 bits."""
    from bitsandbytes.nn import Params4bit

    yield parameter
    if not isinstance(parameter, Params4bit) or parameter.quant_state is None:
        return
    state = parameter.quant_state
    yield from (state.absmax, state.code)
    if state.nested:
        yield from (state.offset, state.state2.absmax, state.state2.code)


def _states(optimizer: "Optimizer") -> "Iterator[Tensor]":
    from torch import is_tensor

    for states in optimizer.state.values():
        yield from (value for value in states.values() if is_tensor(value))


def _sum_bytes(tensors: "Iterable[Tensor]") -> int:
    """Bytes of tensors in this process, what is shared counted once. Of a divided one it has a part."""
    from torch.distributed.tensor import DTensor

    local_tensors = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in local_tensors}.values())


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
        return {
            "peak_memory_bytes": reserved,
            "peak_allocated_bytes": allocated,
            "peak_reserved_bytes": reserved,
        }
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_memory_bytes": resident, "peak_allocated_bytes": None, "peak_reserved_bytes": None}


def highest(ranks: Sequence[Peaks]) -> Peaks:
    """The peaks of the process that used most, of several."""
    most = max(ranks, key=lambda rank: rank["peak_memory_bytes"])
    return {
        "peak_memory_bytes": most["peak_memory_bytes"],
        "peak_allocated_bytes": most["peak_allocated_bytes"],
        "peak_reserved_bytes": most["peak_reserved_bytes"],
    }


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
    if plan.device.kind == "cpu":
        resident = resident_bytes()
        context = resident if context_bytes is None else context_bytes
        taken_bytes = max(0, resident - context)
        return Shortage(
            planned=plan.memory, held=held, context_bytes=context, taken_bytes=taken_bytes, asked_bytes=asked_bytes
        )
    import torch

    free, _ = torch.cuda.mem_get_info()
    return Shortage(
        planned=plan.memory,
        held=held,
        context_bytes=None,
        taken_bytes=torch.cuda.memory_reserved(),
        free_bytes=free,
        asked_bytes=asked_bytes,
        allocated_bytes=torch.cuda.memory_allocated(),
    )
