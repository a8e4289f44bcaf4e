"""Reward modeling through TRL's RewardTrainer: a model with a scalar head learns to score chosen answers higher.

The score is read at the last token that is no padding (transformers' models for sequence classification, one label).
"""

from tunekit.methods.arguments import Parts
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.reward import RewardMethod


def build(method: RewardMethod, parts: Parts) -> RunTrainer:
    """A trainer over preference pairs.

    Args:
        method: The coefficient that centers rewards, and what else goes to RewardConfig.
        parts: All else. Rows have columns `prompt`, `chosen` and `rejected`, all texts or all messages.
    """
    from trl import RewardConfig, RewardTrainer

    return parts.trainer(
        RewardTrainer,
        args=RewardConfig(
            **parts.arguments(mean_over_rows=True),
            max_length=parts.data.max_length,
            center_rewards_coefficient=method.center_rewards_coefficient,
            **method.trainer_args,
        ),
        fills_last_step=True,
    )
