"""Rows of a process in a step, by name, for reports of failures.

Nothing is carried along with the micro-batches: which rows are in one follows from the seed, the epoch, the step and
the process alone (see `tunekit.methods.order`), and is worked out when somebody asks. Prompts that a model answers are
found again by what they say. Of a stream nothing is known but its tokens.
"""

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tunekit.data.prepare import read_dataset
from tunekit.data.sources.row_locations import Places
from tunekit.data.tokenization.alignment import read_rows
from tunekit.planner.plan import Plan
from tunekit.runs.prepared_data import FILES, PLACES
from tunekit.runs.rank import Place
from tunekit.runs.run import Run

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

    from tunekit.methods.order import Order

NUM_TOKENS = 64
"""Tokens of a sequence that are shown."""

NUM_CHARACTERS = 60
"""Characters of a row that are shown."""


class Rows:
    """The rows of each step of a run.

    Args:
        trainer: Its trainer.
        run: Its folder.
        plan: Its plan.
        place: Which process this is.
    """

    def __init__(self, trainer: "Trainer", run: Run, plan: Plan, place: Place) -> None:
        self._trainer = trainer
        self._folder = run.path / "data"
        self._plan = plan
        self._rank = place.rank

    def name(self, step: int, batches: dict[int, Any]) -> list[str]:
        """The rows of micro-batches of this process, each as the place where it stands and how it begins.

        Args:
            step: The step, from 1.
            batches: What the trainer was given, by the number of the micro-batch in the step.
        """
        if any(isinstance(batch, list) for batch in batches.values()):
            prompts = [row["prompt"] for batch in batches.values() for row in batch]
            return list(self._found(prompts))
        if self._order is None:
            return [words for batch in batches.values() for words in self._read(batch)]
        rows = (row for number in batches for row in self.of_micro_batch(step, number))
        return [words for row in dict.fromkeys(rows) for words in self._named(row)]

    def of_micro_batch(self, step: int, number: int) -> list[int]:
        """Indices of the rows of a micro-batch among those that are trained on; rows that only fill it are left out.

        Args:
            step: The step, from 1.
            number: Which micro-batch of this process in it, from 0.
        """
        plan, layout, order = self._plan, self._plan.layout, self._order
        assert order is not None
        size = plan.micro_batch_size
        per_step = size * layout.num_batches * plan.gradient_accumulation_steps
        epoch, num_done = divmod(step - 1, -(-len(order) // per_step))
        first, many = num_done * per_step, per_step
        # Processes that divide sequences take the rows of one another, so that all of a step are meant.
        if layout.sp_size == 1:
            beside = self._rank // layout.devices_per_sequence
            first, many = first + (number * layout.num_batches + beside) * size, size
        rows = list(order.of_epoch(self._epoch(epoch)))[first : first + many]
        return [row for row in rows if row < order.num_rows]

    @cached_property
    def _order(self) -> "Order | None":
        """The order of the rows; None where it is not ours."""
        from tunekit.methods.order import Order, num_missing

        recipe = self._plan.recipe
        callbacks = self._trainer.callback_handler.callbacks
        order_callback = next((callback for callback in callbacks if isinstance(callback, Order)), None)
        if order_callback is None and recipe.method.couples_rows:
            # Its rows were put in their order before training (see `tunekit.methods.kto`).
            num_rows = len(self._rows)
            missing = num_missing(num_rows, recipe.train.global_batch_size)
            return Order(num_rows, missing, repeats=True, shuffle=recipe.data.shuffle, seed=recipe.train.seed)
        return order_callback

    def _epoch(self, epoch: int) -> int:
        """The epoch whose order counts: KTO's rows have the first one's in each."""
        method = self._plan.recipe.method
        return 0 if method.couples_rows else epoch

    @cached_property
    def _rows(self) -> "Dataset":
        read = read_dataset if self._plan.recipe.method.spec.trains_on == "tokens" else read_rows
        return read(self._folder / FILES["train"])

    @cached_property
    def _places(self) -> Places:
        return Places.read(self._folder / PLACES)

    def _named(self, row: int) -> Iterator[str]:
        """A row by its name, or those that were packed into it."""
        row_location = self._rows[row]
        if "prompt" in row_location:
            yield _words(self._places[row], _text(row_location["prompt"]))
        elif "seq_lengths" in row_location:
            first, start = self._num_packed_before(row), 0
            for number, length in enumerate(row_location["seq_lengths"]):
                ids = row_location["input_ids"][start : start + length]
                yield _words(self._places[first + number], self._decoded(ids))
                start += length
        else:
            yield _words(self._places[row], self._decoded(row_location["input_ids"]))

    def _num_packed_before(self, pack: int) -> int:
        """Sequences in the packs before one."""
        import pyarrow.compute as pc  # type: ignore[import-untyped]

        sizes = pc.list_value_length(self._rows.data.column("seq_lengths").slice(0, pack))
        return pc.sum(sizes).as_py() or 0

    def _found(self, prompts: list[Any]) -> Iterator[str]:
        """The rows that have one of some prompts."""
        keys = {json.dumps(prompt) for prompt in prompts}
        for number, row in enumerate(self._rows):
            if json.dumps(row["prompt"]) in keys:
                yield _words(self._places[number], _text(row["prompt"]))

    def _read(self, batch: Any) -> Iterator[str]:
        """Yield descriptions of a micro-batch whose rows are not known."""
        for row, ids in enumerate(batch["input_ids"]):
            starts = [0]
            if "position_ids" in batch:
                starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                words = self._decoded(ids[start:end].tolist())
                if words:  # an empty one fills a step
                    yield f"a row that begins {words!r}"

    def _decoded(self, ids: Iterable[int]) -> str:
        tokenizer = self._trainer.processing_class
        return _cut(tokenizer.decode(list(ids)[:NUM_TOKENS], skip_special_tokens=True))


def _words(place: str, text: str) -> str:
    return f"{place} ({text!r})"


def _text(prompt: Any) -> str:
    """Return the last message of a prompt."""
    return _cut(prompt if isinstance(prompt, str) else str(prompt[-1]["content"]))


def _cut(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= NUM_CHARACTERS else words[: NUM_CHARACTERS - 1] + "…"
