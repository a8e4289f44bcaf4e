"""REINFORCE leave-one-out through TRL's RLOOTrainer: each answer is judged against the others to its prompt."""

from typing import TYPE_CHECKING

from tunekit.methods.arguments import Parts
from tunekit.methods.generation import arguments_in_groups, end_at_stop_texts, generation_arguments
from tunekit.methods.run_trainer import GroupOrder, run_trainer
from tunekit.recipe.methods.rloo import RLOOMethod

if TYPE_CHECKING:
    from trl import RLOOTrainer


def build(method: RLOOMethod, parts: Parts) -> "RLOOTrainer":
    """A trainer over prompts.

    Args:
        method: The groups, and what else goes to RLOOConfig.
        parts: All else. Rows have a column `prompt` of texts or messages, and others for the rewards.
    """
    from transformers import PrinterCallback
    from trl import RLOOConfig, RLOOTrainer

    from tunekit.methods.head import replace_heads
    from tunekit.methods.rewards.load import load_rewards

    trainer = run_trainer(RLOOTrainer)(
        reward_funcs=load_rewards(method.rewards, device=parts.plan.device.kind),
        args=RLOOConfig(
            **arguments_in_groups(method, parts),
            normalize_advantages=method.normalize_advantages,
            **{**method.trainer_args, **generation_arguments(method, parts.data, parts.plan)},
        ),
        **parts.given(),
    )
    GroupOrder(trainer, parts.train.seed)
    end_at_stop_texts(trainer, parts.tokenizer, method.generation.stop)
    replace_heads(trainer, keeps_trls=parts.head == "tiles")
    trainer.remove_callback(PrinterCallback)
    return trainer
