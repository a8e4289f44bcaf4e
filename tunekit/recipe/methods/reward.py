"""Recipe section and spec of reward modelling."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.spec import LearningRate, MethodPasses, MethodSection, MethodSpec, PassInputs


class RewardMethod(MethodSection):
    """Reward modeling: a scalar score per answer, higher for chosen ones (TRL's RewardTrainer)."""

    spec = MethodSpec(
        config=("trl", "trainer/reward_config.py", "RewardConfig"),
        row_formats=("preference",),
        trains_on="pairs",
        learning_rate=LearningRate(1e-5, 1e-4, "Llama 2, arXiv 2307.09288"),
        metrics=("loss", "accuracy", "margin"),
        loss_description="This is a reward model: it scores texts and does not generate. Losses are Bradley-Terry: "
        "ln 2 if both answers have the same score. Accuracy is the share of pairs whose chosen answer scores "
        "higher, the margin the difference. Scores are comparable between answers to one prompt only. "
        "Load it with `AutoModelForSequenceClassification` and `num_labels=1`, an adapter on top with PEFT, and set "
        "`config.pad_token_id` to that of the tokenizer: a text is scored at its last token but that one.",
        classifies="text",
    )

    type: Literal["reward"] = "reward"
    """Reward modeling, on preference pairs (Bradley-Terry). The result scores texts and does not generate."""

    center_rewards_coefficient: Annotated[float | None, Field(gt=0)] = None
    """Coefficient of the penalty that centers rewards around 0 (arXiv 2312.09244)."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's RewardConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        return MethodPasses(self.type, sequences_per_row=2, head="score")

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        return "reward", "each row is two sequences; a score head replaces the LM head, so the model does not generate"
