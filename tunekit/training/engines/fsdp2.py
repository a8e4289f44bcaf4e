"""FSDP2 through Accelerate: what the trainer is told, what is found in it, and its weights as a whole.

Every decoder layer is a unit whose parameters are `DTensor`s: each process keeps a part of each, and all of a unit are
there only while it is computed. Accelerate makes the units when training begins (`fsdp2_prepare_model`), from a model
that the main process alone has read; the others have its shapes. So nothing may be computed with a model before that.
"""

import math
from collections.abc import Callable, Collection
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType, TorchContextParallelConfig
from accelerate.utils.fsdp_utils import _get_model_state_dict
from peft.utils import ModulesToSaveWrapper
from torch import Tensor
from torch.distributed import broadcast
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Module, ModuleList, Parameter
from torch.nn.modules.batchnorm import _NormBase
from transformers import PreTrainedModel, Trainer
from transformers.integrations.fsdp import get_fsdp_ckpt_kwargs
from transformers.modeling_layers import GradientCheckpointingLayer

from tunekit.estimates.layout import Layout
from tunekit.models.towers import towers
from tunekit.planner.plan import Plan
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.training.engines import expert_parallel

if TYPE_CHECKING:
    from tunekit.methods.run_trainer import RunTrainer


def let_accelerate_shard_on_a_cpu() -> None:
    """Tell Accelerate that these processes have accelerators, since it knows FSDP2 only there.

    With `DistributedType.MULTI_CPU` it would silently run DDP (accelerate 1.15, `AcceleratorState.__init__`). The
    trainer keeps this state by `use_configured_state`; what runs is checked once the model is wrapped.
    """
    state = PartialState(cpu=True)
    assert state.distributed_type == DistributedType.MULTI_CPU, state.distributed_type
    state.distributed_type = DistributedType.MULTI_GPU


def trainer_args(plan: Plan) -> dict[str, Any]:
    """Arguments of TRL's config that choose FSDP2."""
    layout = plan.layout
    return {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": layout.reshard_after_forward,
            "cpu_offload": layout.offload_param_device == "cpu",
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        **accelerator_args(plan),
        **_mesh(plan),
    }


def accelerator_args(plan: Plan) -> dict[str, Any]:
    """Arguments of TRL's config for exchanges of a divided model."""
    accelerator: dict[str, Any] = {"gradient_accumulation_kwargs": {"sync_each_batch": plan.layout.sync_each_batch}}
    if plan.device.kind == "cpu":
        accelerator["use_configured_state"] = True
    return {"accelerator_config": accelerator, "ddp_timeout": plan.exchange_timeout_seconds}


def _mesh(plan: Plan) -> dict[str, Any]:
    """The sizes of a mesh of more than one dimension."""
    layout = plan.layout
    if layout.dp_replicate_size == layout.cp_size == 1:
        return {}
    sizes = {"dp_replicate_size": layout.dp_replicate_size, "dp_shard_size": layout.dp_shard_size}
    if layout.cp_size == 1:
        return {"parallelism_config": ParallelismConfig(**sizes)}
    handler = TorchContextParallelConfig(cp_comm_strategy="allgather")
    config = ParallelismConfig(**sizes, cp_size=layout.cp_size, cp_backend="torch", cp_handler=handler)
    # Each device has two parts of a sequence, one of its begin and one of its end, so that all have as much to do.
    return {"parallelism_config": config, "pad_to_multiple_of": 2 * layout.cp_size}


def keep_losses_in_float32(trainer: Trainer, plan: Plan) -> None:
    """Give FSDP2 the types of the plan. Accelerate's own policy casts what the model returns too: the losses."""
    if plan.autocast:
        policy = MixedPrecisionPolicy(getattr(torch, plan.dtype), getattr(torch, plan.reduce_dtype))
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy


def name_layers(trainer: Trainer, *, reads_media: bool) -> None:
    """Tell Accelerate which layers to divide.

    Layers of towers are no units where rows have media: a unit is gathered by all processes together, and a
    micro-batch without any does not come to them. They are gathered with the whole model's own unit.

    Its own choice, `_no_split_modules`, is empty for some types (BigBird, BioGPT), has names of no module of the model
    for others (SigLIP's text encoder with Gemma 3), which Accelerate refuses (1.15, `fsdp2_prepare_auto_wrap_policy`),
    or embeddings that the head shares (BERT), which cannot be in two units.
    """
    model = trainer.model
    base = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    names = towers(base) if reads_media else []
    of_towers = {module for name in names for module in base.get_submodule(name).modules()}
    layers = layer_types([module for module in model.modules() if module not in of_towers])
    trainer.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(layers)


def layer_types(modules: Collection[Module]) -> set[str]:
    """Return the names of the classes of layers: of those that can be recomputed, or of the largest list of modules."""
    layers = {_class_name(module) for module in modules if isinstance(module, GradientCheckpointingLayer)}
    if layers:
        return layers
    lists = [module for module in modules if isinstance(module, ModuleList)]
    largest = max(lists, key=lambda modules: sum(parameter.numel() for parameter in modules.parameters()))
    return {_class_name(layer) for layer in largest}


