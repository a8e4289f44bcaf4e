"""Odds ratio preference optimization through TRL's ORPOTrainer (experimental), on pairs that tunekit has tokenised."""

from tunekit.methods.arguments import Parts
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.orpo import ORPOMethod


def build(method: ORPOMethod, parts: Parts) -> RunTrainer:
    """A trainer over preference pairs.

    Args:
        method: The weight of the odds ratio, and what else goes to ORPOConfig.
        parts: All else. Rows have columns `prompt`, `chosen` and `rejected`, all texts or all messages.
    """
    from trl.experimental.orpo import ORPOConfig

    from tunekit.methods.pair_trainers import TokenisedORPOTrainer, with_tokens

    return with_tokens(parts).trainer(
        TokenisedORPOTrainer,
        args=ORPOConfig(
            **parts.arguments(mean_over_rows=True),
            max_length=parts.data.max_length,
            beta=method.beta,
            remove_unused_columns=False,
            **method.trainer_args,
        ),
        fills_last_step=True,
    )
