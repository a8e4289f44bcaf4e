"""From a layout to what Accelerate and the trainer are told, without a configuration file of Accelerate's.

`join` comes first in every process: it makes the process group. `trainer_args` are the arguments of TRL's config that
choose the engine. What has weights in parts is in `fsdp2` and `zero`.
"""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tunekit.planner.plan import Plan
from tunekit.process.network import name_interface_to_main
from tunekit.runs.small_files import Place
from tunekit.training.engines import ddp, deepspeed, fsdp2, tensor_parallel

if TYPE_CHECKING:
    from transformers import Trainer


def join(plan: Plan, place: Place) -> None:
    """Make the process group of a run, before anything of Accelerate's is made."""
    if plan.layout.num_processes == 1 and not plan.layout.strategy.startswith("zero"):
        return
    if plan.num_nodes > 1:
        name_interface_to_main()
    import torch

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
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def trainer_args(plan: Plan) -> dict[str, Any]:
    """Arguments of TRL's config that choose the engine of a layout."""
    layout = plan.layout
    if layout.strategy == "single":
        return {}
    if layout.strategy == "ddp":
        unused = plan.ddp_find_unused_parameters
        return {"ddp_find_unused_parameters": unused, "ddp_timeout": plan.exchange_timeout_seconds}
    if layout.tp_size > 1:
        return tensor_parallel.trainer_args(plan)
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


def before_wrapping(trainer: "Trainer", plan: Plan) -> None:
    """Prepare an engine before it wraps the model, in every process."""
    if plan.layout.why_not_resumed is not None:
        _save_no_checkpoints(trainer)
    if plan.layout.strategy.startswith("zero"):
        deepspeed.open_states_as_data(trainer)
        deepspeed.cast_trained(trainer, plan)
    if plan.layout.sp_size > 1:
        deepspeed.divide_every_epoch(trainer)
    if plan.layout.strategy == "fsdp2" and plan.layout.tp_size == 1:
        fsdp2.keep_losses_in_float32(trainer, plan)
        fsdp2.name_layers(trainer)
        fsdp2.untie_head(trainer)


def _save_no_checkpoints(trainer: "Trainer") -> None:
    """Leave out checkpoints that nothing could go on from."""
    from transformers.trainer_utils import SaveStrategy

    trainer.args.save_strategy = SaveStrategy.NO


def after_wrapping(trainer: "Trainer", plan: Plan) -> None:
    """Prepare an engine after it has wrapped the model, in every process, before the first step."""
    if plan.layout.strategy == "fsdp2" and plan.layout.tp_size == 1:
        fsdp2.gather_head(trainer)


def between_checks(trainer: "Trainer", plan: Plan) -> None:
    """Reset an engine between passes of different kinds, in every process."""
    if plan.layout.strategy == "zero3":
        deepspeed.forget_order(trainer)


def before_steps(trainer: "Trainer", plan: Plan, *, goes_on: bool) -> None:
    """Reset an engine after passes that are not those of training, in every process.

    Args:
        trainer: The trainer.
        plan: The plan.
        goes_on: Whether the run goes on from a checkpoint.
    """
    if plan.layout.strategy == "ddp" and plan.layout.num_processes > 2 and goes_on:
        ddp.settle_buckets(trainer)
    between_checks(trainer, plan)
