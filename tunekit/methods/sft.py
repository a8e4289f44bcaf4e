"""Supervised fine-tuning through TRL's SFTTrainer, on rows that tunekit has tokenised, masked and packed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.learner import Learner
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.schema import DataSection, SFTMethod, TrainSection

LEARNER = Learner("sft", ("messages", "prompt_completion", "text", "tokens"))
"""What it learns from."""

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase, TrainerCallback
    from trl import SFTConfig, SFTTrainer


def build(
    method: SFTMethod,
    train: TrainSection,
    data: DataSection,
    plan: Plan,
    schedule: Schedule,
    *,
    model: "Module",
    tokenizer: "PreTrainedTokenizerBase",
    train_dataset: "Dataset | IterableDataset",
    eval_dataset: "Dataset | None",
    checkpoints: Path,
    callbacks: "list[TrainerCallback]",
    engine: dict[str, Any],
) -> "SFTTrainer":
    """A trainer over token ids and labels.

    Args:
        method: What else goes to SFTConfig.
        train: The optimisation.
        data: Whether sequences are packed, and whether they are shuffled.
        plan: Precision, micro-batch, padding and memory choices.
        schedule: Steps.
        model: The model with its adapter.
        tokenizer: For padding, and saved with each checkpoint.
        train_dataset: Columns `input_ids` and `labels` (-100 off the loss), with `seq_lengths` where packed.
        eval_dataset: The same for evaluation.
        checkpoints: Folder of the checkpoints.
        callbacks: What watches the training.
        engine: Arguments of TRL's config that choose how the run is spread.
    """
    from transformers import PrinterCallback
    from datasets import Dataset

    from tunekit.methods.order import Order, filled, filled_stream, num_empty
    from tunekit.methods.sft_trainer import DividedSFTTrainer

    order = None
    at_once = plan.micro_batch_size * plan.layout.num_batches
    pad = tokenizer.pad_token_id
    if isinstance(train_dataset, Dataset):
        num_rows = len(train_dataset)
        order = Order(num_rows, num_empty(num_rows, at_once), shuffle=data.shuffle, seed=train.seed)
        train_dataset = filled(train_dataset, at_once, pad)
    else:
        train_dataset = filled_stream(train_dataset, at_once * plan.gradient_accumulation_steps, pad)
    trainer = DividedSFTTrainer(
        order,
        model=model,
        args=_config(
            method, train, data, plan, schedule, checkpoints, engine=engine, evaluate=eval_dataset is not None
        ),
        train_dataset=train_dataset,
        eval_dataset=None if eval_dataset is None else filled(eval_dataset, at_once, pad),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    # Each process makes its own micro-batches of a stream, and gets none that the first one has made.
    trainer.accelerator.dataloader_config.dispatch_batches = False
    trainer.remove_callback(PrinterCallback)
    return trainer


def _config(
    method: SFTMethod,
    train: TrainSection,
    data: DataSection,
    plan: Plan,
    schedule: Schedule,
    checkpoints: Path,
    *,
    engine: dict[str, Any],
    evaluate: bool,
) -> "SFTConfig":
    from trl import SFTConfig

    return SFTConfig(
        output_dir=str(checkpoints),
        per_device_train_batch_size=plan.micro_batch_size,
        per_device_eval_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        max_steps=schedule.num_steps,
        learning_rate=plan.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        warmup_steps=schedule.warmup_steps,
        optim=train.optim,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        seed=train.seed,
        use_cpu=plan.device.kind == "cpu",
        bf16=plan.autocast and plan.dtype == "bfloat16",
        fp16=plan.autocast and plan.dtype == "float16",
        gradient_checkpointing=plan.gradient_checkpointing,
        dataloader_num_workers=plan.dataloader_num_workers,
        dataloader_pin_memory=plan.device.kind != "cpu",
        packing=data.packing,
        padding_free=plan.padding_free,
        # The rows are tokenised, truncated and packed already.
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        logging_steps=train.logging_steps,
        # A NaN must be seen, not shown as 0.
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=schedule.eval_steps,
        eval_on_start=evaluate,
        save_strategy="steps",
        save_steps=schedule.save_steps,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        **engine,
        **method.trainer_args,
    )
