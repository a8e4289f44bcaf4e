"""A look at what was built, in every process, before the first step: is it what was planned?

Several set-ups of these libraries run something else than what they were asked for and say nothing. So nothing is
believed that can be looked at: the number of processes, the engine, the placement of real parameters, their types, and
whether the optimizer has them.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunekit.errors import RunError
from tunekit.planner.layout import Layout
from tunekit.planner.plan import Plan
from tunekit.training.engines import deepspeed, fsdp2

if TYPE_CHECKING:
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
