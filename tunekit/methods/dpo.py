"""Direct preference optimization through TRL's DPOTrainer, which tokenizes the pairs that tunekit has read."""

from dataclasses import replace
from typing import Any

from tunekit.data.media.answers import PictureAnswers
from tunekit.data.media.collate import PicturePairCollator
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

    collation: dict[str, Any] = {}
    if parts.processor is not None:
        answers = PictureAnswers(parts.processor)
        collation = {"data_collator": PicturePairCollator(parts.processor)}
        evaluated = None if parts.eval_dataset is None else answers.pairs(parts.eval_dataset)
        parts = replace(parts, train_dataset=answers.pairs(parts.train_dataset), eval_dataset=evaluated)
    trainer = parts.trainer(
        RememberingDPOTrainer,
        **collation,
        ref_model=parts.reference(),
        args=DPOConfig(
            **parts.arguments(mean_over_rows=True),
            max_length=parts.data.max_length,
            loss_type=method.loss_type,
            loss_weights=method.loss_weights,
            label_smoothing=method.label_smoothing,
            beta=method.beta,
            precompute_ref_log_probs=method.precompute_ref_log_probs,
            # The columns that pictures come by are no inputs of the model.
            remove_unused_columns=parts.processor is None,
            model_init_kwargs=loading_arguments(parts.plan) if method.precompute_ref_log_probs else None,
            **method.trainer_args,
        ),
        fills_last_step=True,
    )
    replace_heads(trainer, keeps_trls=parts.head == "tiles")
    return trainer
