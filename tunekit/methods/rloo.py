"""REINFORCE leave-one-out through TRL's RLOOTrainer: the baseline of each answer is the mean of the others' rewards."""

from tunekit.methods.arguments import Parts
from tunekit.methods.generation import rewarded_trainer
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.rloo import RLOOMethod


def build(method: RLOOMethod, parts: Parts) -> RunTrainer:
    """A trainer over prompts.

    Args:
        method: The groups, and what else goes to RLOOConfig.
        parts: All else. Rows have a column `prompt` of texts or messages, and others for the rewards.
    """
    from trl import RLOOConfig, RLOOTrainer

    return rewarded_trainer(RLOOTrainer, RLOOConfig, method, parts, normalize_advantages=method.normalize_advantages)
