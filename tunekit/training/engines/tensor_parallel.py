"""Tensor parallel through transformers: each layer is divided when the model is loaded, and FSDP2 with it.

The trainer leaves such a model to itself (`is_distributed_loading_by_transformers`), and cannot resume it (transformers
5.23), so that there are no checkpoints. The devices that divide a layer see the same rows.
"""

from typing import TYPE_CHECKING, Any

from tunekit.planner.plan import Plan

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig


def distributed_config(plan: Plan) -> "DistributedConfig | None":
    """Return the plan by which a model is divided when it is loaded; None where no layer is."""
    layout = plan.layout
    if layout.tp_size == 1:
        return None
    from transformers.distributed import DistributedConfig

    return DistributedConfig(
        tp_size=layout.tp_size, fsdp_size=layout.dp_shard_size, fsdp_mixed_precision=plan.dtype == "bfloat16"
    )


def trainer_args(plan: Plan) -> dict[str, Any]:
    """Arguments of TRL's config for a model that was divided when it was loaded."""
    kwargs = {"sync_each_batch": plan.layout.sync_each_batch}
    accelerator: dict[str, Any] = {"gradient_accumulation_kwargs": kwargs}
    if plan.device.kind == "cpu":
        accelerator["use_configured_state"] = True
    return {"accelerator_config": accelerator, "save_only_model": True, "ddp_timeout": plan.exchange_timeout_seconds}
