"""Reward modelling through TRL's RewardTrainer: a model with a score in the place of its head learns which is better.

The score is read at the last token that is no padding (transformers' models for sequence classification, one label).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.alignment import Room
from tunekit.data.learner import Learner
from tunekit.methods.arguments import trainer_arguments
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.methods import RewardMethod
from tunekit.recipe.schema import DataSection, TrainSection

LEARNER = Learner("reward", ("preference",))
"""What it learns from."""

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase, TrainerCallback
    from trl import RewardTrainer


def room(method: RewardMethod, data: DataSection) -> Room:
    """How long pairs may be: half an answer is not judged, so a pair with a longer one is left out, as TRL does."""
    return Room(max_length=data.max_length, max_prompt_length=data.max_length, cuts=False)


def build(
    method: RewardMethod,
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
) -> "RewardTrainer":
    """A trainer over preference pairs.

    Args:
        method: What holds scores around 0, and what else goes to RewardConfig.
        train: The optimisation.
        data: The longest sequence, and whether pairs are shuffled.
        plan: Precision, micro-batch and memory choices.
        schedule: Steps.
        model: The model with a score for a head, and with its adapter.
        tokenizer: For the pairs, and saved with each checkpoint.
        train_dataset: Columns `prompt`, `chosen` and `rejected`, all texts or all messages.
        eval_dataset: The same for evaluation.
        checkpoints: Folder of the checkpoints.
        callbacks: What watches the training.
        engine: Arguments of TRL's config that choose how the run is spread.
    """
    from transformers import PrinterCallback
    from trl import RewardConfig, RewardTrainer

    from tunekit.methods.order import even_size, fill_last_step

    shared = trainer_arguments(train, plan, schedule, checkpoints, evaluate=eval_dataset is not None)
    if eval_dataset is not None:
        shared["per_device_eval_batch_size"] = even_size(
            plan.micro_batch_size, len(eval_dataset), num_batches=plan.layout.num_batches
        )
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            **shared,
            max_length=data.max_length,
            center_rewards_coefficient=method.center_rewards_coefficient,
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
