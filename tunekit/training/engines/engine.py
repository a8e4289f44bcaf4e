"""Engines: from a layout to what Accelerate and the trainer are told, and whether that is what runs.

`join` comes first in every process: it makes the process group. `trainer_args` are the arguments of TRL's config that
choose the engine, without a configuration file of Accelerate's. What divides weights is in `fsdp2` and `deepspeed`.

Several set-ups of these libraries run something else than what they were asked for and say nothing. So before the first
step `verify` believes nothing that can be looked at: the number of processes, the engine, the placement of real
parameters, their types, and whether the optimizer has them.

Tensor and expert parallel go through transformers: layers or experts are divided when the model is loaded, and FSDP2
with them. The trainer leaves such a model to itself (`is_distributed_loading_by_transformers`), and cannot resume it
(transformers 5.24). Tensor parallel has no checkpoints, and its devices see the same rows; those of expert parallel
have the form of all FSDP2 layouts (`expert_parallel`), and each device sees other rows.

The result is one model or adapter as Hugging Face has it, written by the main process from every engine.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft.tuners.vera.layer import VeraLayer
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import SaveStrategy

from tunekit.errors import RunError
from tunekit.estimates.layout import Layout
from tunekit.models.base_parts import save_plain
from tunekit.planner.plan import Plan
from tunekit.process.processes import name_interface_to_main
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter
from tunekit.runs.small_files import Place
from tunekit.training.engines import deepspeed, expert_parallel, fsdp2

if TYPE_CHECKING:
    from torch.nn import Module

    from tunekit.methods.run_trainer import RunTrainer


def join(plan: Plan, place: Place) -> None:
    """Make the process group of a run, before anything of Accelerate's is made."""
    if plan.layout.num_processes == 1 and not plan.layout.strategy.startswith("zero"):
        return
    if plan.num_nodes > 1:
        name_interface_to_main()
    if plan.device.kind == "cuda":
        torch.cuda.set_device(place.local_rank)
    # Ray makes the group itself.
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend_of(plan), timeout=timedelta(seconds=plan.exchange_timeout_seconds))
    if plan.device.kind == "cpu" and plan.layout.strategy == "fsdp2":
        fsdp2.let_accelerate_shard_on_a_cpu()
    if plan.layout.strategy.startswith("zero"):
        deepspeed.join(plan)


def backend_of(plan: Plan) -> str:
    """Return the communication backend of a run, by torch's names."""
    return "cpu:gloo,cuda:nccl" if plan.device.kind == "cuda" else "gloo"


def leave() -> None:
    """End the process group."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def trainer_args(plan: Plan) -> dict[str, Any]:
    """Arguments of TRL's config that choose the engine of a layout."""
    layout = plan.layout
    if layout.strategy == "single":
        return {}
    if layout.strategy == "ddp":
        return {"ddp_find_unused_parameters": False, "ddp_timeout": plan.exchange_timeout_seconds}
    if layout.is_divided_at_load:
        # Without it the trainer refuses to be built (transformers 5.24).
        return {**fsdp2.accelerator_args(plan), "save_only_model": True}
    if layout.strategy == "fsdp2":
        return fsdp2.trainer_args(plan)
    return deepspeed.trainer_args(plan)


def loading(plan: Plan) -> AbstractContextManager[None]:
    """While a model is loaded and its adapter attached."""
    return deepspeed.loading(plan) if plan.layout.strategy.startswith("zero") else nullcontext()


def weights_device(plan: Plan, place: Place) -> str | None:
    """Return the device that a process loads the model to; None where DeepSpeed decides.

    With FSDP2 one process of a node reads it, and the others get their parts.
    """
    if plan.layout.strategy == "fsdp2":
        return "cpu" if place.local_rank == 0 else "meta"
    if plan.layout.strategy == "zero3":
        return None
    return plan.device.kind


def after_loading(model: "Module", plan: Plan) -> None:
    """Prepare a model that was loaded and adapted, before it is given kernels. Called by all processes together."""
    if plan.layout.strategy == "fsdp2" and isinstance(plan.recipe.adapter, QloraAdapter):
        from tunekit.models.sharded_4bit import make_shardable

        make_shardable(model)
    if plan.layout.ep_size > 1 and isinstance(plan.recipe.adapter, LoraAdapter):
        compute, reduce = (getattr(torch, name) for name in (plan.dtype, plan.reduce_dtype))
        expert_parallel.divide_adapter(model, MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce))


