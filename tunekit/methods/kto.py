"""Kahneman-Tversky optimization through TRL's KTOTrainer, which tokenises the answers that tunekit has read.

Its loss `kto` holds each answer against how far the model has gone from its reference on answers to other prompts.
These are taken from the same optimizer step: each prompt gets the answer before it, and keeps its own pictures. So
which rows share a step is fixed before training, and every epoch has the same order.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunekit.data.media.answers import PictureAnswers
from tunekit.data.media.collate import RatedPictureCollator
from tunekit.methods.arguments import Parts, loading_arguments
from tunekit.methods.run_trainer import Order, RunTrainer, num_missing
from tunekit.recipe.methods.kto import KTOMethod
from tunekit.recipe.sections.section import TrainSection

if TYPE_CHECKING:
    from datasets import Dataset


def build(method: KTOMethod, parts: Parts) -> RunTrainer:
    """A trainer over single answers.

    Args:
        method: The weights of desirable and undesirable answers, and what else goes to KTOConfig.
        parts: All else. Rows have columns `prompt` and `completion`, both texts or both messages, and `label`.
    """
    from trl import KTOConfig

    from tunekit.methods.head import replace_heads
    from tunekit.methods.pair_trainers import RememberingKTOTrainer

    train_dataset = _with_labels(parts.train_dataset)
    is_ordered = method.loss_type == "kto"
    if is_ordered:
        train_dataset = _in_fixed_order(train_dataset, parts.train, shuffle=parts.data.shuffle)
    eval_dataset = None if parts.eval_dataset is None else _with_labels(parts.eval_dataset)
    collation: dict[str, Any] = {}
    if parts.processor is not None:
        rated = PictureAnswers(parts.processor).rated
        train_dataset = rated(train_dataset, num_together=parts.train.global_batch_size if is_ordered else None)
        if eval_dataset is not None:
            eval_dataset = rated(eval_dataset, num_together=len(eval_dataset) if is_ordered else None)
        collation = {"data_collator": RatedPictureCollator(parts.processor, max_length=parts.data.max_length)}
    trainer = replace(parts, train_dataset=train_dataset, eval_dataset=eval_dataset).trainer(
        RememberingKTOTrainer,
        **collation,
        global_batch_size=parts.train.global_batch_size,
        ref_model=parts.reference(),
        args=KTOConfig(
            **parts.arguments(mean_over_rows=True),
            train_sampling_strategy="sequential",
            max_length=parts.data.max_length,
            loss_type=method.loss_type,
            beta=method.beta,
            desirable_weight=method.desirable_weight,
            undesirable_weight=method.undesirable_weight,
            precompute_ref_log_probs=method.precompute_ref_log_probs,
            # The columns that pictures come by are no inputs of the model.
            remove_unused_columns=parts.processor is None,
            model_init_kwargs=loading_arguments(parts.plan) if method.precompute_ref_log_probs else None,
            **method.trainer_args,
        ),
        fills_last_step=not is_ordered,
    )
    if is_ordered:
        # Were a row left out by TRL, all behind it would have other neighbours.
        assert len(trainer.train_dataset) == len(train_dataset)
    replace_heads(trainer, keeps_trls=parts.head == "tiles")
    return trainer


def _in_fixed_order(rows: "Dataset", train: TrainSection, *, shuffle: bool) -> "Dataset":
    """Rows in the order of every epoch, whose last step is filled with the first ones."""
    missing = num_missing(len(rows), train.global_batch_size)
    return rows.select(list(Order(len(rows), missing, repeats=True, shuffle=shuffle, seed=train.seed)))


def _with_labels(rows: "Dataset") -> "Dataset":
    """Rows with a column of the labels, which TRL counts."""
    return rows.add_column("label", [row["label"] for row in rows])
