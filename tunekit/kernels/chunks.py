"""Chunks of tokens whose logits fit a budget: the head computes by them, and plans count by them."""

BUDGET_BYTES = 512 << 20
"""Bytes of a chunk's logits, at most."""

_ALIGNED_ROWS = 128
_ALIGNED_COLUMNS = 64


def chunk_rows(num_rows: int, num_columns: int, itemsize: int, budget_bytes: int = BUDGET_BYTES) -> int:
    """Tokens of a chunk, all chunks as long as the others: multiples of 128, as matrix products like them.

    Args:
        num_rows: All tokens.
        num_columns: The vocabulary.
        itemsize: Bytes of a logit.
        budget_bytes: Bytes of a chunk's logits, at most; a chunk has 128 tokens at least.
    """
    most = max(_ALIGNED_ROWS, budget_bytes // (num_columns * itemsize) // _ALIGNED_ROWS * _ALIGNED_ROWS)
    each = -(-num_rows // max(1, -(-num_rows // most)))
    return max(1, min(num_rows, -(-each // _ALIGNED_ROWS) * _ALIGNED_ROWS))


def row_columns(num_columns: int) -> int:
    """Logits that a row has room for, so that each begins where reads of 16 bytes can, whatever the vocabulary."""
    return -(-num_columns // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS
