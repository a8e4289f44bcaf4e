"""Supervised fine-tuning through TRL's SFTTrainer, on rows that tunekit has tokenised, masked and packed."""

from dataclasses import replace
from typing import TYPE_CHECKING

from tunekit.methods.arguments import Parts
from tunekit.methods.run_trainer import run_trainer
from tunekit.recipe.methods.sft import SFTMethod

if TYPE_CHECKING:
    from trl import SFTTrainer


def build(method: SFTMethod, parts: Parts) -> "SFTTrainer":
    """A trainer over token ids and labels.

    Args:
        method: What else goes to SFTConfig.
        parts: All else. Rows have columns `input_ids` and `labels` (-100 off the loss), and `seq_lengths` where packed.
    """
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig

    from tunekit.methods.head import name_scored_positions, replace_heads
    from tunekit.methods.order import Order, filled, filled_stream, keep_order, num_missing
    from tunekit.methods.sft_trainer import TokenMeanSFTTrainer

    # Processes that divide sequences bring each other micro-batches of their own.
    side_by_side = parts.plan.layout.num_batches * parts.plan.layout.sp_size
    at_once = parts.plan.micro_batch_size * side_by_side if side_by_side > 1 else 1
    pad, order = parts.tokenizer.pad_token_id, None
    train_dataset, eval_dataset = parts.train_dataset, parts.eval_dataset
    if isinstance(train_dataset, Dataset):
        num_rows, missing = len(train_dataset), num_missing(len(train_dataset), at_once)
        order = Order(num_rows, missing, repeats=False, shuffle=parts.data.shuffle, seed=parts.train.seed)
        train_dataset = filled(train_dataset, at_once, pad)
    else:
        train_dataset = filled_stream(train_dataset, parts.train.global_batch_size, pad)
    if eval_dataset is not None:
        eval_dataset = filled(eval_dataset, at_once, pad)
    trainer = run_trainer(TokenMeanSFTTrainer)(
        args=SFTConfig(
            **parts.arguments(),
            packing=parts.data.packing,
            padding_free=parts.plan.padding_free,
            # The rows are tokenised, truncated and packed already.
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            **method.trainer_args,
        ),
        **replace(parts, train_dataset=train_dataset, eval_dataset=eval_dataset).given(),
    )
    if order is not None:
        keep_order(trainer, order)
    # Each process makes its own micro-batches of a stream, and gets none that the first one has made.
    trainer.accelerator.dataloader_config.dispatch_batches = False
    trainer.learns_from_sums = parts.head == "sums"
    replace_heads(trainer, sums_losses=trainer.learns_from_sums, keeps_trls=parts.head == "tiles")
    if parts.head != "tiles":
        name_scored_positions(trainer)
    trainer.remove_callback(PrinterCallback)
    return trainer
