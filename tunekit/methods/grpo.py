"""Group relative policy optimization through TRL's GRPOTrainer, which generates answers and scores them by rewards."""

from tunekit.methods.arguments import Parts
from tunekit.methods.generation import rewarded_trainer
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.grpo import GRPOMethod


def build(method: GRPOMethod, parts: Parts) -> RunTrainer:
    """A trainer over prompts.

    Args:
        method: The groups, and what else goes to GRPOConfig.
        parts: All else. Rows have a column `prompt` of texts or messages, and others for the rewards.
    """
    from trl import GRPOConfig, GRPOTrainer

    return rewarded_trainer(
        GRPOTrainer,
        GRPOConfig,
        method,
        parts,
        loss_type=method.loss_type,
        importance_sampling_level=method.importance_sampling_level,
        scale_rewards=method.scale_rewards,
    )
