"""Geometric-mean policy optimization through TRL's GMPOTrainer (experimental)."""

from tunekit.methods.arguments import Parts
from tunekit.methods.generation import arguments_in_groups, generating_trainer, generation_arguments
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.methods.gmpo import GMPOMethod


def build(method: GMPOMethod, parts: Parts) -> RunTrainer:
    """Build a trainer over prompts.

    Args:
        method: The groups, and what else goes to GMPOConfig.
        parts: All else. Rows have a column `prompt` of texts or messages, and others for the rewards.
    """
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    from tunekit.methods.head import replace_heads
    from tunekit.methods.rewards.load import load_rewards

    trainer = generating_trainer(
        GMPOTrainer,
        method,
        parts,
        reward_funcs=load_rewards(method.rewards, device=parts.plan.device.kind),
        args=GMPOConfig(
            **arguments_in_groups(method, parts),
            scale_rewards=method.scale_rewards,
            **{**method.trainer_args, **generation_arguments(method, parts.data, parts.plan)},
        ),
    )
    # GMPO takes no gradient of the entropy (trl 1.16, `GMPOTrainer._compute_loss`).
    replace_heads(trainer, keeps_trls=parts.head == "tiles")
    return trainer
