"""Recipe section and spec of energy-based fine-tuning."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.on_policy import (
    REWARD_CHECKS,
    REWARD_METRICS,
    GenerationSection,
    PolicyGradientMethod,
    rewarded_spec,
)
from tunekit.recipe.methods.spec import LearningRate, MethodPasses, OtherSections, PassInputs, ReferenceUse
from tunekit.recipe.sections.section import Conflict

EmbedMethod = Literal["last_token", "mean_pooling", "completion_mean", "concat"]
"""Pooling of hidden states into an embedding, by Axolotl's names."""

FEATURES = "features"
"""Name of the reward of features in metrics."""

CFM_LOSS = "ebft/cfm_loss"
"""Metric of the feature-matching loss."""

_METRICS = (*REWARD_METRICS, "ebft/alignment", "ebft/diversity", CFM_LOSS)
_CHECKS = tuple(check for check in REWARD_CHECKS if check != "reward_falls")


class EBFTMethod(PolicyGradientMethod):
    """Energy-based fine-tuning: generate answers, reinforce those with features like the row's own answer."""

    spec = rewarded_spec(
        config=("trl", "trainer/grpo_config.py", "GRPOConfig"),
        row_formats=("prompts", "messages", "prompt_completion"),
        learning_rate=LearningRate(1e-6, 1e-5, "that of GRPO: DeepSeekMath, arXiv 2402.03300"),
        loss_description="The loss of EBFT stays near zero; progress shows in ebft/cfm_loss, the squared distance of "
        "the mean embedding of a prompt's completions from that of the row's answer.",
        metrics=_METRICS,
        health_checks=_CHECKS,
        upstream_names=("_entropy_bonus_enabled", "_tokenize_prompts", "_tool_call_loop"),
        adds_router_loss=True,
    )
    trl_loads_reference = False

    type: Literal["ebft"] = "ebft"
    """Energy-based fine-tuning by feature matching (arXiv 2603.12248), on prompts with a column `ground_truth`, or on
    conversations, whose last answer is matched."""

    feature_layers: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)] = [0.25, 0.5, 0.75]
    """Layers of the model before training whose hidden states are compared, as fractions of its depth, rounded down.
    They are concatenated."""

    embed_method: EmbedMethod = "last_token"
    """Pooling of hidden states into an embedding: that of the last token (`last_token`), their mean over prompt and
    answer (`mean_pooling`) or over the answer (`completion_mean`), or those at a quarter, half and three quarters of
    prompt and answer (`concat`). End tokens of answers are excluded."""

    use_whitening: bool = False
    """Whiten the embeddings of each group by the singular value decomposition of those of its completions, instead of
    normalizing them. The diversity penalty is then zero unless completions of a group are linearly dependent."""

    alignment_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the similarity to the row's answer, in the reward twice its product with the cosine."""

    diversity_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the similarity to other completions of the prompt, in the reward minus twice its product with their
    mean inner product. 0: none."""

    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = "dapo"
    """Loss by its TRL name; they differ in normalization."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Normalization of advantages after subtracting the group mean: by the standard deviation of the group, of the
    batch, or none. The paper has none."""

    epsilon: Annotated[float, Field(gt=0)] = 0.2
    """PPO clip range."""

    epsilon_high: Annotated[float | None, Field(gt=0)] = None
    """Upper PPO clip range. Default: `epsilon`."""

    mask_truncated_completions: bool = False
    """Exclude completions that reach `max_completion_length` from the loss."""

    generation: GenerationSection = GenerationSection()
    """Generation settings."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's GRPOConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    @property
    def best_metric(self) -> str:
        """Metric of evaluations that tells the best checkpoint, without their prefix.

        The mean reward is none: it compares completions with others of the same model, and is 0 for a model that
        always gives the row's answer.
        """
        return "reward" if self.rewards else CFM_LOSS

    @property
    def own_rewards(self) -> tuple[str, ...]:
        """Names of rewards that the method itself gives, each with weight 1."""
        return (FEATURES,)

    @property
    def matches_answers(self) -> bool:
        """True if completions are compared with the answers of the rows."""
        return True

    @property
    def reference_use(self) -> ReferenceUse:
        """Use of a reference model: its hidden states are the features."""
        return "model"

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        passes, steps = super().passes(inputs), self.steps_per_generation
        # Features of each completion and, once for a group, of the row's answer.
        num_features = 1 + 1 / self.num_generations
        return replace(
            passes,
            keeps_reference=inputs.is_full,
            num_forwards=passes.num_forwards + num_features / steps,
            num_feature_layers=len(self.feature_layers),
            reference_passes=num_features + (self.beta > 0),
        )

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        choice, why = super().summary(reference)
        layers = ", ".join(f"{fraction:g}" for fraction in self.feature_layers)
        features = f"rewarded by the similarity of features with the row's answer, of layers at {layers} of the depth"
        kept = why if self.beta else f"{why} for the KL term"
        return choice, f"{features}: {reference}; {kept}"

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and between settings of the method."""
        yield from super().conflicts(others)
        if not self.alignment_coef and not self.diversity_coef and not self.rewards:
            what = "0 together with method.diversity_coef: all rewards would be zero"
            yield Conflict(("method", "alignment_coef"), what, "raise one of them")
