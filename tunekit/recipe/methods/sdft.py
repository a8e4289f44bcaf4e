"""Recipe section and spec of self-distillation fine-tuning."""

from collections.abc import Iterator
from dataclasses import replace
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from tunekit.recipe.methods.on_policy import ANSWER_CHECKS, GenerationSection, OnPolicyMethod
from tunekit.recipe.methods.spec import LearningRate, MethodPasses, MethodSpec, OtherSections, PassInputs, ReferenceUse
from tunekit.recipe.sections.section import Conflict


def _checked_template(text: str) -> str:
    """Return a template with both of its fields.

    Raises:
        ValueError: It lacks one, has another one, or cannot be read.
    """
    try:
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"cannot be read as a template: {error}; write {{{{ and }}}} for braces") from None
    unknown = [name for name in names if name not in ("prompt", "privileged_context")]
    if unknown:
        raise ValueError(f"has an unknown field {{{unknown[0]}}}; it has {{prompt}} and {{privileged_context}}")
    if "privileged_context" not in names:
        raise ValueError("lacks {privileged_context}: the teacher would read what the model reads")
    return text


class SDFTMethod(OnPolicyMethod):
    """Self-distillation fine-tuning: the model, shown a demonstration, teaches itself to answer without it."""

    spec = MethodSpec(
        upstream_names=("_tool_call_loop", "_tokenize_prompts"),
        config=("trl", "trainer/distillation_config.py", "DistillationConfig"),
        row_formats=("prompts", "messages", "prompt_completion"),
        trains_on="prompts",
        learning_rate=LearningRate(1e-6, 1e-5, "TRL's DistillationConfig"),
        metrics=("loss", "entropy", "completions/mean_length"),
        health_checks=ANSWER_CHECKS,
        loss_description="Losses are the divergence from the model with the demonstration, in nats per token of the "
        "model's completions.",
        learns_distributions=True,
        uses_tiled_head=False,
        disables_dropout=True,
    )

    type: Literal["sdft"] = "sdft"
    """Self-distillation fine-tuning (arXiv 2601.19897), on prompts with a column `privileged_context`, or on
    conversations, whose last answer is the demonstration."""

    teacher_model_kind: Literal["base", "live"] = "base"
    """Teacher: the model before training (`base`), or as it is at each step (`live`)."""

    teacher_prompt_template: Annotated[str, AfterValidator(_checked_template)] = "{prompt}\n\n{privileged_context}"
    """The teacher's prompt in place of the last user message, with `{prompt}` and `{privileged_context}`."""

    max_completion_length: Annotated[int, Field(gt=0)] = 256
    """Maximum completion length in tokens. The teacher's prompts get the rest of `data.max_length`."""

    num_loss_tokens_to_skip: Annotated[int, Field(ge=0)] = 0
    """First tokens of each completion to exclude from the loss, where the teacher refers to the demonstration."""

    beta: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Divergence from the teacher: 0 is the forward, 1 the reverse Kullback-Leibler divergence, between them the
    generalized Jensen-Shannon divergence."""

    generation: GenerationSection = GenerationSection()
    """Generation settings. `temperature` is also that of the divergence."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's DistillationConfig, by its field names. Checked against the installed version; arguments
    that tunekit sets itself are refused."""

    @property
    def reference_use(self) -> ReferenceUse:
        """Use of a reference model."""
        return "model" if self.teacher_model_kind == "base" else "none"

    @property
    def teacher_template(self) -> str:
        """Template of the prompts that the model reads as its own teacher."""
        return self.teacher_prompt_template

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """Columns of prompts of a prepared row, each of which has to leave room for a completion."""
        return ("prompt", "teacher_prompt")

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        return replace(
            super().passes(inputs),
            keeps_reference=inputs.is_full and self.teacher_model_kind == "base",
            refers_in_micro_batch=True,
            compares_with_itself=True,
            num_forwards=1.0,
        )

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        teacher = "the model itself" if self.teacher_model_kind == "live" else reference
        choice = f"{self.type}, a completion of up to {self.max_completion_length} tokens"
        return choice, f"scored by {teacher}, which is shown the demonstration"

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and between settings of the method."""
        yield from super().conflicts(others)
        if self.num_loss_tokens_to_skip >= self.max_completion_length:
            what = f"{self.num_loss_tokens_to_skip} leaves nothing of method.max_completion_length "
            yield Conflict(("method", "num_loss_tokens_to_skip"), f"{what}{self.max_completion_length}", "lower it")
