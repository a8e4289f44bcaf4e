"""Geometric-mean policy optimization through TRL's GMPOTrainer (experimental)."""

from tunekit.methods.arguments import Parts
from tunekit.methods.generation import rewarded_trainer
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.gmpo import GMPOMethod


def build(method: GMPOMethod, parts: Parts) -> RunTrainer:
    """Build a trainer over prompts.

    Args:
        method: The groups, and what else goes to GMPOConfig.
        parts: All else. Rows have a column `prompt` of texts or messages, and others for the rewards.
    """
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    return rewarded_trainer(GMPOTrainer, GMPOConfig, method, parts, scale_rewards=method.scale_rewards)
