"""Contrastive preference optimisation and SimPO through TRL's CPOTrainer (experimental), on pairs already tokenised."""

from typing import TYPE_CHECKING

from tunekit.methods.arguments import Parts
from tunekit.methods.run_trainer import fill_last_step, run_trainer
from tunekit.recipe.methods.cpo import CPOMethod

if TYPE_CHECKING:
    from trl.experimental.cpo import CPOTrainer


def build(method: CPOMethod, parts: Parts) -> "CPOTrainer":
    """A trainer over preference pairs.

    Args:
        method: The loss and its weights, and what else goes to CPOConfig.
        parts: All else. Rows have columns `prompt`, `chosen` and `rejected`, all texts or all messages.
    """
    from transformers import PrinterCallback
    from trl.experimental.cpo import CPOConfig

    from tunekit.methods.pair_trainers import TokenisedCPOTrainer, with_tokens

    trainer = run_trainer(TokenisedCPOTrainer)(
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
        **with_tokens(parts).given(),
    )
    fill_last_step(trainer, parts.train.global_batch_size, shuffle=parts.data.shuffle, seed=parts.train.seed)
    trainer.remove_callback(PrinterCallback)
    return trainer
