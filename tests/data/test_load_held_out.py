"""Rows held out for evaluation: the same ones, whatever else the file holds and in whatever order."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunekit.data.packing.sequences import fraction, hold_out
from tunekit.data.sources.load import load_data
from tunekit.data.sources.rows import Rows, RowStore
from tunekit.recipe.sections.data import DataSection

TEXTS = st.lists(st.sampled_from([f"text {i}" for i in range(40)]), max_size=60)
ALWAYS = ["text 3", "text 6"]
SHARE = 0.3


def test_the_two_texts_that_the_properties_rest_on_fall_on_either_side():
    assert (fraction({"text": ALWAYS[0]}) < SHARE) != (fraction({"text": ALWAYS[1]}) < SHARE)


def parted(texts: list[str], share: float = SHARE) -> tuple[list[str], list[str]]:
    rows = [{"text": text} for text in texts]
    source = Rows(format="text", rows=RowStore(rows), source="rows.jsonl", numbers=range(1, len(rows) + 1))
    train, held_out = hold_out(source, share)
    for side in (train, held_out):
        # A row keeps its place, so the place leads back to it.
        assert [texts[int(side.place(i).rpartition(":")[2]) - 1] for i in range(len(side))] == [
            row["text"] for row in side.rows
        ]
    return [row["text"] for row in train.rows], [row["text"] for row in held_out.rows]


@given(TEXTS)
def test_every_row_is_on_one_side_and_equal_rows_are_on_the_same(texts):
    texts = texts + ALWAYS
    train, held_out = parted(texts)
    assert sorted(train + held_out) == sorted(texts)
    assert not set(train) & set(held_out)


@given(TEXTS, TEXTS)
def test_the_rows_held_out_stay_held_out_when_the_file_grows(texts, more):
    train, held_out = parted(texts + ALWAYS)
    train_of_more, held_out_of_more = parted(more + texts + ALWAYS + more)
    assert set(train) <= set(train_of_more)
    assert set(held_out) <= set(held_out_of_more)


@given(st.data(), TEXTS)
def test_the_order_of_the_rows_changes_nothing(data, texts):
    texts = texts + ALWAYS
    shuffled = data.draw(st.permutations(texts))
    for side, side_of_shuffled in zip(parted(texts), parted(shuffled), strict=True):
        assert sorted(side) == sorted(side_of_shuffled)


@settings(max_examples=20)
@given(st.floats(0.05, 0.45))
def test_a_larger_share_holds_out_the_same_rows_and_more(share):
    texts = [f"text {i}" for i in range(500)]
    assert set(parted(texts, share)[1]) <= set(parted(texts, share + 0.05)[1])


def test_the_number_held_out_comes_near_the_share():
    _, held_out = parted([f"text {i}" for i in range(20_000)], 0.05)
    assert abs(len(held_out) - 1000) < 5 * (20_000 * 0.05 * 0.95) ** 0.5


def test_the_order_of_the_keys_of_a_row_changes_nothing():
    assert fraction({"prompt": "a", "completion": "é"}) == fraction({"completion": "é", "prompt": "a"})


def test_the_digest_never_changes():
    # printf '{"text":"a"}' | b2sum -l 64
    assert fraction({"text": "a"}) == 0x9480E9C8C5CF5793 / 2**64


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_held_out_rows_keep_their_places_in_the_files_of_a_folder(here):
    (here / "data").mkdir()
    where = {}
    for name in ("a", "b", "c", "d"):
        lines = [f"{name} {i}" for i in range(20)]
        where |= {line: f"data/{name}.jsonl:{i}" for i, line in enumerate(lines, start=1)}
        (here / "data" / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    data = load_data(DataSection(train="data", eval_size=0.25))
    for side in (data.train[0], data.eval[0]):
        assert [side.place(i) for i in range(len(side))] == [where[row["text"]] for row in side.rows]
    num_held_out = len(data.eval[0])
    assert data.notes[-1] == (
        f"data: {num_held_out} of 80 rows held out for evaluation by content hash (data.eval_size=0.25); "
        f"{80 - num_held_out} to train on"
    )
