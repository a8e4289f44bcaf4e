"""Rows of which some tokens are scored, and not predicted: steps of answers, or whole texts."""

from typing import TYPE_CHECKING, Protocol

from tunekit.data.tokenization.alignment import EncodeLabels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LabeledTokens(Protocol):
    """Tokens of rows with labels: `StepTokens` or `ClassTokens`."""

    column: str
    """Column of what is scored."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Tokenizer of the model."""

    @property
    def of_row(self) -> EncodeLabels:
        """Tokens and labels of a row that is trained on."""

    @property
    def of_all(self) -> "LabeledTokens":
        """The same with all labels, as for evaluation."""

    @property
    def by_split(self) -> dict[str, EncodeLabels]:
        """Tokens and labels of rows, by split."""
