"""Recipe section and spec of online direct preference optimization."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.on_policy import GenerationSection, RewardedMethod, rewarded_spec
from tunekit.recipe.methods.spec import LearningRate


class OnlineDPOMethod(RewardedMethod):
    """Online direct preference optimization: generate answers, prefer the best rewarded to the worst of each prompt."""

    spec = rewarded_spec(
        config=("trl", "trainer/grpo_config.py", "GRPOConfig"),
        learning_rate=LearningRate(5e-7, 5e-6, "TRL's OnlineDPOConfig"),
        loss_description="Groups without a preference add 0 to the loss of online DPO; progress shows in the reward.",
        upstream_names=("_tool_call_loop",),
        disables_dropout=True,
    )
    always_scores_answers = True

    type: Literal["online_dpo"] = "online_dpo"
    """Online direct preference optimization, on prompts (arXiv 2402.04792)."""

    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss by its TRL name: `sigmoid` is DPO's, `ipo` that of arXiv 2310.12036."""

    num_generations: Annotated[int, Field(ge=2)] = 2
    """Completions per prompt, of which the one with the highest reward is preferred to the one with the lowest. Must
    divide `train.global_batch_size`."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """KL coefficient: the higher, the closer the model stays to the reference."""

    mask_truncated_completions: bool = False
    """Exclude completions that reach `max_completion_length` from preferences."""

    generation: GenerationSection = GenerationSection()
    """Generation settings."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's GRPOConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself, or that the loss ignores, are refused."""

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        choice, why = super().summary(reference)
        return choice, f"the best rewarded is preferred to the worst; {why}"
