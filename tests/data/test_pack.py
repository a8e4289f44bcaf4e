"""Packing: sequences as full as they get, and nothing lost on the way."""

import datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from tunekit.data.pack import pack


def rows_of(packed):
    """The rows of packed sequences, taken apart again by their lengths."""
    for sequence in packed:
        start = 0
        for length in sequence["seq_lengths"]:
            yield (
                tuple(sequence["input_ids"][start : start + length]),
                tuple(sequence["labels"][start : start + length]),
            )
            start += length
        assert start == len(sequence["input_ids"]) == len(sequence["labels"])


def test_rows_share_sequences_and_keep_their_labels():
    lengths = [5, 3, 2, 6]
    rows = [([i * 10 + k for k in range(n)], [-100] + [i * 10 + k for k in range(1, n)]) for i, n in enumerate(lengths)]
    packed = pack(datasets.Dataset.from_dict({"input_ids": [r[0] for r in rows], "labels": [r[1] for r in rows]}), 8)
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]
    assert sorted(map(sorted, packed["seq_lengths"])) == [[2, 6], [3, 5]]
    assert sorted(rows_of(packed)) == sorted((tuple(ids), tuple(labels)) for ids, labels in rows)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_no_token_is_lost_and_no_sequence_too_long(lengths):
    rows = [[i] * n for i, n in enumerate(lengths)]
    packed = pack(datasets.Dataset.from_dict({"input_ids": rows, "labels": rows}), 16)
    assert sorted(ids for ids, _ in rows_of(packed)) == sorted(map(tuple, rows))
    assert all(len(ids) <= 16 for ids in packed["input_ids"])


def test_no_progress_bar_of_another_library_is_shown(capfd):
    shown = not datasets.are_progress_bars_disabled()
    pack(datasets.Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]}), 8)
    assert capfd.readouterr().err == ""
    assert datasets.are_progress_bars_disabled() != shown
