"""Loops of plain torch beside runs: the rows that a run took, and the loss and gradients of a step on them."""

from collections.abc import Iterator
from typing import Any

import torch

from tunekit.runs.run import Run


def batches_of(run: Run, size: int, num_epochs: int) -> Iterator[Any]:
    """Yield the rows of each step of a run, in its order."""
    from tunekit.data.prepare import read_dataset
    from tunekit.methods.run_trainer import Order

    rows = read_dataset(run.path / "data" / "train.arrow")
    for epoch in range(num_epochs):
        order = list(Order(len(rows), 0, repeats=False, shuffle=True, seed=run.plan.recipe.train.seed).of_epoch(epoch))
        for start in range(0, len(order), size):
            yield rows.select(order[start : start + size])


def add_gradients(model: Any, batch: Any) -> torch.Tensor:
    """Add the gradients of the mean loss over a batch's tokens, one row after the other, and return the loss."""
    total = sum(sum(label != -100 for label in row["labels"][1:]) for row in batch)
    mean = torch.zeros(())
    for row in batch:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100) / total
        loss.backward()
        mean += loss.detach()
    return mean