def before_wrapping(trainer: "RunTrainer", plan: Plan) -> None:
    """Prepare an engine before it wraps the model, in every process."""
    if plan.layout.why_not_resumed is not None:
        # Nothing could go on from one.
        trainer.args.save_strategy = SaveStrategy.NO
    if plan.layout.is_divided_at_load and plan.layout.why_not_resumed is None:
        trainer.args.save_only_model = False
    if plan.layout.strategy.startswith("zero"):
        deepspeed.open_states_as_data(trainer)
        deepspeed.cast_trained(trainer, plan)
    if plan.layout.sp_size > 1:
        deepspeed.divide_every_epoch(trainer)
    # Where Accelerate took another engine, that is refused by name once the model is wrapped.
    if plan.layout.strategy == "fsdp2" and not plan.layout.is_divided_at_load and trainer.is_fsdp_enabled:
        fsdp2.keep_losses_in_float32(trainer, plan)
        fsdp2.name_layers(trainer, reads_media=bool(plan.data.media))
        fsdp2.set_buffers_aside(trainer)
        trainer.wrap("load_weights", partial(fsdp2.load_with_buffers, trainer))
        fsdp2.untie_head(trainer)
        fsdp2.hide_shared_head(trainer)
    if plan.autocast and plan.layout.strategy not in ("single", "ddp"):
        autocast_projections(trainer.model, plan)
    # A group of one process is wrapped by DDP too.
    if plan.layout.strategy in ("single", "ddp") and isinstance(plan.recipe.adapter, QloraAdapter):
        leave_stacks_alone(trainer)


def autocast_projections(model: "Module", plan: Plan) -> None:
    """Have VeRA's layers compute under autocast where the engine has none and casts parameters instead.

    Their frozen projections are float32 buffers, which neither FSDP2 nor DeepSpeed casts, and PEFT multiplies them by
    inputs in the type of the trained vectors (peft 0.21, `vera.layer.Linear.forward`).
    """
    autocast = torch.autocast(plan.device.kind, getattr(torch, plan.dtype))
    for module in model.modules():
        if isinstance(module, VeraLayer):
            vars(module)["forward"] = autocast(module.forward)


def leave_stacks_alone(trainer: Trainer) -> None:
    """Keep DDP from sending weights in few bits to the other processes: all have read them from the same files."""
    from tunekit.models.quantization import Stack

    names = [name for name, parameter in trainer.model.named_parameters() if isinstance(parameter, Stack)]
    cast(Any, DistributedDataParallel)._set_params_and_buffers_to_ignore_for_model(trainer.model, names)


def after_wrapping(trainer: "RunTrainer", plan: Plan) -> None:
    """Prepare an engine after it has wrapped the model, in every process, before the first step."""
    if plan.layout.strategy == "fsdp2" and not plan.layout.is_divided_at_load:
        fsdp2.show_shared_head(trainer)
        fsdp2.return_buffers(trainer)
        fsdp2.gather_head(trainer)
        if isinstance(plan.recipe.adapter, QloraAdapter):
            from tunekit.models.sharded_4bit import move_scales

            move_scales(trainer.model, trainer.args.device)


def between_checks(trainer: Trainer, plan: Plan) -> None:
    """Reset an engine between passes of different kinds, in every process."""
    if plan.layout.strategy == "zero3":
        deepspeed.forget_order(trainer)


def before_steps(trainer: Trainer, plan: Plan, *, goes_on: bool) -> None:
    """Reset an engine after passes that are not those of training, in every process.

    Args:
        trainer: The trainer.
        plan: The plan.
        goes_on: Whether the run goes on from a checkpoint.
    """
    if plan.layout.strategy == "ddp" and plan.layout.num_processes > 2 and goes_on:
        settle_buckets(trainer)
    between_checks(trainer, plan)


def check_gradients(trainer: Trainer, plan: Plan) -> None:
    """Check that DDP has summed the gradients of the first step, in every process before its optimizer step.

    It sums a bucket once all of its gradients are there, and a parameter that no row reached has none. What shares its
    bucket then keeps the gradients of each process's own rows, and nothing fails before the next forward pass (torch
    2.13, without `find_unused_parameters`).

    Raises:
        RunError: A parameter has no gradient.
    """
    if plan.layout.strategy != "ddp":
        return
    named = trainer.model.named_parameters()
    missing = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problem = f"the rows of the first step do not use {missing[0]}{more}, so DDP does not sum all gradients"
        raise RunError(problem, hint="use parallel.strategy=fsdp2, or exclude unused modules from the adapter")


