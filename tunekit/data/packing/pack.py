"""Several short sequences in one long one.

Padding short sequences to the longest of a batch wastes most of a batch's work. Packing fills sequences of `max_length`
tokens with whole ones instead: best fit decreasing (arXiv 2404.10830), the longest first, each put where it leaves the
least room. The lengths are kept beside the tokens: from those come the positions that restart with every document,
by which attention keeps the documents apart.

Only lengths are looked at. The rooms that packs have left are the bits of one number, so the smallest room that is
large enough is found by a shift: a million sequences take about a second.
"""

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def best_fit(lengths: "np.ndarray", max_length: int) -> tuple["np.ndarray", "np.ndarray"]:
    """Put sequences into packs of at most `max_length` tokens.

    Args:
        lengths: Tokens of each sequence, from 1 to `max_length`, `(sequences,)`.
        max_length: Most tokens of a pack.

    Returns:
        The indices of all sequences, those of a pack one behind the other, `(sequences,)`, and how many sequences
        each pack holds, `(packs,)`.
    """
    import numpy as np

    longest_first = np.argsort(-lengths.astype(np.int64), kind="stable")
    packs_with_room: dict[int, list[int]] = {}
    rooms = 0
    num_packs = 0
    pack_of = array("q")
    for length in lengths[longest_first].tolist():
        large_enough = rooms >> length
        if large_enough:
            room = length + (large_enough & -large_enough).bit_length() - 1
            packs = packs_with_room[room]
            pack = packs.pop()
            if not packs:
                rooms ^= 1 << room
        else:
            room, pack = max_length, num_packs
            num_packs += 1
        pack_of.append(pack)
        free = room - length
        if free:
            packs_with_room.setdefault(free, []).append(pack)
            rooms |= 1 << free
    assigned = np.frombuffer(pack_of, dtype=np.int64) if pack_of else np.zeros(0, np.int64)
    order = longest_first[np.argsort(assigned, kind="stable")]
    return order, np.bincount(assigned, minlength=num_packs)
