"""Reward modelling through TRL's RewardTrainer: a model with a score in the place of its head learns which is better.

The score is read at the last token that is no padding (transformers' models for sequence classification, one label).
"""

from typing import TYPE_CHECKING

from tunekit.methods.arguments import Parts
from tunekit.methods.run_trainer import fill_last_step, run_trainer
from tunekit.recipe.methods.reward import RewardMethod

if TYPE_CHECKING:
    from trl import RewardTrainer


def build(method: RewardMethod, parts: Parts) -> "RewardTrainer":
    """A trainer over preference pairs.

    Args:
        method: What holds scores around 0, and what else goes to RewardConfig.
        parts: All else. Rows have columns `prompt`, `chosen` and `rejected`, all texts or all messages.
    """
    from transformers import PrinterCallback
    from trl import RewardConfig, RewardTrainer

    trainer = run_trainer(RewardTrainer)(
        args=RewardConfig(
            **parts.arguments(mean_over_rows=True),
            max_length=parts.data.max_length,
            center_rewards_coefficient=method.center_rewards_coefficient,
            **method.trainer_args,
        ),
        **parts.given(),
    )
    fill_last_step(trainer, parts.train.global_batch_size, shuffle=parts.data.shuffle, seed=parts.train.seed)
    trainer.remove_callback(PrinterCallback)
    return trainer