def settle_buckets(trainer: Trainer) -> None:
    """Have gradients summed from the first step on as in a run that is under way. Called by all processes together.

    DDP puts them into buckets in the order of the parameters, and after the first backward pass anew, in the order in
    which they came (torch 2.13, `Reducer::rebuild_buckets`). In which order three numbers or more are added depends on
    where they stand in a bucket: the first step that a resumed run takes would be another one in the last bit. So a
    backward pass whose gradients are 0 goes before.
    """
    model = trainer.model_wrapped
    ids = torch.zeros(1, 2, dtype=torch.long, device=trainer.args.device)
    loss = model(input_ids=ids, use_cache=False).logits.float().sum() * 0.0
    trainer.accelerator.backward(loss)
    model.zero_grad(set_to_none=True)


def distributed_config(plan: Plan) -> DistributedConfig | None:
    """Return the plan by which a model is divided when it is loaded; None where it is not."""
    layout = plan.layout
    if not layout.is_divided_at_load:
        return None
    return DistributedConfig(
        tp_size=layout.tp_size,
        ep_size=layout.ep_size,
        fsdp_size=layout.dp_shard_size,
        fsdp_mixed_precision=plan.dtype == "bfloat16",
    )


COMPUTE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of the products by Accelerate's names of mixed precision."""


MESH = ("dp_replicate", "dp_shard", "cp", "sp", "tp", "ep")
"""Accelerate's names for the dimensions of a mesh, in their order, and that of experts; a layout has a size of each."""

NAMES = {"fsdp": "dp_shard", "tp": "tp", "ep": "ep"}
"""The same names for the dimensions of transformers' meshes: of all weights, and of experts."""


def verify(trainer: Trainer, plan: Plan) -> dict[str, Any]:
    """Compare the engine of a trainer whose model is wrapped with the plan.

    Returns:
        What runs, for the `engine` event.

    Raises:
        RunError: It is not what was planned.
    """
    args, accelerator = trainer.args, trainer.accelerator
    is_group = torch.distributed.is_initialized()
    # All who count the processes must agree: otherwise each may train by itself, on the same rows.
    counts = {
        "processes of the group": torch.distributed.get_world_size() if is_group else 1,
        "processes by WORLD_SIZE": int(os.environ.get("WORLD_SIZE", "1")),
        "processes of the trainer": args.world_size,
    }
    for what, num in counts.items():
        _same(what, plan.layout.num_processes, num)
    accumulation = accelerator.gradient_state.plugin_kwargs
    actual = {
        "num_processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "micro_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "sync_each_batch": bool(accumulation.get("sync_each_batch")),
        **_found(trainer, plan),
    }
    for what, key in (("not sharded as planned", "misplaced"), ("not updated by the optimizer", "not_updated")):
        names = actual.pop(key)
        if names:
            raise _fault(f"{what}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}")
    for what, planned in _planned(plan).items():
        _same(what, planned, actual[what])
    return actual


def _planned(plan: Plan) -> dict[str, Any]:
    """Return the planned configuration."""
    layout = plan.layout
    planned: dict[str, Any] = {
        "num_processes": layout.num_processes,
        "device": plan.device.kind,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "sync_each_batch": layout.sync_each_batch,
        "engine": layout.strategy,
        "mesh": planned_mesh(layout),
        "trained_dtype": plan.trained_dtype,
        "compute_dtype": plan.dtype,
        "reduce_dtype": plan.reduce_dtype,
    }
    if layout.strategy == "fsdp2" and not layout.is_divided_at_load:
        planned["reshard_after_forward"] = layout.reshard_after_forward
    if layout.strategy.startswith("zero"):
        planned["offload_param_device"] = layout.offload_param_device
        planned["offload_optimizer_device"] = layout.offload_optimizer_device
        planned["is_recipes_optimizer"] = True
    return planned


def planned_mesh(layout: Layout) -> dict[str, int]:
    """The sizes of a layout by Accelerate's names, those of one device left out."""
    sizes = layout.model_dump(include={f"{name}_size" for name in MESH})
    return {name: sizes[f"{name}_size"] for name in MESH if sizes[f"{name}_size"] > 1}


