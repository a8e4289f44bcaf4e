"""Direct preference optimisation through TRL's DPOTrainer, which tokenises the pairs that tunekit has read."""

from typing import TYPE_CHECKING

from tunekit.methods.arguments import Parts, loading_arguments
from tunekit.methods.run_trainer import fill_last_step, run_trainer
from tunekit.recipe.methods.dpo import DPOMethod

if TYPE_CHECKING:
    from trl import DPOTrainer


def build(method: DPOMethod, parts: Parts) -> "DPOTrainer":
    """A trainer over preference pairs.

    Args:
        method: The strength of the reference, and what else goes to DPOConfig.
        parts: All else. Rows have columns `prompt`, `chosen` and `rejected`, all texts or all messages.
    """
    from transformers import PrinterCallback
    from trl import DPOConfig

    from tunekit.methods.head import replace_heads
    from tunekit.methods.pair_trainers import RememberingDPOTrainer

    trainer = run_trainer(RememberingDPOTrainer)(
        ref_model=parts.reference(),
        args=DPOConfig(
            **parts.arguments(mean_over_rows=True),
            max_length=parts.data.max_length,
            loss_type=method.loss_type,
            loss_weights=method.loss_weights,
            label_smoothing=method.label_smoothing,
            beta=method.beta,
            precompute_ref_log_probs=method.precompute_ref_log_probs,
            model_init_kwargs=loading_arguments(parts.plan.base) if method.precompute_ref_log_probs else None,
            **method.trainer_args,
        ),
        **parts.given(),
    )
    fill_last_step(trainer, parts.train.global_batch_size, shuffle=parts.data.shuffle, seed=parts.train.seed)
    replace_heads(trainer, keeps_trls=parts.head == "tiles")
    trainer.remove_callback(PrinterCallback)
    return trainer
