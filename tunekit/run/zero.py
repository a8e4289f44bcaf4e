"""DeepSpeed's ZeRO: what the trainer is told, what is found in it, and its weights as a whole."""

from typing import TYPE_CHECKING, Any

from tunekit.planner.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer


def trainer_args(plan: Plan) -> dict[str, Any]:
    """Arguments of TRL's config that choose DeepSpeed."""
    config = {
        "zero_optimization": {"stage": int(plan.layout.strategy[-1])},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    return {"deepspeed": config, "ddp_timeout": plan.timeout_seconds}


def found(trainer: "Trainer", plan: Plan) -> dict[str, Any]:
    """What runs, by the names of the `engine` event."""
    return {"engine": plan.layout.strategy}


def full_state(trainer: "Trainer", plan: Plan) -> "dict[str, Tensor]":
    """The trained weights, whole and on the CPU of the main process; nothing elsewhere. Called by all together."""
    return {name: tensor.cpu() for name, tensor in trainer.model.state_dict().items()}
