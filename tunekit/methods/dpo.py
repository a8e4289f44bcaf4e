"""Direct preference optimisation through TRL's DPOTrainer, which tokenises the pairs that tunekit has read."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.alignment import Room
from tunekit.data.learner import Learner
from tunekit.methods.arguments import trainer_arguments
from tunekit.methods.reference import loading_arguments
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.methods import DPOMethod
from tunekit.recipe.model import ModelSection
from tunekit.recipe.schema import DataSection, TrainSection

LEARNER = Learner("dpo", ("preference",))
"""What it learns from."""

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from trl import DPOTrainer


def room(method: DPOMethod, data: DataSection) -> Room:
    """How long pairs may be: a prompt leaves room for one token of an answer at least, else TRL leaves the pair out."""
    return Room(max_length=data.max_length, max_prompt_length=data.max_length - 1)


def build(
    method: DPOMethod,
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
) -> "DPOTrainer":
    """A trainer over preference pairs.

    Args:
        method: The strength of the reference, and what else goes to DPOConfig.
        train: The optimisation.
        data: The longest sequence, and whether pairs are shuffled.
        plan: Precision, micro-batch and memory choices.
        schedule: Steps.
        model: The model with its adapter.
        base: Where TRL finds the model before training, if FSDP2 computes its log-probabilities beforehand.
        reference: The model before training, where it is a second one. Without, it is the model without its adapter,
            or its log-probabilities are computed beforehand.
        tokenizer: For the pairs, and saved with each checkpoint.
        train_dataset: Columns `prompt`, `chosen` and `rejected`, all texts or all messages.
        eval_dataset: The same for evaluation.
        checkpoints: Folder of the checkpoints.
        callbacks: What watches the training.
        engine: Arguments of TRL's config that choose how the run is spread.
    """
    from transformers import PrinterCallback
    from trl import DPOConfig, DPOTrainer

    from tunekit.methods.order import even_size, fill_last_step

    shared = trainer_arguments(train, plan, schedule, checkpoints, evaluate=eval_dataset is not None)
    if eval_dataset is not None:
        shared["per_device_eval_batch_size"] = even_size(
            plan.micro_batch_size, len(eval_dataset), num_batches=plan.layout.num_batches
        )
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(
            **shared,
            max_length=data.max_length,
            loss_type=method.loss_type,
            loss_weights=method.loss_weights,
            label_smoothing=method.label_smoothing,
            beta=method.beta,
            precompute_ref_log_probs=method.precompute_ref_log_probs,
            model_init_kwargs=loading_arguments(base) if method.precompute_ref_log_probs else None,
            **engine,
            **method.trainer_args,
        ),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    fill_last_step(trainer, train.global_batch_size, shuffle=data.shuffle, seed=train.seed)
    trainer.remove_callback(PrinterCallback)
    return trainer
