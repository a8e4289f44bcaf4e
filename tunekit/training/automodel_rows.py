"""Rows of a run as NeMo Automodel takes them, in the order in which the run's own trainer would take them.

Automodel's losses shift no labels, so labels are the tokens that follow. Its sampler gives process `r` of `n` the rows
`r`, `r + n`, ...; a step takes as many rows as its batch has.
"""

import math
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from tunekit.data.prepare import read_dataset
from tunekit.methods.run_trainer import Order
from tunekit.planner.plan import Plan
from tunekit.runs.prepared_data import FILES
from tunekit.runs.run import Run

PADDING = 0
"""Token of padding: any one, as nothing attends to it."""

Place = int | None
"""Place of a row in its file; None for an empty one that fills a step."""


class TokenRows(Dataset[dict[str, Any]]):
    """Rows of all steps of a training or of an evaluation.

    Behind the rows of each epoch, and behind those of an evaluation, empty ones fill the last step.

    Args:
        run_folder: The run's folder.
        split: `train` or `eval`.
        first_step: Steps of a training whose rows are left out, as they were trained before.
    """

    def __init__(self, run_folder: str, split: str, first_step: int = 0) -> None:
        plan = Run(run_folder).plan
        self.rows = read_dataset(Path(run_folder) / "data" / FILES[split])
        self.batch_size = plan.micro_batch_size * plan.layout.num_batches
        if split == "train" or plan.layout.pp_size > 1:
            self.batch_size *= plan.gradient_accumulation_steps
        self.num_tokens_before = 0
        """Tokens of the rows that are left out."""
        self.places = self._filled(list(range(len(self.rows))))
        if split == "train":
            self.lengths = [len(ids) for ids in self.rows["input_ids"]]
            places = self._places_of_steps(plan)
            first = first_step * self.batch_size
            self.num_tokens_before = self._num_tokens(places[:first])
            self.places = places[first:]

    def _places_of_steps(self, plan: Plan) -> list[Place]:
        """Return the places of the rows of every step."""
        assert plan.schedule is not None
        num_rows = plan.schedule.num_steps * self.batch_size
        num_epochs = math.ceil(num_rows / len(self.places))
        data, seed = plan.recipe.data, plan.recipe.train.seed
        order = Order(len(self.rows), 0, repeats=False, shuffle=data.shuffle, seed=seed)
        epochs = (self._filled(list(order.of_epoch(epoch))) for epoch in range(num_epochs))
        return [place for epoch in epochs for place in epoch][:num_rows]

    def _filled(self, places: list[int]) -> list[Place]:
        return [*places, *[None] * (-len(places) % self.batch_size)]

    def num_tokens(self, step: int) -> int:
        """Tokens of a step, padding not counted. Step 0 is the first whose rows are not left out."""
        return self._num_tokens(self.places[step * self.batch_size : (step + 1) * self.batch_size])

    def _num_tokens(self, places: list[Place]) -> int:
        return sum(self.lengths[place] for place in places if place is not None)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        place = self.places[number]
        if place is None:
            return shifted([PADDING] * 2, [-100] * 2)
        row = self.rows[place]
        return shifted(row["input_ids"], row["labels"])


def shifted(ids: list[int], labels: list[int]) -> dict[str, Any]:
    """Return a row for Automodel's collator: each token with the label of the one that follows.

    Args:
        ids: Token ids; a row of one token gets a second one that is not trained on.
        labels: The same, -100 off the loss.
    """
    if len(ids) == 1:
        ids, labels = [*ids, PADDING], [*labels, -100]
    padding = {"input_ids": PADDING, "labels": -100, "attention_mask": 0}
    mask = [1] * (len(ids) - 1)
    return {"input_ids": ids[:-1], "labels": labels[1:], "attention_mask": mask, "___PAD_TOKEN_IDS___": padding}
