"""Tokens of answers that are lists of steps, and where each step is scored.

Each step is tokenized by itself, and so is the separator behind it, as TRL's former PRMTrainer did: the last token of
the separator is that of the step's label. So a step has the same tokens, whatever comes before and behind it, and a
text that is divided at the separator has those that its steps were trained with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tunekit.data.formats.row_formats import Row
from tunekit.data.packing.sequences import IGNORED
from tunekit.data.tokenization.alignment import EncodeLabels, prompt_tokens
from tunekit.errors import DataError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

SEPARATOR_KEY = "step_separator"
"""Key of the separator in the `tokenizer_config.json` of a model that scores steps."""


@dataclass(frozen=True)
class StepTokens:
    """Tokens of steps.

    Attributes:
        tokenizer: Tokenizer of the model.
        separator: Text behind each step.
        only_last: Whether labels of all steps but the last are left out.
    """

    tokenizer: "PreTrainedTokenizerBase"
    separator: str
    only_last: bool = False

    column = "completions"
    """Column of what is scored."""

    @property
    def of_all(self) -> "StepTokens":
        """The same with the labels of all steps, as for evaluation."""
        return replace(self, only_last=False)

    @property
    def by_split(self) -> dict[str, EncodeLabels]:
        """Tokens and labels of rows, by split."""
        return {"train": self.of_row, "eval": self.of_all.of_row}

    def check(self) -> None:
        """Check that the separator has a token, at which a step is scored.

        Raises:
            DataError: It has none.
        """
        if not self._ids(self.separator):
            problem = f"method.step_separator: the tokenizer makes no token of {self.separator!r}"
            raise DataError(problem, hint="set another separator")

    def encode(self, prompt_ids: Sequence[int], steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt with steps, and for each step the place where it is scored.

        Args:
            prompt_ids: Tokens of the prompt.
            steps: Texts of the steps.
        """
        ids, places, behind = list(prompt_ids), list[int](), self._ids(self.separator)
        for step in steps:
            ids += [*self._ids(step), *behind]
            places.append(len(ids) - 1)
        return ids, places

    def of_row(self, row: Row) -> tuple[int, list[int], list[int]]:
        """Return the number of tokens of a row's prompt, the tokens of all, and the label of each: -100 for none.

        Args:
            row: Columns `prompt`, `completions` and `labels`.
        """
        prompt_ids = prompt_tokens(row, self.tokenizer, "a row")
        ids, places = self.encode(prompt_ids, row["completions"])
        labels = [IGNORED] * len(ids)
        for place, label in list(zip(places, row["labels"], strict=True))[-1 if self.only_last else 0 :]:
            labels[place] = int(label)
        return len(prompt_ids), ids, labels

    def of_rows(self, rows: "datasets.Dataset") -> "datasets.Dataset":
        """Rows as columns `input_ids` and `labels`: 1 and 0 at places of steps, -100 elsewhere."""

        def columns(row: Row) -> dict[str, list[int]]:
            _, ids, labels = self.of_row(row)
            return {"input_ids": ids, "labels": labels}

        return rows.map(columns, remove_columns=rows.column_names).with_format(None)

    def split(self, text: str) -> list[str]:
        """Return the steps of a text, without blank ones."""
        return [step for step in text.split(self.separator) if step.strip()]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
