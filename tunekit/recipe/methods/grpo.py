"""Recipe section and spec of group relative policy optimization."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.on_policy import GenerationSection, RewardedMethod, rewarded_spec
from tunekit.recipe.methods.spec import LearningRate
from tunekit.recipe.sections.section import Conflict

GRPOLoss = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
"""Losses of GRPO by TRL's names."""

WITHOUT_EPSILON = ("cispo", "sapo", "vespo")
"""Losses of GRPO that do not read `epsilon`; of them cispo alone reads `epsilon_high`."""

UNLIKE_ANSWERS = ("bnpo", "cispo", "dapo", "dr_grpo")
"""Losses of GRPO that are sums over tokens: a ratio of whole answers would weigh each by its length."""


class GRPOMethod(RewardedMethod):
    """Group relative policy optimization: generate answers, reinforce those with higher rewards (TRL's GRPOTrainer)."""

    spec = rewarded_spec(
        config=("trl", "trainer/grpo_config.py", "GRPOConfig"),
        learning_rate=LearningRate(1e-6, 1e-5, "DeepSeekMath, arXiv 2402.03300"),
        loss_description="The loss of GRPO stays near zero; progress shows in the reward.",
        upstream_names=("_entropy_bonus_enabled",),
        adds_router_loss=True,
        takes_images=True,
    )

    type: Literal["grpo"] = "grpo"
    """Group relative policy optimization, on prompts (arXiv 2402.03300)."""

    loss_type: GRPOLoss = "dapo"
    """Loss by its TRL name: `dapo`, `grpo`, `dr_grpo` and `bnpo` differ in normalization; `cispo`, `sapo`, `luspo` and
    `vespo` in how they limit the policy ratio."""

    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Level of the importance-sampling ratio: token, or sequence (GSPO, arXiv 2507.18071)."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Normalization of advantages after subtracting the group mean: by the standard deviation of the group, of the
    batch, or none."""

    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """PPO clip range."""

    epsilon_high: Annotated[float | None, Field(gt=0)] = None
    """Upper PPO clip range. Default: `epsilon`. For `cispo`, the maximum ratio itself, such as 5."""

    mask_truncated_completions: bool = False
    """Exclude completions that reach `max_completion_length` from the loss."""

    generation: GenerationSection = GenerationSection()
    """Generation settings."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's GRPOConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    def why_no_vllm(self) -> tuple[str, str] | None:
        """Return why the method cannot learn from answers of vLLM's, and the remedy; None where it can."""
        if self.loss_type != "vespo":
            return None
        why = "vespo needs another importance-sampling correction for vLLM than TRL's default"
        return why, "use another method.loss_type, or unset use_vllm"

    def conflicts_of_loss(self) -> Iterator[Conflict]:
        """Yield the fields that a loss of GRPO does not support."""
        loss, level = self.loss_type, self.importance_sampling_level
        key = ("method", "importance_sampling_level")
        if loss == "luspo" and level != "sequence":
            yield Conflict(key, "must be sequence for loss_type luspo", "set method.importance_sampling_level=sequence")
        if loss == "vespo" and level != "token":
            what = "must be token for loss_type vespo, which compares whole answers itself"
            yield Conflict(key, what, "unset it")
        if loss in UNLIKE_ANSWERS and level == "sequence":
            what = f"cannot be sequence for loss_type {loss}, a sum over tokens: long answers would weigh more"
            yield Conflict(key, what, "set method.loss_type=grpo, as in GSPO")
        if loss in WITHOUT_EPSILON and self.epsilon != type(self).model_fields["epsilon"].default:
            yield Conflict(("method", "epsilon"), f"has no effect for loss_type {loss}", "unset it")
        high = self.epsilon_high
        if loss in ("sapo", "vespo") and high is not None:
            yield Conflict(("method", "epsilon_high"), f"has no effect for loss_type {loss}", "unset it")
        if loss == "cispo" and (high is None or high < 1):
            what = "must be at least 1 for loss_type cispo, where it is the maximum policy ratio itself"
            yield Conflict(("method", "epsilon_high"), what, "set method.epsilon_high=5.0, as in ScaleRL")
