"""Direct preference optimisation through TRL's DPOTrainer, which tokenises the pairs that tunekit has read."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.alignment import Room
from tunekit.data.learner import Learner
from tunekit.methods.arguments import trainer_arguments
from tunekit.methods.reference import loading_arguments, refer_to_base
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.schema import DataSection, DPOMethod, ModelSection, TrainSection

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

    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(
            **trainer_arguments(train, plan, schedule, checkpoints, evaluate=eval_dataset is not None),
            train_sampling_strategy="random" if data.shuffle else "sequential",
            max_length=data.max_length,
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
    refer_to_base(trainer.model)
    trainer.remove_callback(PrinterCallback)
    return trainer
