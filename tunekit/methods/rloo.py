"""REINFORCE leave-one-out through TRL's RLOOTrainer: each answer is judged against the others to its prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.learner import Learner
from tunekit.methods.arguments import trainer_arguments
from tunekit.methods.generation import end_at_stop_texts, generation_arguments, prompt_room, whole_groups
from tunekit.methods.reference import loading_arguments
from tunekit.planner.plan import Plan, Schedule
from tunekit.recipe.methods import RLOOMethod
from tunekit.recipe.model import ModelSection
from tunekit.recipe.schema import DataSection, TrainSection

LEARNER = Learner("rloo", ("prompts",))
"""What it learns from."""

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase, TrainerCallback
    from trl import RLOOTrainer


room = prompt_room


def build(
    method: RLOOMethod,
    train: TrainSection,
    data: DataSection,
    plan: Plan,
    schedule: Schedule,
    *,
    model: "Module",
    base: ModelSection,
    rewards: list[Callable[..., Any]],
    tokenizer: "PreTrainedTokenizerBase",
    train_dataset: "Dataset",
    eval_dataset: "Dataset | None",
    checkpoints: Path,
    callbacks: "list[TrainerCallback]",
    engine: dict[str, Any],
) -> "RLOOTrainer":
    """A trainer over prompts.

    Args:
        method: The groups, and what else goes to RLOOConfig.
        train: The optimisation.
        data: The longest sequence, and whether prompts are shuffled.
        plan: Precision, micro-batch and memory choices.
        schedule: Steps.
        model: The model with its adapter.
        base: Where TRL finds the reference, if that is a second model.
        rewards: Functions of TRL's signature.
        tokenizer: For the prompts, and saved with each checkpoint.
        train_dataset: A column `prompt` of texts or messages, and others for the rewards.
        eval_dataset: The same for evaluation.
        checkpoints: Folder of the checkpoints.
        callbacks: What watches the training.
        engine: Arguments of TRL's config that choose how the run is spread.
    """
    from transformers import PrinterCallback
    from trl import RLOOConfig, RLOOTrainer

    from tunekit.methods.order import GroupOrder

    shared = trainer_arguments(train, plan, schedule, checkpoints, evaluate=eval_dataset is not None)
    num_generations = method.trainer_args.get("num_generations_eval") or method.num_generations
    shared["per_device_eval_batch_size"] = whole_groups(
        plan.micro_batch_size, num_generations, num_batches=plan.layout.num_batches
    )
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=rewards,
        args=RLOOConfig(
            **shared,
            num_generations=method.num_generations,
            # All answers of a step at once, and so many steps on them.
            steps_per_generation=plan.gradient_accumulation_steps,
            num_iterations=method.num_iterations,
            beta=method.beta,
            normalize_advantages=method.normalize_advantages,
            epsilon=method.epsilon,
            epsilon_high=method.epsilon_high,
            mask_truncated_completions=method.mask_truncated_completions,
            reward_weights=[reward.weight for reward in method.rewards],
            # Of a second model, which TRL loads from where the first came from.
            model_init_kwargs=loading_arguments(base) if method.beta else None,
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
