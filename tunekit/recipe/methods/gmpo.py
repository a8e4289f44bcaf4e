"""Recipe section and spec of geometric-mean policy optimisation."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.on_policy import (
    REWARD_CHECKS,
    REWARD_METRICS,
    REWARDED_ARGS,
    GenerationSection,
    RewardedMethod,
)
from tunekit.recipe.methods.spec import LearningRate, MethodSpec

UNREAD = (
    "delta",
    "entropy_coef",
    "entropy_coef_delta",
    "entropy_coef_max",
    "entropy_coef_min",
    "entropy_target",
    "importance_sampling_level",
    "loss_type",
    "off_policy_mask_threshold",
    "router_aux_loss_coef",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "use_adaptive_entropy",
    "use_bias_correction_kl",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
)
"""Fields that GMPOConfig has from GRPOConfig, and that the loss of GMPO does not read (trl 1.16)."""


class GMPOMethod(RewardedMethod):
    """Geometric-mean policy optimisation: GRPO with steadier steps (TRL's GMPOTrainer)."""

    spec = MethodSpec(
        config=("trl", "experimental/gmpo/gmpo_config.py", "GMPOConfig"),
        row_formats=("prompts",),
        trains_on="prompts",
        learning_rate=LearningRate(1e-6, 1e-5, "TRL's GMPOConfig"),
        metrics=REWARD_METRICS,
        health_checks=REWARD_CHECKS,
        loss_description="The loss of GMPO (experimental in TRL) is near zero whatever is learned; the reward tells.",
        owned_args={
            "log_completions_hub_repo": "tunekit does not upload while it trains",
            **dict.fromkeys(UNREAD, "the loss of GMPO does not read it"),
            **REWARDED_ARGS,
        },
        is_experimental=True,
        settings_scale_loss=False,
    )

    type: Literal["gmpo"] = "gmpo"
    """Geometric-mean policy optimisation, on prompts (arXiv 2507.20673). Experimental in TRL."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What rewards are divided by, once the group's mean is taken away: the spread of the group, of the batch, or
    nothing."""

    epsilon: Annotated[float, Field(gt=0)] = 0.4
    """How far each token may go from the model that gave the answers before it counts no more, as the logarithm of the
    ratio: 0.4 allows ratios from 0.67 to 1.49."""

    epsilon_high: Annotated[float | None, Field(gt=0)] = None
    """The same upwards. Left out: `epsilon`."""

    mask_truncated_completions: bool = False
    """Leave answers that reach `max_completion_length` out of the loss."""

    generation: GenerationSection = GenerationSection()
    """How answers are generated."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's GMPOConfig, by its names. Checked against the fields of the installed version; what
    tunekit sets itself, and what the loss does not read, is refused."""

    def why_no_vllm(self) -> tuple[str, str] | None:
        """Return why the method cannot learn from answers of vLLM's, and the remedy."""
        why = "the loss of GMPO is not corrected for what vLLM draws with probabilities of its own"
        return why, "use method.type=grpo, or leave use_vllm out"
