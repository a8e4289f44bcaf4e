"""Recipe section and spec of geometric-mean policy optimization."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.on_policy import GenerationSection, PolicyGradientMethod, rewarded_spec
from tunekit.recipe.methods.spec import LearningRate


class GMPOMethod(PolicyGradientMethod):
    """Geometric-mean policy optimization: GRPO with more stable updates (TRL's GMPOTrainer)."""

    spec = rewarded_spec(
        config=("trl", "experimental/gmpo/gmpo_config.py", "GMPOConfig"),
        learning_rate=LearningRate(1e-6, 1e-5, "TRL's GMPOConfig"),
        loss_description="The loss of GMPO (experimental in TRL) stays near zero; progress shows in the reward.",
        is_experimental=True,
        upstream_names=("_tool_call_loop",),
    )

    type: Literal["gmpo"] = "gmpo"
    """Geometric-mean policy optimization, on prompts (arXiv 2507.20673). Experimental in TRL."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Normalization of advantages after subtracting the group mean: by the standard deviation of the group, of the
    batch, or none."""

    epsilon: Annotated[float, Field(gt=0)] = 0.4
    """Clip range of the log-ratio per token: 0.4 allows ratios from 0.67 to 1.49."""

    epsilon_high: Annotated[float | None, Field(gt=0)] = None
    """Upper PPO clip range. Default: `epsilon`."""

    mask_truncated_completions: bool = False
    """Exclude completions that reach `max_completion_length` from the loss."""

    generation: GenerationSection = GenerationSection()
    """Generation settings."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's GMPOConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself, or that the loss ignores, are refused."""

    def why_no_vllm(self) -> tuple[str, str] | None:
        """Return why the method cannot learn from answers of vLLM's, and the remedy."""
        why = "GMPO's loss has no importance-sampling correction for vLLM"
        return why, "use method.type=grpo, or unset use_vllm"
