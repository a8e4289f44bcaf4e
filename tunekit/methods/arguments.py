"""Arguments that every method gives its TRL config: those of transformers' trainer, from the recipe and the plan."""

from pathlib import Path
from typing import Any

from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.schema import TrainSection


def trainer_arguments(
    train: TrainSection, plan: Plan, schedule: Schedule, checkpoints: Path, *, evaluate: bool
) -> dict[str, Any]:
    """Steps, optimizer, precision, logging and saving.

    Args:
        train: The optimisation.
        plan: Precision, micro-batch and memory choices.
        schedule: Steps.
        checkpoints: Folder of the checkpoints.
        evaluate: Whether there are rows to evaluate on.
    """
    return {
        "output_dir": str(checkpoints),
        "per_device_train_batch_size": plan.micro_batch_size,
        "per_device_eval_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "max_steps": schedule.num_steps,
        "learning_rate": plan.learning_rate,
        "lr_scheduler_type": train.lr_scheduler_type,
        "warmup_steps": schedule.warmup_steps,
        "optim": train.optim,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "seed": train.seed,
        "use_cpu": plan.device.kind == "cpu",
        "bf16": plan.autocast and plan.dtype == "bfloat16",
        "fp16": plan.autocast and plan.dtype == "float16",
        "gradient_checkpointing": plan.gradient_checkpointing,
        "dataloader_num_workers": plan.dataloader_num_workers,
        "dataloader_pin_memory": plan.device.kind != "cpu",
        "logging_steps": train.logging_steps,
        # A NaN must be seen, not shown as 0.
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if evaluate else "no",
        "eval_steps": schedule.eval_steps,
        "eval_on_start": evaluate,
        "save_strategy": "steps",
        "save_steps": schedule.save_steps,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
    }
