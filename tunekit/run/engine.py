"""From a layout to what Accelerate and the trainer are told, without a configuration file of Accelerate's.

`join` comes first in every process: it makes the process group. `trainer_args` are the arguments of TRL's config that
choose the engine.
"""

from datetime import timedelta
from typing import Any

from tunekit.planner.plan import Plan
from tunekit.run.place import Place


def join(plan: Plan, place: Place) -> None:
    """Make the process group of a run, before anything of Accelerate's is made."""
    if plan.layout.num_processes == 1 and not plan.layout.strategy.startswith("zero"):
        return
    import torch

    if plan.device.kind == "cuda":
        torch.cuda.set_device(place.local_rank)
    # Ray makes the group itself.
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend_of(plan), timeout=timedelta(seconds=plan.timeout_seconds))
    if plan.device.kind == "cpu" and plan.layout.strategy == "fsdp2":
        _let_accelerate_shard_on_a_cpu()


def backend_of(plan: Plan) -> str:
    """What carries the exchanges of a run, by torch's names."""
    return "cpu:gloo,cuda:nccl" if plan.device.kind == "cuda" else "gloo"


def leave() -> None:
    """End the process group."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _let_accelerate_shard_on_a_cpu() -> None:
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
    """Arguments of TRL's config that choose the engine of a layout."""
    layout = plan.layout
    if layout.strategy == "single":
        return {}
    if layout.strategy == "ddp":
        return {"ddp_find_unused_parameters": False, "ddp_timeout": plan.timeout_seconds}
    if layout.strategy == "fsdp2":
        return _fsdp2(plan)
    return _deepspeed(plan)


def _fsdp2(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    args: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": layout.reshard_after_forward,
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        "ddp_timeout": plan.timeout_seconds,
    }
    if plan.device.kind == "cpu":
        args["accelerator_config"] = {"use_configured_state": True}
    if layout.dp_replicate_size > 1:
        from accelerate.parallelism_config import ParallelismConfig

        sizes = {"dp_replicate_size": layout.dp_replicate_size, "dp_shard_size": layout.dp_shard_size}
        args["parallelism_config"] = ParallelismConfig(**sizes)
    return args


def _deepspeed(plan: Plan) -> dict[str, Any]:
    config = {
        "zero_optimization": {"stage": int(plan.layout.strategy[-1])},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    return {"deepspeed": config, "ddp_timeout": plan.timeout_seconds}
