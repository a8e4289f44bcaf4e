"""FSDP2 through Accelerate: what the trainer is told, what is found in it, and its weights as a whole.

Every decoder layer is a unit whose parameters are `DTensor`s: each process keeps a part of each, and all of a unit are
there only while it is computed. Accelerate makes the units when training begins (`fsdp2_prepare_model`), from a model
that the main process alone has read; the others have its shapes. So nothing may be computed with a model before that.
"""

from typing import TYPE_CHECKING, Any

from tunekit.planner.plan import Plan
from tunekit.recipe.schema import FullAdapter

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer


def let_accelerate_shard_on_a_cpu() -> None:
    """Tell Accelerate that these processes have accelerators, since it knows FSDP2 only there.

    With `DistributedType.MULTI_CPU` it would silently run DDP (accelerate 1.15, `AcceleratorState.__init__`). The
    trainer keeps this state by `use_configured_state`; what runs is checked once the model is wrapped.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True)
    assert state.distributed_type == DistributedType.MULTI_CPU, state.distributed_type
    state.distributed_type = DistributedType.MULTI_GPU


def trainer_args(plan: Plan) -> dict[str, Any]:
    """Arguments of TRL's config that choose FSDP2."""
    layout = plan.layout
    accelerator: dict[str, Any] = {"gradient_accumulation_kwargs": {"sync_each_batch": layout.sync_each_batch}}
    if plan.device.kind == "cpu":
        accelerator["use_configured_state"] = True
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
        "accelerator_config": accelerator,
        "ddp_timeout": plan.timeout_seconds,
        **_mesh(plan),
    }


def _mesh(plan: Plan) -> dict[str, Any]:
    """The sizes of a mesh of more than one dimension."""
    layout = plan.layout
    if layout.dp_replicate_size == layout.cp_size == 1:
        return {}
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import TorchContextParallelConfig

    sizes = {"dp_replicate_size": layout.dp_replicate_size, "dp_shard_size": layout.dp_shard_size}
    if layout.cp_size == 1:
        return {"parallelism_config": ParallelismConfig(**sizes)}
    ring = TorchContextParallelConfig(cp_comm_strategy="alltoall")
    config = ParallelismConfig(**sizes, cp_size=layout.cp_size, cp_backend="torch", cp_handler=ring)
    # Each device has two parts of a sequence, one of its begin and one of its end, so that all have as much to do.
    return {"parallelism_config": config, "pad_to_multiple_of": 2 * layout.cp_size}


def full_state(trainer: "Trainer", plan: Plan) -> "dict[str, Tensor]":
    """The trained weights, whole and on the CPU of the main process; nothing elsewhere. Called by all together.

    They are put together one by one: no device ever holds the whole model.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(
        full_state_dict=True,
        cpu_offload=True,
        ignore_frozen_params=not isinstance(plan.recipe.adapter, FullAdapter),
    )
    state: dict[str, Tensor] = get_model_state_dict(trainer.model, options=options)
    return state
