"""How many tokens a second TRL's collator makes micro-batches of, from tokenised rows on disk, on one core.

    OMP_NUM_THREADS=1 python -m benchmarks.collate

Processor time, the best of five passes: what a training process spends between two micro-batches where no worker does
it meanwhile. `COLLATED_TOKENS_PER_SECOND` in `tunekit/estimates/throughput/step.py` is from here.
"""

import random
import time

from datasets import Dataset
from torch.utils.data import DataLoader
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

LENGTH, NUM_ROWS, MICRO_BATCH = 2048, 400, 4


def tokens_per_second(*, padding_free: bool) -> float:
    """The best of five passes over rows of random tokens."""
    draw = random.Random(0)
    rows = Dataset.from_dict({"input_ids": [[draw.randrange(32000) for _ in range(LENGTH)] for _ in range(NUM_ROWS)]})
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=padding_free)
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in DataLoader(rows, batch_size=MICRO_BATCH, collate_fn=collator):
            pass
        best = min(best, time.process_time() - start)
    return LENGTH * NUM_ROWS / best


def main() -> None:
    """Print both kinds of micro-batches."""
    for name, free in (("padded", False), ("padding-free", True)):
        print(f"{name:<14}{tokens_per_second(padding_free=free) / 1e6:.1f} million tokens/s")


if __name__ == "__main__":
    main()
