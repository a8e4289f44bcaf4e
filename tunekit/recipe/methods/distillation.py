"""Recipe section and spec of on-policy distillation."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tunekit.recipe.methods.on_policy import ANSWER_CHECKS, GenerationSection, OnPolicyMethod, TeacherMethod
from tunekit.recipe.methods.spec import LearningRate, MethodSpec
from tunekit.recipe.sections.model import ModelSection


class DistillationMethod(TeacherMethod, OnPolicyMethod):
    """On-policy distillation of a teacher model (TRL's DistillationTrainer)."""

    spec = MethodSpec(
        upstream_names=("_tool_call_loop", "_get_last_hidden_state"),
        config=("trl", "trainer/distillation_config.py", "DistillationConfig"),
        row_formats=("prompts",),
        trains_on="prompts",
        learning_rate=LearningRate(1e-6, 1e-5, "TRL's DistillationConfig"),
        metrics=("loss",),
        health_checks=ANSWER_CHECKS,
        loss_description="Losses are the divergence from the teacher, in nats per token of the model's completions.",
        media=("image",),
        learns_distributions=True,
        uses_tiled_head=False,
    )

    type: Literal["distillation"] = "distillation"
    """On-policy distillation, on prompts (arXiv 2306.13649)."""

    teacher: ModelSection
    """Teacher model, with the same vocabulary; for rows with images with the same image processor."""

    max_completion_length: Annotated[int, Field(gt=0)] = 512
    """Maximum completion length in tokens. Prompts get the rest of `data.max_length`."""

    beta: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Divergence from the teacher: 0 is the forward, 1 the reverse Kullback-Leibler divergence, 0.5 half of each."""

    generation: GenerationSection = GenerationSection()
    """Generation settings."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's DistillationConfig, by its field names. Checked against the installed version; arguments
    that tunekit sets itself are refused."""

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        choice = f"{self.type}, a completion of up to {self.max_completion_length} tokens"
        return choice, f"teacher {self.teacher.path} is loaded as a second model and scores each token"
