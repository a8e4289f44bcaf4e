"""Rows of each optimizer step: the same ones for any number of processes.

Processes that compute side by side take as many micro-batches each. Where an epoch's rows do not fill the last ones,
Accelerate repeats rows of its beginning, so that the step is another one than in one process. Here rows without a
trained token fill them instead: a loss that is a mean over tokens does not see them. A mean over pairs would, so there
the last step is filled with pairs of the epoch's beginning, in one process too.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from tunekit.methods.run_trainer import RunTrainer


class Order(Sampler[int], TrainerCallback):  # type: ignore[misc]
    """The order of the rows in each epoch, from the seed and the number of the epoch alone.

    It is that of Accelerate's `SeedableRandomSampler`. It is told the epoch by the trainer's events, because what
    Accelerate tells samplers does not arrive where several processes resume within an epoch (accelerate 1.15).

    Args:
        num_rows: Rows to be ordered.
        num_more: How many come behind them at the end of every epoch: rows that stand behind them in the dataset.
        repeats: Whether the epoch's first rows come there again instead.
        shuffle: Whether rows are shuffled.
        seed: Seed of the order.
    """

    def __init__(self, num_rows: int, num_more: int, *, repeats: bool, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.num_more = num_more
        self.repeats = repeats
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_rows + self.num_more

    def __iter__(self) -> Iterator[int]:
        return self.of_epoch(self.epoch)

    def of_epoch(self, epoch: int) -> Iterator[int]:
        """The order of an epoch, whichever it is at."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        rows = torch.randperm(self.num_rows, generator=generator) if self.shuffle else torch.arange(self.num_rows)
        yield from rows.tolist()
        for more in range(self.num_more):
            yield int(rows[more % self.num_rows]) if self.repeats else self.num_rows + more

    def on_epoch_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Take the order of the epoch that begins or is resumed."""
        self.epoch = int(state.epoch or 0)


def keep_order(trainer: "RunTrainer", order: Order) -> None:
    """Make a trainer take its training rows in an order of ours."""
    trainer.wrap("train_sampler", lambda make, rows: order)
    trainer.add_callback(order)


def fill_last_step(trainer: "RunTrainer", global_batch_size: int, *, shuffle: bool, seed: int) -> None:
    """Make a trainer whose loss is a mean over rows fill the last step of an epoch with its first rows."""
    num_rows = len(trainer.train_dataset)
    order = Order(num_rows, num_missing(num_rows, global_batch_size), repeats=True, shuffle=shuffle, seed=seed)
    trainer.train_dataset = filled_with_first(trainer.train_dataset, global_batch_size)
    keep_order(trainer, order)


class GroupOrder(TrainerCallback):  # type: ignore[misc]
    """The order of the prompts that answers are generated for, in each epoch from the seed and its number alone.

    TRL's `RepeatSampler` draws it from where the last epoch left its generator, and a resumed run begins with the first
    epoch's, whichever it is in; it also takes the next micro-batch for the first on new answers (trl 1.16).

    Args:
        trainer: A trainer of TRL's that generates answers.
        seed: Seed of the order.
    """

    def __init__(self, trainer: "RunTrainer", seed: int) -> None:
        self.trainer = trainer
        self.seed = seed
        trainer.wrap("train_sampler", self._keep_sampler)
        trainer.add_callback(self)

    def _keep_sampler(self, make: Callable[..., Any], rows: Any) -> Any:
        self._sampler = make(rows)
        return self._sampler

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Count the micro-batches of the steps that were taken before."""
        self.trainer.micro_step = state.global_step * args.gradient_accumulation_steps

    def on_epoch_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Take the order of the epoch that begins or is resumed."""
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self.seed + int(state.epoch or 0))


def num_missing(num_rows: int, multiple: int) -> int:
    """Rows that are missing from a multiple."""
    return -num_rows % multiple


def filled(rows: "Dataset", multiple: int, pad_token_id: int) -> "Dataset":
    """Rows, and behind them as many without a trained token as fill a multiple.

    Args:
        rows: Columns `input_ids` and `labels`, with `seq_lengths` where packed.
        multiple: Rows that are computed at the same time.
        pad_token_id: The one token of an empty row.
    """
    from datasets import Dataset, concatenate_datasets

    missing = num_missing(len(rows), multiple)
    if missing == 0:
        return rows
    columns = {name: [value] * missing for name, value in _empty(rows.column_names, pad_token_id).items()}
    return concatenate_datasets([rows, Dataset.from_dict(columns, features=rows.features)])


def filled_with_first(rows: "Dataset", multiple: int) -> "Dataset":
    """Rows, and behind them the first ones again until they fill a multiple.

    An order that repeats draws none of these. They are there because Accelerate takes what is in the last micro-batches
    for repeated, and leaves it out of what is logged, by the number of rows of the dataset.
    """
    missing = num_missing(len(rows), multiple)
    return rows.select([row % len(rows) for row in range(len(rows) + missing)]) if missing else rows


def filled_stream(rows: "IterableDataset", multiple: int, pad_token_id: int) -> "IterableDataset":
    """The same for a stream, whose end is not known before it comes.

    The multiple is a whole step: at the end of a stream the trainer carries gradients of micro-batches that fill no
    step into the next epoch's first one (transformers 5.23).
    """

    def fill(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        missing = num_missing(len(batch["input_ids"]), multiple)
        empty = _empty(list(batch), pad_token_id)
        return {name: values + [empty[name]] * missing for name, values in batch.items()}

    return rows.map(fill, batched=True, batch_size=multiple, features=rows.features)


def _empty(columns: list[str], pad_token_id: int) -> dict[str, list[int]]:
    """A row of one token that is not trained on."""
    row = {"input_ids": [pad_token_id], "labels": [-100], "seq_lengths": [1]}
    return {name: row[name] for name in columns}
