"""Group relative policy optimisation through TRL's GRPOTrainer, which lets the model answer and asks the rewards."""

from typing import TYPE_CHECKING

from tunekit.methods.arguments import Parts
from tunekit.methods.generation import arguments_in_groups, end_at_stop_texts, generation_arguments
from tunekit.methods.run_trainer import GroupOrder, run_trainer
from tunekit.recipe.methods.grpo import GRPOMethod

if TYPE_CHECKING:
    from trl import GRPOTrainer


def build(method: GRPOMethod, parts: Parts) -> "GRPOTrainer":
    """A trainer over prompts.

    Args:
        method: The groups, and what else goes to GRPOConfig.
        parts: All else. Rows have a column `prompt` of texts or messages, and others for the rewards.
    """
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from tunekit.methods.head import replace_heads
    from tunekit.methods.rewards.load import load_rewards

    trainer = run_trainer(GRPOTrainer)(
        reward_funcs=load_rewards(method.rewards, device=parts.plan.device.kind),
        args=GRPOConfig(
            **arguments_in_groups(method, parts),
            loss_type=method.loss_type,
            importance_sampling_level=method.importance_sampling_level,
            scale_rewards=method.scale_rewards,
            **{**method.trainer_args, **generation_arguments(method, parts.data, parts.plan)},
        ),
        **parts.given(),
    )
    GroupOrder(trainer, parts.train.seed)
    end_at_stop_texts(trainer, parts.tokenizer, method.generation.stop)
    replace_heads(trainer, entropy_gradient=trainer._entropy_bonus_enabled, keeps_trls=parts.head == "tiles")
    trainer.remove_callback(PrinterCallback)
    return trainer
