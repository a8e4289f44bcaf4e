"""Supervised fine-tuning through TRL's SFTTrainer, on rows that tunekit has tokenised, masked and packed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.learner import Learner
from tunekit.methods.arguments import trainer_arguments
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.methods import SFTMethod
from tunekit.recipe.schema import DataSection, TrainSection

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
    from datasets import Dataset
    from transformers import PrinterCallback

    from tunekit.methods.order import Order, filled, filled_stream, keep_order, num_missing
    from tunekit.methods.sft_trainer import TokenMeanSFTTrainer

    # Processes that divide sequences bring each other micro-batches of their own.
    side_by_side = plan.layout.num_batches * plan.layout.sp_size
    at_once = plan.micro_batch_size * side_by_side if side_by_side > 1 else 1
    pad, order = tokenizer.pad_token_id, None
    if isinstance(train_dataset, Dataset):
        num_rows, missing = len(train_dataset), num_missing(len(train_dataset), at_once)
        order = Order(num_rows, missing, repeats=False, shuffle=data.shuffle, seed=train.seed)
        train_dataset = filled(train_dataset, at_once, pad)
    else:
        train_dataset = filled_stream(train_dataset, train.global_batch_size, pad)
    trainer = TokenMeanSFTTrainer(
        model=model,
        args=_config(
            method, train, data, plan, schedule, checkpoints, engine=engine, evaluate=eval_dataset is not None
        ),
        train_dataset=train_dataset,
        eval_dataset=None if eval_dataset is None else filled(eval_dataset, at_once, pad),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    if order is not None:
        keep_order(trainer, order)
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
        **trainer_arguments(train, plan, schedule, checkpoints, evaluate=evaluate),
        packing=data.packing,
        padding_free=plan.padding_free,
        # The rows are tokenised, truncated and packed already.
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        **engine,
        **method.trainer_args,
    )
