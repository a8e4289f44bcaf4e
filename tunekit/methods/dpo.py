"""Direct preference optimization through TRL's DPOTrainer, which tokenizes the pairs that tunekit has read."""

from tunekit.methods.arguments import Parts, loading_arguments
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.dpo import DPOMethod


def build(method: DPOMethod, parts: Parts) -> RunTrainer:
    """A trainer over preference pairs.

    Args:
        method: The loss and beta, and what else goes to DPOConfig.
        parts: All else. Rows have columns `prompt`, `chosen` and `rejected`, all texts or all messages.
    """
    from trl import DPOConfig

    from tunekit.methods.head import replace_heads
    from tunekit.methods.pair_trainers import RememberingDPOTrainer

    trainer = parts.trainer(
        RememberingDPOTrainer,
        ref_model=parts.reference(),
        args=DPOConfig(
            **parts.arguments(mean_over_rows=True),
            max_length=parts.data.max_length,
            loss_type=method.loss_type,
            loss_weights=method.loss_weights,
            label_smoothing=method.label_smoothing,
            beta=method.beta,
            precompute_ref_log_probs=method.precompute_ref_log_probs,
            model_init_kwargs=loading_arguments(parts.plan) if method.precompute_ref_log_probs else None,
            **method.trainer_args,
        ),
        fills_last_step=True,
    )
    replace_heads(trainer, keeps_trls=parts.head == "tiles")
    return trainer
