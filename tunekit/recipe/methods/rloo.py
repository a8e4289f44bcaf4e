"""Recipe section and spec of REINFORCE leave-one-out."""

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


class RLOOMethod(RewardedMethod):
    """REINFORCE leave-one-out: generate answers, prefer the rewarded (TRL's RLOOTrainer)."""

    spec = MethodSpec(
        config=("trl", "trainer/rloo_config.py", "RLOOConfig"),
        row_formats=("prompts",),
        trains_on="prompts",
        learning_rate=LearningRate(1e-6, 1e-5, "TRL's RLOOConfig"),
        metrics=REWARD_METRICS,
        health_checks=REWARD_CHECKS,
        loss_description="The loss of RLOO is near zero whatever is learned; the reward tells.",
        owned_args=REWARDED_ARGS,
        adds_router_loss=True,
        settings_scale_loss=False,
    )
    always_scores_answers = True

    type: Literal["rloo"] = "rloo"
    """REINFORCE leave-one-out, on prompts (arXiv 2402.14740)."""

    num_generations: Annotated[int, Field(ge=2)] = 2
    """Answers to each prompt, which are compared with each other. It divides `train.global_batch_size`."""

    beta: Annotated[float, Field(ge=0)] = 0.05
    """How strongly the model is held to what it was before training, as a part of the reward. 0: not at all."""

    normalize_advantages: bool = False
    """Divide what answers are preferred by through its spread."""

    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """How far a step may go from the model that gave the answers, as a share, before it counts no more."""

    epsilon_high: Annotated[float | None, Field(gt=0)] = None
    """The same upwards. Left out: `epsilon`."""

    mask_truncated_completions: bool = False
    """Leave answers that reach `max_completion_length` out of the loss."""

    generation: GenerationSection = GenerationSection()
    """How answers are generated."""

    trainer_args: dict[str, Any] = {}
    """Anything else for TRL's RLOOConfig, by its names. Checked against the fields of the installed version; what
    tunekit sets itself is refused."""
