"""Recipe section and spec of REINFORCE leave-one-out."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.on_policy import GenerationSection, PolicyGradientMethod, rewarded_spec
from tunekit.recipe.methods.spec import LearningRate


class RLOOMethod(PolicyGradientMethod):
    """REINFORCE leave-one-out: generate answers, reinforce those with higher rewards (TRL's RLOOTrainer)."""

    spec = rewarded_spec(
        config=("trl", "trainer/rloo_config.py", "RLOOConfig"),
        learning_rate=LearningRate(1e-6, 1e-5, "TRL's RLOOConfig"),
        loss_description="The loss of RLOO stays near zero; progress shows in the reward.",
        adds_router_loss=True,
        media=("image",),
    )
    always_scores_answers = True

    type: Literal["rloo"] = "rloo"
    """REINFORCE leave-one-out, on prompts (arXiv 2402.14740)."""

    num_generations: Annotated[int, Field(ge=2)] = 2
    """Completions per prompt, compared with each other. Must divide `train.global_batch_size`."""

    beta: Annotated[float, Field(ge=0)] = 0.05
    """KL coefficient, as part of the reward. 0: no reference model."""

    normalize_advantages: bool = False
    """Normalize advantages by their standard deviation."""

    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """PPO clip range."""

    epsilon_high: Annotated[float | None, Field(gt=0)] = None
    """Upper PPO clip range. Default: `epsilon`."""

    mask_truncated_completions: bool = False
    """Exclude completions that reach `max_completion_length` from the loss."""

    generation: GenerationSection = GenerationSection()
    """Generation settings."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's RLOOConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""