def _found(trainer: Trainer, plan: Plan) -> dict[str, Any]:
    """Return the running configuration, whatever was planned, by the names of the `engine` event.

    Besides these, `misplaced` and `not_updated` name parameters that are not where they should be, or that the
    optimizer does not have: another tensor took their place in it, or in the model.
    """
    named = list(trainer.model.named_parameters())
    trained_dtypes = [parameter.dtype for _, parameter in named if parameter.requires_grad]
    # Accelerate casts by a forward method of its own, where the device can.
    casts = trainer.accelerator.native_amp and "_original_forward" in vars(trainer.model)
    actual: dict[str, Any] = {
        "trained_dtype": trained_dtypes,
        "compute_dtype": [COMPUTE[trainer.accelerator.mixed_precision]] if casts else trained_dtypes,
        # As DDP sums them, and the parts of a model that was divided when it was loaded.
        "reduce_dtype": trained_dtypes,
    }
    if trainer.is_deepspeed_enabled:
        actual |= deepspeed.found(trainer, plan)
    elif trainer.accelerator.is_fsdp2:
        actual |= fsdp2.found(trainer, plan)
    elif trainer.is_distributed_loading_by_transformers:
        actual |= _divided_at_load(trainer)
    else:
        actual |= _whole(trainer)
    for what in ("trained_dtype", "compute_dtype", "reduce_dtype"):
        actual[what] = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in actual[what]}))
    in_groups = (parameter for group in trainer.optimizer.param_groups for parameter in group["params"])
    updated = set(map(id, actual.pop("updated", in_groups)))
    actual["not_updated"] = [name for name, weight in named if weight.requires_grad and id(weight) not in updated]
    return actual


def _whole(trainer: Trainer) -> dict[str, Any]:
    """Return the configuration where each process holds all: alone, or in DDP.

    A process that was started as the only one of a group is alone, though Accelerate wraps its model too.
    """
    wrapped = trainer.model_wrapped
    is_ddp = isinstance(wrapped, DistributedDataParallel) and wrapped.process_group.size() > 1
    return {
        "engine": "ddp" if is_ddp else "single",
        "mesh": {"dp_replicate": wrapped.process_group.size()} if is_ddp else {},
        "local_share": 1.0,
        "misplaced": [],
    }


def _divided_at_load(trainer: Trainer) -> dict[str, Any]:
    """Return the configuration where transformers divided the model."""
    parameters = dict(trainer.model.named_parameters())
    meshes = [parameter.device_mesh for parameter in parameters.values() if isinstance(parameter, DTensor)]
    mesh = max(meshes, key=lambda mesh: mesh.size())
    sizes: dict[str, int] = {}
    for each in meshes:
        sizes |= dict(zip(each.mesh_dim_names or (), each.shape, strict=True))

    def spans(parameter: Tensor) -> bool:
        return isinstance(parameter, DTensor) and parameter.device_mesh.size() == mesh.size()

    return {
        "engine": "fsdp2",
        "mesh": {NAMES[name]: size for name, size in sizes.items() if size > 1 and name in NAMES},
        "local_share": fsdp2.local_share(trainer.model),
        "misplaced": [name for name, parameter in parameters.items() if parameter.dim() > 1 and not spans(parameter)],
    }


def _same(what: str, planned: object, found: object) -> None:
    if planned != found:
        raise _fault(f"{what}: {planned} planned, {found} found")


def _fault(problem: str) -> RunError:
    return RunError(problem, hint="check the setup with `tunekit doctor`")


def save_model(trainer: Trainer, plan: Plan, folder: Path) -> None:
    """Write the trained model or adapter to a folder. Called by all processes together.

    Args:
        trainer: After training.
        plan: How it was spread.
        folder: Where to.
    """
    if plan.layout.is_divided_at_load and isinstance(plan.recipe.adapter, FullAdapter):
        # transformers divided it, and puts it together.
        trainer.model.save_pretrained(folder)
        return
    state = full_state(trainer, plan)
    # An adapter carries no copy of embeddings that it did not train, and none of the one that it was.
    of_adapter = {"save_embedding_layers": False, "selected_adapters": ["default"]}
    how = {} if isinstance(plan.recipe.adapter, FullAdapter) else of_adapter
    if trainer.accelerator.is_main_process:
        trainer.model.save_pretrained(folder, state_dict=state, **how)
        if isinstance(plan.recipe.adapter, LoraAdapter) and plan.recipe.adapter.moves_base:
            save_plain(trainer.model, plan.recipe.adapter, folder)
    trainer.accelerator.wait_for_everyone()


def full_state(trainer: Trainer, plan: Plan) -> dict[str, Tensor] | None:
    """The trained weights as a whole on the CPU of the main process; None where each process has them anyway.

    Called by all processes together.
    """
    if plan.layout.strategy == "fsdp2":
        return fsdp2.full_state(trainer, plan)
    if plan.layout.strategy.startswith("zero"):
        return deepspeed.full_state(trainer, plan)
    return None
