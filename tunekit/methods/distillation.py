"""On-policy distillation through TRL's DistillationTrainer: a teacher says how likely each token of an answer is."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.learner import Learner
from tunekit.errors import ModelError
from tunekit.methods.arguments import trainer_arguments
from tunekit.methods.generation import end_at_stop_texts, generation_arguments, prompt_room
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.methods import DistillationMethod
from tunekit.recipe.model import ModelSection
from tunekit.recipe.schema import DataSection, TrainSection

LEARNER = Learner("distillation", ("prompts",))
"""What it learns from."""

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from trl import DistillationTrainer


room = prompt_room


def check_tokens(tokenizer: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase", path: str) -> None:
    """See that a number is the same token to a teacher as to the model that learns from it.

    Args:
        tokenizer: That of the model.
        teacher: That of the teacher.
        path: Where the teacher comes from.

    Raises:
        ModelError: Some are others.
    """
    own, its = tokenizer.get_vocab(), teacher.get_vocab()
    others = sum(its.get(token) != number for token, number in own.items())
    if others or len(own) != len(its):
        raise ModelError(
            f"method.teacher: {path!r} has another tokenizer: {others:,} of {len(own):,} tokens have another number "
            f"or are not among its {len(its):,}",
            hint="take a larger model of the same family as the teacher: probabilities are compared token by token",
        )


def build(
    method: DistillationMethod,
    train: TrainSection,
    data: DataSection,
    plan: Plan,
    schedule: Schedule,
    *,
    model: "Module",
    base: ModelSection,
    teacher: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    train_dataset: "Dataset",
    eval_dataset: "Dataset | None",
    checkpoints: Path,
    callbacks: "list[TrainerCallback]",
    engine: dict[str, Any],
) -> "DistillationTrainer":
    """A trainer over prompts.

    Args:
        method: The divergence, and what else goes to DistillationConfig.
        train: The optimisation.
        data: The longest sequence, and whether prompts are shuffled.
        plan: Precision, micro-batch and memory choices.
        schedule: Steps.
        model: The model with its adapter.
        base: Where it comes from.
        teacher: The model to learn from.
        tokenizer: For the prompts, and saved with each checkpoint.
        train_dataset: A column `prompt` of texts or messages.
        eval_dataset: The same for evaluation.
        checkpoints: Folder of the checkpoints.
        callbacks: What watches the training.
        engine: Arguments of TRL's config that choose how the run is spread.
    """
    from transformers import PrinterCallback
    from trl import DistillationConfig, DistillationTrainer

    from tunekit.methods.order import GroupOrder

    shared = trainer_arguments(train, plan, schedule, checkpoints, evaluate=eval_dataset is not None)
    trainer = DistillationTrainer(
        model=model,
        teacher_model=teacher,
        args=DistillationConfig(
            **shared,
            beta=method.beta,
            **engine,
            **{**method.trainer_args, **generation_arguments(method, data, plan, base)},
        ),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    GroupOrder(trainer, train.seed)
    end_at_stop_texts(trainer, tokenizer, method.generation.stop)
    trainer.remove_callback(PrinterCallback)
    return trainer
