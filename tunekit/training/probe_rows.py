"""The few rows that a model is checked with, before the first step and after the last."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

NUM_ROWS, ROW_TOKENS = 2, 32
"""Rows, and the largest number of tokens of each."""


@contextmanager
def in_evaluation(trainer: Any, model: "Module") -> Iterator[None]:
    """Put a model into evaluation mode without gradients, under the trainer's autocast."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            yield
    finally:
        model.train(was_training)


def probe_rows(trainer: Any, vocabulary: int) -> list[list[int]]:
    """Return token ids of `NUM_ROWS` rows of equal length: the first rows of the data, cut to `ROW_TOKENS`.

    Args:
        trainer: The trainer, with its data.
        vocabulary: Number of tokens to draw rows from where the data has none yet: streams and prompts as text.
    """
    return _first_tokens(trainer) or _spread_tokens(vocabulary)


def _first_tokens(trainer: Any) -> list[list[int]]:
    """Return the first tokens of the first rows, as many of each; nothing where rows are texts or a stream."""
    from datasets import Dataset

    rows = trainer.train_dataset
    if not isinstance(rows, Dataset):
        return []
    names = [name for name in ("input_ids", "prompt_ids", "chosen_ids", "completion_ids") if name in rows.column_names]
    first = rows.select(range(min(NUM_ROWS, len(rows))))
    tokens = [[token for name in names for token in row[name]][:ROW_TOKENS] for row in first]
    length = min(map(len, tokens), default=0)
    return [row[:length] for row in tokens] if length > 1 else []


def _spread_tokens(vocabulary: int) -> list[list[int]]:
    """Return rows of tokens from all over the vocabulary."""
    num = NUM_ROWS * ROW_TOKENS
    return [[vocabulary * place // num for place in range(row, num, NUM_ROWS)] for row in range(NUM_ROWS)]
