"""Recipe section and spec of distillation from a teacher with another tokenizer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tunekit.recipe.methods.gkd import RowDistillationMethod
from tunekit.recipe.methods.spec import COMMON_CHECKS, LearningRate, MethodPasses, MethodSpec, OtherSections, PassInputs
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import Conflict


class GOLDMethod(RowDistillationMethod):
    """General on-policy logit distillation: a teacher with another tokenizer scores the same text in its own tokens."""

    spec = MethodSpec(
        config=("trl", "trainer/sft_config.py", "SFTConfig"),
        row_formats=("messages", "prompt_completion"),
        trains_on="tokens",
        learning_rate=LearningRate(2e-5, 2e-4, "TRL's SFTConfig"),
        metrics=("loss", "entropy"),
        # Steps on rows and on completions have losses of different sizes.
        health_checks=COMMON_CHECKS,
        loss_description="Losses are the distance from the teacher's probabilities, by piece of text that both models "
        "spell with whole tokens.",
        upstream_names=("_get_num_items_in_batch", "_set_signature_columns_if_needed", "_signature_columns"),
        masks_as_told=True,
        learns_distributions=True,
        uses_tiled_head=False,
        teacher_reads_own_tokens=True,
    )
    reads_rows_alone: ClassVar[bool] = True

    type: Literal["gold"] = "gold"
    """General on-policy logit distillation, from a teacher with another tokenizer, on conversations and prompts with
    completions (TRL's GOLD; universal logit distillation, arXiv 2402.12030)."""

    teacher: ModelSection
    """Teacher model, with another tokenizer. It reads the same messages by its own chat template. Both tokenizers must
    be byte-level BPE."""

    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Divergence of matched tokens, with `uld_use_hybrid_loss`: 0 is the forward, 1 the reverse Kullback-Leibler
    divergence, between them the generalized Jensen-Shannon divergence."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of both models in the distance."""

    kd_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of the distance in the loss; the rest is the weight of the negative log-likelihood of rows, in nats by
    piece of text."""

    uld_use_hybrid_loss: bool = False
    """Compare tokens that both vocabularies have by `beta`, and only the others by their sorted probabilities."""

    uld_hybrid_matched_weight: Annotated[float | None, Field(ge=0)] = None
    """Weight of matched tokens in the hybrid loss. Default: their share of the teacher's vocabulary."""

    uld_hybrid_unmatched_weight: Annotated[float | None, Field(ge=0)] = None
    """Weight of the other tokens in the hybrid loss. Default: their share of the teacher's vocabulary."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's SFTConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself, or that the distance ignores, are refused."""

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        return replace(super().passes(inputs), always_pads=True, sorts_probabilities=True)

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe, and settings of a hybrid loss that is not used."""
        yield from super().conflicts(others)
        data = others.data
        if data.streaming:
            what = "unsupported with method gold: rows are prepared in the tokens of both models"
            yield Conflict(("data", "streaming"), what, "unset it")
        if data.too_long == "truncate_turns":
            what = "cannot be truncate_turns with method gold: both models would read other turns"
            yield Conflict(("data", "too_long"), what, "use truncate or drop")
        weights = {name: dict(self)[name] for name in ("uld_hybrid_matched_weight", "uld_hybrid_unmatched_weight")}
        if not self.uld_use_hybrid_loss:
            unread = [name for name, weight in weights.items() if weight is not None]
            unread += ["beta"] if self.beta != type(self).model_fields["beta"].default else []
            for name in unread:
                what = "has no effect unless method.uld_use_hybrid_loss is set: sorted probabilities are compared"
                yield Conflict(("method", name), what, "unset it, or set method.uld_use_hybrid_loss=true")
        elif None in weights.values() and set(weights.values()) != {None}:
            missing = next(name for name, weight in weights.items() if weight is None)
            yield Conflict(("method", missing), "missing, but the other weight of the hybrid loss is set", "set both")
        elif set(weights.values()) == {0}:
            what = "0, as is the weight of other tokens: there is nothing to learn"
            yield Conflict(("method", "uld_hybrid_matched_weight"), what, "raise one of them")

    @classmethod
    def offers(cls, key: tuple[str, ...]) -> bool:
        """Return whether a field of the recipe may differ from its default with the method."""
        return super().offers(key) and key not in {("data", name) for name in ("packing", "padding_free", "streaming")}
