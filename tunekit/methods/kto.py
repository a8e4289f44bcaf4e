"""Kahneman-Tversky optimisation through TRL's KTOTrainer, which tokenises the answers that tunekit has read.

Its loss `kto` holds each answer against how far the model has gone from its reference on answers to other prompts. TRL
takes these from the same micro-batch: each prompt gets the answer before it. So which rows share a micro-batch is fixed
before training, and every epoch has the same order.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.alignment import Room
from tunekit.data.learner import Learner
from tunekit.methods.arguments import trainer_arguments
from tunekit.methods.reference import loading_arguments
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.methods import KTOMethod
from tunekit.recipe.model import ModelSection
from tunekit.recipe.schema import DataSection, TrainSection

LEARNER = Learner("kto", ("unpaired_preference",))
"""What it learns from."""

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from trl import KTOTrainer


def room(method: KTOMethod, data: DataSection) -> Room:
    """How long rows may be: a prompt leaves room for one token of an answer at least, else TRL leaves the row out."""
    return Room(max_length=data.max_length, max_prompt_length=data.max_length - 1)


def build(
    method: KTOMethod,
    train: TrainSection,
    data: DataSection,
    plan: Plan,
    schedule: Schedule,
    *,
    model: "Module",
    base: ModelSection,
    reference: "PreTrainedModel | None",
    tokenizer: "PreTrainedTokenizerBase",
    train_dataset: "Dataset",
    eval_dataset: "Dataset | None",
    checkpoints: Path,
    callbacks: "list[TrainerCallback]",
    engine: dict[str, Any],
) -> "KTOTrainer":
    """A trainer over single answers.

    Args:
        method: The weights of good and bad answers, and what else goes to KTOConfig.
        train: The optimisation.
        data: The longest sequence, and whether rows are shuffled.
        plan: Precision, micro-batch and memory choices.
        schedule: Steps.
        model: The model with its adapter.
        base: Where TRL finds the model before training, if FSDP2 computes its log-probabilities beforehand.
        reference: The model before training, where it is a second one. Without, it is the model without its adapter,
            or its log-probabilities are computed beforehand.
        tokenizer: For the rows, and saved with each checkpoint.
        train_dataset: Columns `prompt` and `completion`, both texts or both messages, and `label`.
        eval_dataset: The same for evaluation.
        checkpoints: Folder of the checkpoints.
        callbacks: What watches the training.
        engine: Arguments of TRL's config that choose how the run is spread.
    """
    from transformers import PrinterCallback
    from trl import KTOConfig

    from tunekit.methods.order import even_size, fill_last_step
    from tunekit.methods.precomputed import RememberingKTOTrainer

    shared = trainer_arguments(train, plan, schedule, checkpoints, evaluate=eval_dataset is not None)
    if eval_dataset is not None:
        shared["per_device_eval_batch_size"] = even_size(
            plan.micro_batch_size, len(eval_dataset), num_batches=plan.layout.num_batches
        )
    train_dataset = _with_labels(train_dataset)
    is_ordered = method.loss_type == "kto"
    if is_ordered:
        train_dataset = _in_fixed_order(train_dataset, train, shuffle=data.shuffle)
    trainer = RememberingKTOTrainer(
        model=model,
        ref_model=reference,
        args=KTOConfig(
            **shared,
            train_sampling_strategy="sequential",
            max_length=data.max_length,
            loss_type=method.loss_type,
            beta=method.beta,
            desirable_weight=method.desirable_weight,
            undesirable_weight=method.undesirable_weight,
            precompute_ref_log_probs=method.precompute_ref_log_probs,
            model_init_kwargs=loading_arguments(base) if method.precompute_ref_log_probs else None,
            **engine,
            **method.trainer_args,
        ),
        train_dataset=train_dataset,
        eval_dataset=None if eval_dataset is None else _with_labels(eval_dataset),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    if is_ordered:
        # Were a row left out by TRL, all behind it would have other neighbours.
        assert len(trainer.train_dataset) == len(train_dataset)
    else:
        fill_last_step(trainer, train.global_batch_size, shuffle=data.shuffle, seed=train.seed)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _in_fixed_order(rows: "Dataset", train: TrainSection, *, shuffle: bool) -> "Dataset":
    """Rows in the order of every epoch, whose last step is filled with the first ones."""
    from tunekit.methods.order import Order, num_missing

    missing = num_missing(len(rows), train.global_batch_size)
    return rows.select(list(Order(len(rows), missing, repeats=True, shuffle=shuffle, seed=train.seed)))


def _with_labels(rows: "Dataset") -> "Dataset":
    """Rows with a column of the labels, which TRL counts."""
    return rows.add_column("label", [row["label"] for row in rows])
