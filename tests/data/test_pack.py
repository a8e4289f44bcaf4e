"""Packing: packs as full as they get, and no sequence lost on the way."""

import datasets
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import pack_dataset

from tunekit.data.packing.sequences import best_fit


def packs_of(lengths, max_length):
    """The packs as lists of the sequences' lengths."""
    order, sizes = best_fit(np.array(lengths, dtype=np.int32), max_length)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert sizes.sum() == len(lengths)
    ends = np.cumsum(sizes)
    return [[lengths[i] for i in order[end - size : end]] for end, size in zip(ends, sizes, strict=True)]


def test_the_longest_come_first_and_each_goes_where_it_leaves_the_least_room():
    # 6 and 5 open packs of 8; 3 fills the second, and 2 the first.
    assert packs_of([5, 3, 2, 6], 8) == [[6, 2], [5, 3]]
    # 4 opens a third pack though two have room for less; 2 goes to the one with exactly 2 left.
    assert packs_of([6, 7, 4, 2, 1], 8) == [[7, 1], [6, 2], [4]]


@settings(max_examples=200)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_no_sequence_is_lost_or_doubled_and_no_pack_too_long(lengths):
    packs = packs_of(lengths, 16)
    assert sorted(length for pack in packs for length in pack) == sorted(lengths)
    assert all(0 < sum(pack) <= 16 for pack in packs)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_as_few_packs_are_needed_as_with_trl(lengths):
    rows = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    assert len(packs_of(lengths, 64)) == len(pack_dataset(rows, seq_length=64, strategy="bfd"))


def test_nearly_every_place_is_filled_where_sequences_are_short():
    lengths = np.random.default_rng(0).geometric(1 / 150, 20_000).clip(1, 1024)
    assert lengths.sum() / (len(best_fit(lengths, 1024)[1]) * 1024) > 0.999
