"""Which rows each optimizer step takes: the same ones however many processes divide them.

Processes that compute side by side take as many micro-batches each. Where an epoch's rows do not fill the last ones,
Accelerate repeats rows of its beginning, so that the step is another one than in one process. Here rows without a
trained token fill them instead: a loss that is a mean over tokens does not see them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import TrainerControl, TrainerState, TrainingArguments


class Order(Sampler[int], TrainerCallback):  # type: ignore[misc]
    """The order of the rows in each epoch, from the seed and the number of the epoch alone.

    It is that of Accelerate's `SeedableRandomSampler`. It is told the epoch by the trainer's events, because what
    Accelerate tells samplers does not arrive where several processes resume within an epoch (accelerate 1.15).

    Args:
        num_rows: Rows to be ordered.
        num_last: Rows that stand behind them in the dataset, and at the end of every epoch.
        shuffle: Whether rows are shuffled.
        seed: Seed of the order.
    """

    def __init__(self, num_rows: int, num_last: int, *, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.num_last = num_last
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_rows + self.num_last

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            yield from torch.randperm(self.num_rows, generator=generator).tolist()
        else:
            yield from range(self.num_rows)
        yield from range(self.num_rows, len(self))

    def on_epoch_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Take the order of the epoch that begins or is resumed."""
        self.epoch = int(state.epoch or 0)


def num_empty(num_rows: int, multiple: int) -> int:
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

    missing = num_empty(len(rows), multiple)
    if missing == 0:
        return rows
    columns = {name: [value] * missing for name, value in _empty(rows.column_names, pad_token_id).items()}
    return concatenate_datasets([rows, Dataset.from_dict(columns, features=rows.features)])


def filled_stream(rows: "IterableDataset", multiple: int, pad_token_id: int) -> "IterableDataset":
    """The same for a stream, whose end is not known before it comes.

    The multiple is a whole step: at the end of a stream the trainer carries gradients of micro-batches that fill no
    step into the next epoch's first one (transformers 5.23).
    """

    def fill(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        missing = num_empty(len(batch["input_ids"]), multiple)
        empty = _empty(list(batch), pad_token_id)
        return {name: values + [empty[name]] * missing for name, values in batch.items()}

    return rows.map(fill, batched=True, batch_size=multiple, features=rows.features)


def _empty(columns: list[str], pad_token_id: int) -> dict[str, list[int]]:
    """A row of one token that is not trained on."""
    row = {"input_ids": [pad_token_id], "labels": [-100], "seq_lengths": [1]}
    return {name: row[name] for name in columns}
