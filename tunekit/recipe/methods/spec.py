"""What every training method says about itself, and how the rest of the code asks for it.

A method is a section of the recipe with two halves. What never changes is its `spec`: row formats, TRL's classes,
metrics, health checks. What depends on the recipe's settings are methods of the section: conflicts, passes for the
planner, its words in the plan. The half that builds the trainer is `tunekit.methods.NAME.build`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from tunekit.recipe.methods.passes import MethodPasses, PassInputs
from tunekit.recipe.sections.adapters import Adapter, LoraAdapter
from tunekit.recipe.sections.data import DataSection, SourceFormat, each_source
from tunekit.recipe.sections.output import OutputSection
from tunekit.recipe.sections.section import Conflict, Section
from tunekit.recipe.sections.train import TrainSection

TrainsOn = Literal["tokens", "pairs", "answers", "prompts"]
"""What a row is to a method: tokens that tunekit has made, a pair of answers, an answer that is good or bad, or a
prompt that the model answers while it is trained."""

ReferenceUse = Literal["none", "model", "beforehand"]
"""Use of a reference model: none, in every step, or log-probabilities that are computed before training."""

COMMON_CHECKS = ("gradient_grows", "throughput_stalls")
"""Health checks of every method, by their names in `tunekit.training.health_warnings`."""

LOSS_CHECKS = ("loss_rises", "loss_spikes", *COMMON_CHECKS)
"""Health checks of methods whose loss tells whether they learn."""


class LearningRate(NamedTuple):
    """Peak learning rates of a method where the recipe gives none, and where they are from."""

    full: float
    lora: float
    """Of lora and qlora: ten times that of all weights, as LoRA takes (arXiv 2106.09685)."""
    source: str
    """Of the rate for all weights."""


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """Facts about a training method that no setting changes."""

    config: tuple[str, str, str]
    """TRL's config: package, file in it, class. The trainer stands beside it, by the same name."""
    row_formats: tuple[SourceFormat, ...]
    """Formats of rows that it learns from."""
    trains_on: TrainsOn
    learning_rate: LearningRate
    metrics: tuple[str, ...]
    """Logged metrics by which runs may be ranked, in TRL's names."""
    loss_description: str
    """Meaning of the losses, for the model card."""
    health_checks: tuple[str, ...] = LOSS_CHECKS
    """Names of the functions in `tunekit.training.health_warnings` that watch a run."""
    owned_args: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Arguments of TRL's config that tunekit sets itself for this method, and what to use in a recipe."""
    upstream_names: tuple[str, ...] = ()
    """Private names of TRL's trainer that tunekit needs for this method alone."""
    is_experimental: bool = False
    """True if the trainer is of `trl.experimental`, and says so in its log."""
    stores_metrics: bool = False
    """True if the trainer keeps what it measures in `_stored_metrics`, and counts no tokens."""
    classifies: bool = False
    """True if the model gives a text a score, and does not write."""
    adds_router_loss: bool = False
    """True if TRL's trainer adds the auxiliary loss of routers, for each model that has one (TRL 1.16)."""
    settings_scale_loss: bool = True
    """True if losses and margins of runs with other settings are other quantities."""
    masks_as_told: bool = False
    """True if rows are packed and masked as the data section says."""
    uses_tiled_head: bool = True
    """True if tunekit's head can take the place of one that scores tokens in tiles."""


class MethodSection(Section):
    """A training method. Each has a literal `type`, its name in recipes, and `trainer_args` for TRL's config."""

    shorthand = "type"
    spec: ClassVar[MethodSpec]

    if TYPE_CHECKING:  # Each method declares them itself, so that they stand first and last among its fields.
        type: str
        trainer_args: dict[str, Any]

    def default_learning_rate(self, adapter: str) -> float:
        """Return the peak learning rate of a recipe that gives none, by `adapter.type`."""
        rates = self.spec.learning_rate
        return rates.full if adapter == "full" else rates.lora

    @property
    def reference_use(self) -> ReferenceUse:
        """Use of a reference model."""
        return "none"

    @property
    def couples_rows(self) -> bool:
        """True if the loss of a row depends on which others share its micro-batch, beyond a mean over them."""
        return False

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        return MethodPasses(self.type)

    def summary(self, reference: str) -> tuple[str, str] | None:
        """Return the choice and the reason of a plan; None where a row goes through the model once.

        Args:
            reference: The reference of the run, in words.
        """
        return None

    def balance(self, num_rows: int, num_good: int) -> tuple[str, str] | None:
        """Return how good and bad answers are balanced, choice and reason of a plan; None where nothing depends on it.

        Args:
            num_rows: Rows for training.
            num_good: Good answers among them.
        """
        return None

    def conflicts(
        self, data: DataSection, train: TrainSection, adapter: Adapter, output: OutputSection
    ) -> Iterator[Conflict]:
        """Yield the fields of a recipe that do not go together with the method or with each other under it."""
        if not self.spec.masks_as_told:
            yield from self._conflicts_of_rows(data)
        if self.spec.trains_on in ("pairs", "answers"):
            yield from self._conflicts_of_dropout(adapter)
        if self.spec.classifies and output.sample_prompts:
            what = f"means nothing with method {self.type}, whose model judges and does not answer"
            yield Conflict(("output", "sample_prompts"), what, "leave it out")

    def _conflicts_of_rows(self, data: DataSection) -> Iterator[Conflict]:
        """Yield settings of rows that TRL's trainer would not follow, as it lays them out itself."""
        with_it = f"with method {self.type}"
        if data.packing:
            yield Conflict(("data", "packing"), f"cannot be true {with_it}", "leave it out")
        if data.padding_free is True:
            yield Conflict(("data", "padding_free"), f"cannot be true {with_it}: TRL pads its batches", "leave it out")
        sources = [
            *each_source("train", data.train),
            *(each_source("eval", data.eval) if data.eval is not None else ()),
        ]
        settings = [(("loss_on",), data.loss_on), *(((*key, "loss_on"), source.loss_on) for key, source in sources)]
        for key, loss_on in settings:
            if loss_on not in (None, "assistant"):
                what = f"cannot be {loss_on} {with_it}, which learns from whole answers and from nothing else"
                yield Conflict(("data", *key), what, "leave it out")

    def _conflicts_of_dropout(self, adapter: Adapter) -> Iterator[Conflict]:
        """Yield the dropout of an adapter, which TRL switches off for methods that compare answers."""
        if not isinstance(adapter, LoraAdapter) or not adapter.dropout:
            return
        if self.trainer_args.get("disable_dropout", True):
            what = f"means nothing with method {self.type}, for which TRL switches dropout off"
            if self.reference_use != "none":
                what += ": it would move the model from itself"
            hint = "leave it out, or set method.trainer_args.disable_dropout=false"
            yield Conflict(("adapter", "dropout"), what, hint)

    @classmethod
    def offers(cls, key: tuple[str, ...]) -> bool:
        """Return whether a field of the recipe may differ from its default with the method; a form hides the others.

        Args:
            key: The field's key without positions in lists.
        """
        if key[0] == "data" and key[-1] in ("packing", "padding_free", "loss_on"):
            return cls.spec.masks_as_told
        return key != ("output", "sample_prompts") or not cls.spec.classifies
