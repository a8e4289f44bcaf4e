"""Contrastive preference optimization and SimPO through TRL's CPOTrainer (experimental), on pairs already tokenised."""

from tunekit.methods.arguments import Parts
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.cpo import CPOMethod


def build(method: CPOMethod, parts: Parts) -> RunTrainer:
    """A trainer over preference pairs.

    Args:
        method: The loss and its weights, and what else goes to CPOConfig.
        parts: All else. Rows have columns `prompt`, `chosen` and `rejected`, all texts or all messages.
    """
    from trl.experimental.cpo import CPOConfig

    from tunekit.methods.pair_trainers import TokenisedCPOTrainer, with_tokens

    return with_tokens(parts).trainer(
        TokenisedCPOTrainer,
        args=CPOConfig(
            **parts.arguments(mean_over_rows=True),
            max_length=parts.data.max_length,
            loss_type=method.loss_type,
            beta=method.beta,
            cpo_alpha=method.likelihood_weight,
            simpo_gamma=method.simpo_gamma,
            label_smoothing=method.label_smoothing,
            remove_unused_columns=False,
            **method.trainer_args,
        ),
        fills_last_step=True,
    )
