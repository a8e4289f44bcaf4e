"""Recipe section and spec of process reward modelling."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.spec import LearningRate, MethodPasses, MethodSection, MethodSpec, PassInputs, StepSettings


class PRMMethod(MethodSection):
    """Process reward modeling: scores each step of an answer as good or bad (TRL's SFTTrainer)."""

    spec = MethodSpec(
        config=("trl", "trainer/sft_config.py", "SFTConfig"),
        row_formats=("stepwise_supervision",),
        trains_on="steps",
        learning_rate=LearningRate(1e-5, 1e-4, "reward models of Llama 2, arXiv 2307.09288"),
        metrics=("loss", "accuracy"),
        loss_description="This is a process reward model: it scores the steps of answers and does not generate. Losses "
        "are cross-entropies per step: ln 2 if both classes are equally likely. Accuracy is the share of steps whose "
        "likelier class is their label. Load it with `AutoModelForTokenClassification` and `num_labels=2`, an adapter "
        "on top with PEFT. The score of a step is the probability of class 1 at the last token of the separator after "
        "it (`step_separator` in `tokenizer_config.json`); steps and separators are tokenized one by one.",
        classifies="steps",
        settings_scale_loss=False,
        uses_tiled_head=False,
    )

    type: Literal["prm"] = "prm"
    """Process reward modeling, on completions with a label for each step (arXiv 2305.20050). The result scores steps
    and does not generate."""

    step_separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text after each step, at whose last token the step is scored. Saved with the model."""

    train_on_last_step_only: bool = False
    """Train on the label of the last step alone. Evaluation covers all steps."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's SFTConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    @property
    def step_settings(self) -> StepSettings:
        """Settings of steps."""
        return StepSettings(self.step_separator, self.train_on_last_step_only)

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        return MethodPasses(self.type, head="score")

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        steps = "the last step of a row is" if self.train_on_last_step_only else "steps are"
        return "prm", f"{steps} scored after {self.step_separator!r}; a score head replaces the LM head"
