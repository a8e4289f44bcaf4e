"""Tokens of texts with labels, and the labels as a classifier's loss takes them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.row_formats import BadRow, Row, counted, described, nearest, shortened
from tunekit.data.packing.sequences import IGNORED
from tunekit.data.sources.rows import Rows
from tunekit.data.tokenization.alignment import EncodeLabels, prompt_tokens
from tunekit.data.tokenization.steps import StepTokens
from tunekit.recipe.methods.spec import ScoreHead

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_NAMES_SHOWN = 12


@dataclass(frozen=True)
class ClassTokens:
    """Tokens of texts with labels.

    Attributes:
        tokenizer: Tokenizer of the model.
        head: The labels.
        max_length: Longest text, in tokens; longer ones are cut at their ends.
    """

    tokenizer: "PreTrainedTokenizerBase"
    head: ScoreHead
    max_length: int

    column = "prompt"
    """Column of what is scored."""

    @property
    def of_all(self) -> "ClassTokens":
        """The same: no label is left out of training."""
        return self

    @property
    def by_split(self) -> dict[str, EncodeLabels]:
        """Tokens and labels of rows, by split."""
        return {"train": self.of_row, "eval": self.of_row}

    def of_row(self, row: Row) -> tuple[int, list[int], list[int]]:
        """Return 0, the tokens of a row, whole, and the label of each: -100, but at the last one, where it is scored.

        Args:
            row: Columns `prompt` and `label`.

        Raises:
            BadRow: The label is none of the head's.
        """
        positions = self.positions(row["label"])
        # A conversation that the assistant ends is scored as it is.
        is_asked = isinstance(row["prompt"], str) or row["prompt"][-1]["role"] != "assistant"
        ids = list(prompt_tokens(row, self.tokenizer, "a row", add_generation_prompt=is_asked))
        return 0, ids, [IGNORED] * (len(ids) - 1) + [positions[0] if positions else 0]

    def target(self, row: Row) -> int | list[float]:
        """Return the label of a row: its position, or 1 or 0 for each label where a row may have several."""
        positions = self.positions(row["label"])
        if not self.head.is_multi_label:
            return positions[0]
        return [float(index in positions) for index in range(self.head.num_labels)]

    def of_rows(self, rows: "datasets.Dataset") -> "datasets.Dataset":
        """Rows as columns `input_ids`, cut, and `labels`, as in `target`."""

        def columns(row: Row) -> dict[str, Any]:
            return {"input_ids": self.of_row(row)[1][: self.max_length], "labels": self.target(row)}

        return rows.map(columns, remove_columns=rows.column_names).with_format(None)

    def positions(self, label: Any) -> list[int]:
        """Return the positions of a row's labels.

        Args:
            label: A name or a position, or a list of them where a row may have several.

        Raises:
            BadRow: It is none of the head's.
        """
        if isinstance(label, list) == self.head.is_multi_label:
            positions = [self._position(entry) for entry in (label if isinstance(label, list) else [label])]
            if len(set(positions)) < len(positions):
                # So has a list of 1 or 0 for each label, which would be read as positions.
                twice = next(index for index in positions if positions.count(index) > 1)
                raise BadRow(f"label names {self._name(twice)} twice; list the labels that a row has, each once")
            return positions
        if isinstance(label, list):
            problem = f"label is a list of {counted(len(label), 'label')}"
            raise BadRow(f"{problem}; set method.problem_type=multi_label_classification")
        raise BadRow(f"label must be a list of labels (multi_label_classification), got {described(label)}")

    def notes(self, sources: Iterable[Rows]) -> Iterator[str]:
        """Yield notes on the rows to train on: how many have each label, and labels that none has."""
        counts: Counter[int] = Counter()
        for rows in sources:
            for row in rows.rows:
                counts.update(set(self.positions(row["label"])))
        shown = [f"{self._name(index)} {number:,}" for index, number in counts.most_common(_NAMES_SHOWN)]
        more = len(counts) - len(shown)
        yield f"labels: {', '.join(shown)}{f' and {more} more' if more > 0 else ''}"
        missing = [self._name(index) for index in range(self.head.num_labels) if not counts[index]]
        if missing:
            names = ", ".join(missing[:_NAMES_SHOWN]) + (", ..." if len(missing) > _NAMES_SHOWN else "")
            yield f"no training row has the label{'s' * (len(missing) > 1)} {names}"

    @cached_property
    def _names(self) -> dict[str, int]:
        names = self.head.labels or tuple(map(str, range(self.head.num_labels)))
        return {name: index for index, name in enumerate(names)}

    @cached_property
    def _are_numbers(self) -> bool:
        """True if a label is named by a number, so that numbers in rows are names and not positions."""
        return any(name.lstrip("-").isdigit() for name in self._names)

    def _name(self, index: int) -> str:
        return self.head.labels[index] if self.head.labels else str(index)

    def _position(self, entry: Any) -> int:
        if isinstance(entry, bool):
            entry = str(entry).lower() if {"true", "false"} & self._names.keys() else int(entry)
        if isinstance(entry, int) and not self._are_numbers and 0 <= entry < self.head.num_labels:
            return entry
        position = self._names.get(str(entry))
        if position is not None:
            return position
        *names, last = map(shortened, list(self._names)[:_NAMES_SHOWN])
        listed = f"{', '.join(names)}{', ...' if len(self._names) > _NAMES_SHOWN else ' or'} {last}"
        near = nearest(str(entry), self._names)
        hint = f"did you mean '{near}'?" if near is not None else "set method.labels"
        if not self.head.labels:
            listed, hint = f"0 to {self.head.num_labels - 1}", "set method.labels, or raise method.num_labels"
        raise BadRow(f"label must be {listed}, got {shortened(str(entry))}; {hint}")


LabeledTokens = StepTokens | ClassTokens
"""Tokens of rows of which some tokens are scored and none is predicted: steps of answers, or whole texts."""
