"""Recipe section and spec of classification."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tunekit.recipe.methods.spec import (
    LearningRate,
    MethodPasses,
    MethodSection,
    MethodSpec,
    OtherSections,
    PassInputs,
    ProblemType,
    ScoreHead,
)
from tunekit.recipe.sections.data import DataSection
from tunekit.recipe.sections.section import Conflict


def _as_text(value: Any) -> Any:
    """Return a label that YAML reads as an integer as text: `[0, 1]` are names as `['0', '1']` are."""
    return str(value) if type(value) is int else value


Label = Annotated[str, Field(min_length=1), BeforeValidator(_as_text)]


class ClassificationMethod(MethodSection):
    """Classification: a score per label for each text or conversation (a sequence classification head)."""

    spec = MethodSpec(
        config=("trl", "trainer/sft_config.py", "SFTConfig"),
        row_formats=("classification",),
        trains_on="labels",
        learning_rate=LearningRate(1e-5, 1e-4, "reward models of Llama 2, arXiv 2307.09288"),
        metrics=("loss", "accuracy", "f1"),
        loss_description="This is a classifier: it scores the labels of texts and does not generate. Losses are "
        "cross-entropies per text, or binary cross-entropies per text and label where a text may have several labels. "
        "Accuracy is the share of texts with exactly the right labels, f1 the mean F1 score of the labels. Load it "
        "with `AutoModelForSequenceClassification`, an adapter on top of its base model, loaded with the same number "
        "of labels, with PEFT, and set `config.pad_token_id` to that of the tokenizer: a text is scored at its last "
        "token but that one.",
        classifies="classes",
        settings_scale_loss=False,
        uses_tiled_head=False,
    )

    type: Literal["classification"] = "classification"
    """Classification of texts or conversations by their labels. The result scores texts and does not generate."""

    labels: Annotated[list[Label], Field(min_length=2)] | None = None
    """Names of the labels, in the order of their logits: `[negative, positive]`. Rows name their label, or give its
    position, from 0; an integer is a name where any label is named by one. Saved as `id2label` with the model."""

    num_labels: Annotated[int, Field(ge=2)] | None = None
    """Number of labels, for rows that give positions. Set either `labels` or `num_labels`."""

    problem_type: ProblemType = "single_label_classification"
    """`single_label_classification`: one label per row, cross-entropy; `multi_label_classification`: a list of labels
    per row, which may be empty, binary cross-entropy. Transformers' names."""

    trainer_args: dict[str, Any] = {}
    """Other arguments of TRL's SFTConfig, by its field names. Checked against the installed version; arguments that
    tunekit sets itself are refused."""

    @property
    def score_head(self) -> ScoreHead:
        """The head, with a score for each label."""
        return ScoreHead("classes", self._num_labels, tuple(self.labels or ()), self.problem_type)

    @property
    def _num_labels(self) -> int:
        return len(self.labels) if self.labels is not None else self.num_labels or 0

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        return MethodPasses(self.type, head="score")

    def summary(self, reference: str) -> tuple[str, str]:
        """Return the choice and the reason of a plan."""
        labels = "several labels per row" if self.score_head.is_multi_label else "one label per row"
        return "classification", f"{labels}, of {self._num_labels}; a score head replaces the LM head"

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield what is missing of the labels, and fields of other sections that do not go with the method."""
        if self.labels is None and self.num_labels is None:
            hint = "list them, such as labels: [negative, positive], or set method.num_labels"
            yield Conflict(("method", "labels"), "missing", hint)
        elif self.labels is not None and self.num_labels is not None:
            yield Conflict(("method", "num_labels"), "method.labels already gives the number of labels", "unset it")
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            twice = next(label for label in self.labels if self.labels.count(label) > 1)
            yield Conflict(("method", "labels"), f"{twice!r} is listed twice", "list each label once")
        yield from super().conflicts(others)

    def _conflicts_of_length(self, data: DataSection) -> Iterator[Conflict]:
        if data.too_long not in ("truncate", "drop"):
            what = f"{data.too_long} is unsupported with method {self.type}"
            yield Conflict(("data", "too_long"), what, "use truncate or drop")

    @classmethod
    def offers(cls, key: tuple[str, ...]) -> bool:
        """Return whether a field of the recipe may differ from its default with the method; a form hides the others.

        Args:
            key: The field's key without positions in lists.
        """
        return key == ("data", "too_long") or super().offers(key)
