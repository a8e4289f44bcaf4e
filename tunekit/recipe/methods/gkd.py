"""Recipe section and spec of generalized knowledge distillation.

And the common half of methods that distil on the rows of supervised fine-tuning and on the model's completions of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tunekit.recipe.methods.on_policy import SamplingSection, TeacherMethod
from tunekit.recipe.methods.spec import (
    COMMON_CHECKS,
    Generation,
    LearningRate,
    MethodPasses,
    MethodSpec,
    OtherSections,
    PassInputs,
)
from tunekit.recipe.sections.adapters import PromptTuningAdapter
from tunekit.recipe.sections.data import DataSection, each_source
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import Conflict


class RowDistillationMethod(TeacherMethod):
    """A method that learns from a teacher on conversations, and on completions that take the place of their answers."""

    reads_rows_alone: ClassVar[bool] = False
    """True if rows are never laid out in one, also where no completions are generated."""

    type: str
    """Name of the method."""

    teacher: ModelSection
    """Teacher model."""

    lmbda: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Student data fraction: probability that an optimizer step trains on completions which the model generates in
    place of the last trained turn of each row. 0: rows only, 1: completions only. Drawn from `train.seed` and the
    step."""

    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Divergence from the teacher: 0 is the forward, 1 the reverse Kullback-Leibler divergence, between them the
    generalized Jensen-Shannon divergence."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of both models in the divergence."""

    kd_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of the divergence in the loss; the rest is the weight of the negative log-likelihood of rows."""

    max_completion_length: Annotated[int, Field(gt=0)] = 128
    """Maximum length of generated completions in tokens; also cut at `data.max_length`."""

    generation: SamplingSection = SamplingSection()
    """Sampling of completions, with transformers."""

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        passes = super().passes(inputs)
        if not self.lmbda:
            return passes
        generation = Generation(inputs.global_batch_size, inputs.max_length, self.max_completion_length, 1)
        return replace(passes, generation=generation, always_pads=True)

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        why = f"teacher {self.teacher.path} is loaded as a second model and scores each token"
        if not self.lmbda:
            return f"{self.type}, on rows", why
        share = f"{self.lmbda:.0%} of steps on completions of up to {self.max_completion_length} tokens"
        return f"{self.type}, {share}", why

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and settings of completions that are not generated."""
        yield from super().conflicts(others)
        if isinstance(others.adapter, PromptTuningAdapter):
            what = f"prompt_tuning is unsupported with method {self.type}: the teacher has no virtual tokens"
            yield Conflict(("adapter", "type"), what, "use lora")
        if not self.lmbda:
            defaults = {name: type(self).model_fields[name].default for name in ("max_completion_length", "generation")}
            for name in [name for name, default in defaults.items() if dict(self)[name] != default]:
                yield Conflict(("method", name), "has no effect with lmbda 0: no completions", "unset it")
        elif self.kd_ratio < 1:
            what = "unsupported unless method.lmbda is 0: the model's own completions are no targets"
            yield Conflict(("method", "kd_ratio"), what, "unset it, or set method.lmbda=0")
        if self.reads_rows_alone:
            why = ": the teacher reads each conversation in its own tokens", "unset it"
            yield from self._conflicts_of_layout(others.data, *why)
        elif self.lmbda:
            why = " unless method.lmbda is 0: completions follow the prompt of a row", "unset it, or set method.lmbda=0"
            yield from self._conflicts_of_layout(others.data, *why)

    def _conflicts_of_layout(self, data: DataSection, why: str, hint: str) -> Iterator[Conflict]:
        """Yield settings by which rows have no prompt and answer of their own."""
        sources = [*each_source("train", data.train), *each_source("eval", data.eval)]
        learned = [(("loss_on",), data.loss_on), *(((*key, "loss_on"), source.loss_on) for key, source in sources)]
        rows: dict[tuple[str | int, ...], bool] = {("packing",): data.packing}
        rows["padding_free",] = data.padding_free is True
        rows |= {key: loss_on == "all" for key, loss_on in learned}
        for key in [key for key, is_set in rows.items() if is_set]:
            yield Conflict(("data", *key), f"unsupported with method {self.type}{why}", hint)


class GKDMethod(RowDistillationMethod):
    """Generalized knowledge distillation: a teacher scores the tokens of rows and of the model's own completions."""

    spec = MethodSpec(
        config=("trl", "trainer/sft_config.py", "SFTConfig"),
        row_formats=("messages", "prompt_completion", "text", "tokens"),
        trains_on="tokens",
        learning_rate=LearningRate(2e-5, 2e-4, "TRL's SFTConfig"),
        metrics=("loss", "entropy"),
        # Steps on rows and on completions have losses of different sizes.
        health_checks=COMMON_CHECKS,
        loss_description="Losses are the divergence from the teacher, in nats per trained token.",
        upstream_names=("_get_num_items_in_batch",),
        masks_as_told=True,
        media=("image",),
        learns_distributions=True,
        uses_tiled_head=False,
    )

    type: Literal["gkd"] = "gkd"
    """Generalized knowledge distillation, on conversations and other rows of sft (arXiv 2306.13649)."""

    teacher: ModelSection
    """Teacher model, with the same vocabulary; for rows with images with the same image processor."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's SFTConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself, or that the divergence ignores, are refused."""
