"""Small runs whose rows are all of one length, for what saves activations."""

from pathlib import Path
from typing import Any

import tunekit
from tests.tiny import save_chats, save_tiny_model
from tunekit.runs.run import Run

TOKENS = 64
"""Tokens of a row."""


def save_inputs(folder: Path, *, hidden: int, layers: int) -> Path:
    """Save a tiny model and rows of more than 64 tokens, and return their folder."""
    save_tiny_model(folder / "model", hidden=hidden, layers=layers)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is " * 20) for n in range(16)))
    return folder


def train(folder: Path, name: str, *, adapter: str, kernels: str = "auto", **changes: Any) -> Run:
    """Train three steps of two micro-batches, with these changes of the train section."""
    recipe = {
        "model": {"path": str(folder / "model"), "dtype": "float32", "kernels": kernels},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": TOKENS},
        "adapter": adapter,
        "train": {"max_steps": 3, "global_batch_size": 4, "micro_batch_size": 2, "save_steps": 1, **changes},
        "output": {"dir": str(folder / name), "sample_prompts": []},
    }
    return tunekit.train(recipe)
