"""Odds ratio preference optimisation through TRL's ORPOTrainer (experimental), on pairs that tunekit has tokenised."""

from typing import TYPE_CHECKING

from tunekit.methods.arguments import Parts
from tunekit.methods.run_trainer import fill_last_step, run_trainer
from tunekit.recipe.methods.orpo import ORPOMethod

if TYPE_CHECKING:
    from trl.experimental.orpo import ORPOTrainer


def build(method: ORPOMethod, parts: Parts) -> "ORPOTrainer":
    """A trainer over preference pairs.

    Args:
        method: The weight of the odds ratio, and what else goes to ORPOConfig.
        parts: All else. Rows have columns `prompt`, `chosen` and `rejected`, all texts or all messages.
    """
    from transformers import PrinterCallback
    from trl.experimental.orpo import ORPOConfig

    from tunekit.methods.pair_trainers import TokenisedORPOTrainer, with_tokens

    trainer = run_trainer(TokenisedORPOTrainer)(
        args=ORPOConfig(
            **parts.arguments(mean_over_rows=True),
            max_length=parts.data.max_length,
            beta=method.beta,
            remove_unused_columns=False,
            **method.trainer_args,
        ),
        **with_tokens(parts).given(),
    )
    fill_last_step(trainer, parts.train.global_batch_size, shuffle=parts.data.shuffle, seed=parts.train.seed)
    trainer.remove_callback(PrinterCallback)
    return trainer
