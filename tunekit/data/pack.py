"""Several short sequences in one long one.

Padding short rows to the longest of a batch wastes most of a batch's work. Packing fills sequences of `max_length`
tokens with whole rows instead (best fit decreasing, arXiv 2404.10830). The lengths of the rows are kept beside them:
from those come the positions that restart with every row, by which attention keeps the rows apart.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets


def pack(dataset: "datasets.Dataset", max_length: int) -> "datasets.Dataset":
    """Pack tokenised rows into sequences of at most `max_length` tokens.

    No token is lost: rows are never longer than `max_length` after `tokenize`, and TRL's strategy `bfd` cuts none
    that fits.

    Args:
        dataset: Columns `input_ids` and `labels`.
        max_length: Longest packed sequence, in tokens.

    Returns:
        Columns `input_ids`, `labels` and `seq_lengths`, the lengths of the rows in each sequence.
    """
    import datasets
    from trl import pack_dataset

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # one more bar, of `map`, would stand beside tunekit's own
    try:
        return pack_dataset(dataset, seq_length=max_length, strategy="bfd")
    finally:
        if shown:
            datasets.enable_progress_bars()
