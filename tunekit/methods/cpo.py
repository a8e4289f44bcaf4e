"""Contrastive preference optimisation and SimPO through TRL's CPOTrainer (experimental), on pairs that are tokenised."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.alignment import Room, tokenised_pairs
from tunekit.data.learner import Learner
from tunekit.methods.arguments import trainer_arguments
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.methods import CPOMethod
from tunekit.recipe.schema import DataSection, TrainSection

LEARNER = Learner("cpo", ("preference",))
"""What it learns from."""

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase, TrainerCallback
    from trl.experimental.cpo import CPOTrainer


def room(method: CPOMethod, data: DataSection) -> Room:
    """How long pairs may be: a prompt leaves room for one token of an answer at least; of none there is no mean."""
    return Room(max_length=data.max_length, max_prompt_length=data.max_length - 1)


def build(
    method: CPOMethod,
    train: TrainSection,
    data: DataSection,
    plan: Plan,
    schedule: Schedule,
    *,
    model: "Module",
    tokenizer: "PreTrainedTokenizerBase",
    train_dataset: "Dataset",
    eval_dataset: "Dataset | None",
    checkpoints: Path,
    callbacks: "list[TrainerCallback]",
    engine: dict[str, Any],
) -> "CPOTrainer":
    """A trainer over preference pairs.

    Args:
        method: The loss and its weights, and what else goes to CPOConfig.
        train: The optimisation.
        data: The longest sequence, and whether pairs are shuffled.
        plan: Precision, micro-batch and memory choices.
        schedule: Steps.
        model: The model with its adapter.
        tokenizer: For the pairs, and saved with each checkpoint.
        train_dataset: Columns `prompt`, `chosen` and `rejected`, all texts or all messages.
        eval_dataset: The same for evaluation.
        checkpoints: Folder of the checkpoints.
        callbacks: What watches the training.
        engine: Arguments of TRL's config that choose how the run is spread.
    """
    from transformers import PrinterCallback
    from trl.experimental.cpo import CPOConfig

    from tunekit.methods.order import even_size, fill_last_step
    from tunekit.methods.pair_trainers import TokenisedCPOTrainer

    shared = trainer_arguments(train, plan, schedule, checkpoints, evaluate=eval_dataset is not None)
    if eval_dataset is not None:
        shared["per_device_eval_batch_size"] = even_size(
            plan.micro_batch_size, len(eval_dataset), num_batches=plan.layout.num_batches
        )
        eval_dataset = tokenised_pairs(eval_dataset, tokenizer, data.max_length)
    trainer = TokenisedCPOTrainer(
        model=model,
        args=CPOConfig(
            **shared,
            max_length=data.max_length,
            loss_type=method.loss_type,
            beta=method.beta,
            cpo_alpha=method.likelihood_weight,
            simpo_gamma=method.simpo_gamma,
            label_smoothing=method.label_smoothing,
            remove_unused_columns=False,
            **engine,
            **method.trainer_args,
        ),
        train_dataset=tokenised_pairs(train_dataset, tokenizer, data.max_length),
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    fill_last_step(trainer, train.global_batch_size, shuffle=data.shuffle, seed=train.seed)
    trainer.remove_callback(PrinterCallback)
    return trainer
