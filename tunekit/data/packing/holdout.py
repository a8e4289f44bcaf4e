"""Rows held out for evaluation, chosen by what they say.

A row is held out if the digest of its content, read as a fraction, is below the wanted share. So the choice of a row
depends on that row alone: it stays when the file grows, shrinks or is put into another order, equal rows always
stand on the same side, and a larger share holds out the rows of a smaller one and more. There is no seed, because
another seed would move rows that a model was trained on into its evaluation.
"""

import hashlib
import json

from tunekit.data.formats.row_formats import Row, counted
from tunekit.data.sources.rows import Rows
from tunekit.errors import DataError


def hold_out(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Part rows into those to train on and those held out.

    Args:
        rows: All rows of a source.
        share: The share to hold out, between 0 and 1; the number held out comes near it when the rows are many.

    Raises:
        DataError: One side would be empty.
    """
    is_held_out = [fraction(row) < share for row in rows.rows]
    num_held_out = sum(is_held_out)
    if num_held_out in (0, len(rows)):
        which = "no row" if num_held_out == 0 else "every row"
        raise DataError(
            f"data.eval_size={share:g}: {which} of the {counted(len(rows), 'row')} of '{rows.source}' "
            "would be held out",
            hint="choose another share, or name rows to evaluate on in data.eval",
        )
    train = rows.select(i for i, held_out in enumerate(is_held_out) if not held_out)
    return train, rows.select(i for i, held_out in enumerate(is_held_out) if held_out)


def fraction(row: Row) -> float:
    """A number from 0 to 1 that follows from the content of a row: the first 8 bytes of the BLAKE2b of its JSON."""
    content = json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