def _class_name(module: Module) -> str:
    """The name of a module's class, which FSDP2 puts its own before."""
    return type(module).__name__.removeprefix("FSDP")


def set_buffers_aside(trainer: "RunTrainer") -> None:
    """Keep buffers that checkpoints hold out of what Accelerate divides, with the same values in all processes.

    Experts' score corrections (DeepSeek-V3, GLM-4.5) and Gemma 4's scales are such. Accelerate takes all of a state for
    divided parameters, and fails (1.15, `fsdp2_load_full_state_dict`); buffers that no checkpoint holds it keeps. The
    state has no versions there, and without one batch norms (Emu3's) would add a buffer to it.
    """
    for norm in _batch_norms(trainer.model):
        vars(norm)["_load_from_state_dict"] = MethodType(Module._load_from_state_dict, norm)
    stored = trainer.model.state_dict().keys()
    trainer.stored_buffers = [name for name, _ in trainer.model.named_buffers() if name in stored]
    for name in trainer.stored_buffers:
        buffer = trainer.model.get_buffer(name)
        # Only the processes that have read the weights have a value.
        value = torch.empty_like(buffer, device="cpu") if buffer.is_meta else buffer
        broadcast(value, src=0)
        _register(trainer.model, name, value, persistent=False)


def return_buffers(trainer: "RunTrainer") -> None:
    """Have checkpoints hold the buffers again that were set aside, once the model is wrapped."""
    for name in trainer.stored_buffers:
        _register(trainer.model, name, trainer.model.get_buffer(name), persistent=True)
    for norm in _batch_norms(trainer.model):
        vars(norm).pop("_load_from_state_dict", None)


def load_with_buffers(
    trainer: "RunTrainer", load: Callable[..., Any], folder: str, model: Module | None = None
) -> None:
    """Load weights into the wrapped model, with the buffers among them: VeRA's adapter is not whole without them."""
    return_buffers(trainer)
    load(folder, model)


def _batch_norms(model: Module) -> list[Module]:
    return [module for module in model.modules() if isinstance(module, _NormBase)]


def _register(model: Module, name: str, value: Tensor, *, persistent: bool) -> None:
    parent, _, own = name.rpartition(".")
    model.get_submodule(parent).register_buffer(own, value, persistent=persistent)


def untie_head(trainer: Trainer) -> None:
    """Give a head the frozen table of its own that it has where PEFT trains a copy of the embedding that it shares.

    PEFT leaves the head tied to the original, in training on one device and wherever the adapter is loaded. Accelerate
    ties weights once more when it divides a model, by names, and by its name the embedding is the copy then: the head
    would be trained with it, and saved as if it were not (accelerate 1.15, `fsdp2_prepare_model`; transformers 5.23,
    `PreTrainedModel.tie_weights`). A table in two units, which the original would be, is refused by torch.
    """
    model = trainer.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, ModulesToSaveWrapper) or head is None:
        return
    if isinstance(head, ModulesToSaveWrapper) or head.weight is not embedding.original_module.weight:
        return
    # Only the process that has read the weights has something to copy; the others are given theirs.
    is_reader = trainer.accelerator.is_local_main_process
    weight = head.weight.detach()
    own = weight.clone() if is_reader else torch.empty_like(weight)
    head.weight = torch.nn.Parameter(own, requires_grad=False)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config.tie_word_embeddings = False


def hide_shared_head(trainer: Trainer) -> None:
    """Keep a head in the unit of the whole model where its bias is a parameter of another module too (BERT).

    Accelerate makes units of the embedding and of the head that the model names (1.15, `fsdp2_prepare_model`), and
    torch takes no parameter that is in two units. The embedding, whose table the head may share, stays with it.
    """
    model = trainer.model
    bias = None if (head := model.get_output_embeddings()) is None else head.bias
    owners = [module for module in model.modules() if any(own is bias for own in module.parameters(recurse=False))]
    if len(owners) > 1:
        vars(model).update(dict.fromkeys(_NAMED, lambda: None))


def show_shared_head(trainer: Trainer) -> None:
    """Have a model name its embedding and head again, once it is wrapped."""
    for name in _NAMED & vars(trainer.model).keys():
        del vars(trainer.model)[name]


_NAMED = {"get_input_embeddings", "get_output_embeddings"}


def gather_head(trainer: Trainer) -> None:
    """See that a trained head is whole when TRL takes its weight, where nothing else gathers it. Once it is wrapped.

    TRL's loss does not call the head: it takes its weight, and gathers that by itself if it is divided. Then no
    gradients are summed over the devices, and each trains its part of the head on its own rows, without a word (trl
    1.16, `add_fused_lm_head`: the gradient of `full_tensor` is taken to be the same everywhere). Where Accelerate
    finds the final norm, it gathers both together before the norm; below an adapter it does not find it.
    """
    model = trainer.model
    head = model.get_output_embeddings()
    is_alone = isinstance(head, FSDPModule) and len(head._get_fsdp_state()._modules) == 1
    if not is_alone or not any(parameter.requires_grad for parameter in head.parameters()):
        return
    language_model = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    language_model.base_model.register_forward_hook(lambda *_: head.unshard() and None)


def full_state(trainer: Trainer, plan: Plan) -> dict[str, Tensor]:
    """The trained weights, whole and on the CPU of the main process; nothing elsewhere. Called by all together.

    They are put together one by one: no device ever holds the whole model.
    """
    full = isinstance(plan.recipe.adapter, FullAdapter)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=not full)
    state = cast("dict[str, Tensor]", get_model_state_dict(trainer.model, options=options))
    if state and full:
        # What was one tensor came apart.
        state |= {copy: state[name] for copy, name in trainer.model.all_tied_weights_keys.items()}
    return state


def states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return each process's state of weights and optimizer, by the folder that Accelerate loads it from."""
    options = StateDictOptions()
    # As `load_fsdp_model` asks for them: of a model with an adapter, the adapter's alone.
    weights = _get_model_state_dict(trainer.model, sd_options=options, **get_fsdp_ckpt_kwargs())
    optimizer: dict[str, Any] = dict(get_optimizer_state_dict(trainer.model, trainer.optimizer, options=options))
    if trainer.is_distributed_loading_by_transformers:
        groups = expert_parallel.joined_groups(optimizer["param_groups"], trainer.optimizer, trainer.model)
        stored = expert_parallel.in_order((weights, {**optimizer, "param_groups": groups}))
        weights, optimizer = expert_parallel.can_be_copied(stored)
    return {"pytorch_model_fsdp_0": {"model": weights}, "optimizer_0": {"optimizer": optimizer}}


def schedule(trainer: Trainer) -> dict[str, Any]:
    """Return the state of the scheduler, as all layouts have it."""
    state: dict[str, Any] = trainer.lr_scheduler.state_dict()
    if trainer.is_distributed_loading_by_transformers:
        return expert_parallel.joined_schedule(state, trainer.optimizer)
    return state


def write_states(states: dict[str, Any], folder: Path, group: Any) -> None:
    """Write what each process has to a folder. Called by all together; what fails in one is raised in all."""
    save(states, storage_writer=FileSystemWriter(folder), process_group=group)


def found(trainer: Trainer, plan: Plan) -> dict[str, Any]:
    """Return the running configuration, by the names of the `engine` event, and parameters that are not sharded as
    planned.
    """
    model = trainer.model_wrapped
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    policies = {unit._get_fsdp_state()._mp_policy for unit in units}
    # Without another type, weights are gathered and gradients reduced as they are trained.
    (own,) = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    return {
        "engine": "fsdp2",
        "mesh": _found_mesh(trainer),
        "compute_dtype": [policy.param_dtype or own for policy in policies],
        "reduce_dtype": [policy.reduce_dtype or policy.param_dtype or own for policy in policies],
        "reshard_after_forward": _reshards(model),
        "local_share": local_share(model),
        "misplaced": [name for name, parameter in model.named_parameters() if not _is_divided(parameter, plan.layout)],
    }


def _is_divided(parameter: Parameter, layout: Layout) -> bool:
    """Return whether a parameter is sharded as planned, and this process holds its shard and no more."""
    if not isinstance(parameter, DTensor):
        return False
    sizes = (layout.dp_replicate_size, layout.num_shards) if layout.dp_replicate_size > 1 else (layout.num_shards,)
    places = (Replicate(), Shard(0))[-len(sizes) :]
    rows, *trailing = parameter.shape or (1,)
    part = math.ceil(rows / layout.num_shards) * math.prod(trailing)
    is_placed = tuple(parameter.device_mesh.shape) == sizes and tuple(parameter.placements) == places
    return is_placed and parameter.to_local().numel() <= part


def local_share(model: Module) -> float:
    """Return the share of the parameters' bytes that this process holds."""
    num_bytes = total = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        num_bytes, total = num_bytes + local.nbytes, total + parameter.numel() * parameter.itemsize
    return round(num_bytes / total, 4)


def _found_mesh(trainer: Trainer) -> dict[str, int]:
    """Accelerate's mesh; it makes none of a single dimension."""
    mesh = trainer.accelerator.torch_device_mesh
    if mesh is None:
        return {"dp_shard": trainer.accelerator.num_processes}
    return {name: size for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True) if size > 1}


def _reshards(model: Module) -> bool:
    """Return whether decoder layers reshard their weights after the forward pass."""
    names = layer_types([*model.modules()])
    groups = (
        module._get_fsdp_state()._fsdp_param_group
        for module in model.modules()
        if isinstance(module, FSDPModule) and _class_name(module) in names
    )
    (reshards,) = {group._reshard_after_forward for group in groups if group is not None}
    return reshards
