"""Common half of methods that compare the model with a reference, or answers with each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from tunekit.recipe.methods.spec import MethodPasses, MethodSection, OtherSections, PassInputs, ReferenceUse
from tunekit.recipe.sections.section import Conflict

PAIR_METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
"""Metrics that TRL's trainers log of better and worse answers."""

PAIR_WITHOUT_REFERENCE = "each row is two sequences; no reference"
MEAN_OVER_TOKENS = "the {} is averaged over the tokens of a micro-batch, so it depends slightly on the micro-batch size"


class ReferenceMethod(MethodSection):
    """A method whose rewards are how much likelier an answer is than to a reference, times beta."""

    if TYPE_CHECKING:
        beta: float
        precompute_ref_log_probs: bool

    @property
    def reference_use(self) -> ReferenceUse:
        """Use of a reference model."""
        return "beforehand" if self.precompute_ref_log_probs else "model"

    @property
    def likelihood_hint(self) -> str:
        """How to keep better answers likely, besides a lower rate and a higher beta."""
        return ""

    @property
    def has_plain_loss(self) -> bool:
        """True if the loss is -log sigmoid of the difference of rewards."""
        return False

    def conflicts(self, others: OtherSections) -> Iterator[Conflict]:
        """Yield conflicts with the rest of the recipe."""
        yield from super().conflicts(others)
        if self.precompute_ref_log_probs and others.data.streaming:
            what = "unsupported with data.streaming: the rows are unknown before training"
            yield Conflict(("method", "precompute_ref_log_probs"), what, "unset it")


class MarginMethod(MethodSection):
    """A method on pairs without a reference, whose margins are differences of log-probabilities, times beta."""

    if TYPE_CHECKING:
        beta: float

    @property
    def margin(self) -> Literal["per token", "total"]:
        """Log-probability that the loss compares: the mean of an answer's tokens, or their sum."""
        return "per token"

    def passes(self, inputs: PassInputs) -> MethodPasses:
        """Return the passes of an optimizer step."""
        return MethodPasses(self.type, sequences_per_row=2, head="whole")
