"""Rows that are token ids already: what they become, and the mistakes that would train on wrong words."""

import json

import pytest

from tests.rows import check_row
from tunekit.data.formats.row_formats import BadRow
from tunekit.data.sources.load import load_data
from tunekit.recipe.sections.data import DataSection


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        ({}, [5, 6, 7]),
        ({"labels": [-100, 6, 7]}, [-100, 6, 7]),
        ({"labels": None, "attention_mask": [1, 1, 1]}, [5, 6, 7]),
        ({"completion_mask": [0, 0, 1]}, [-100, -100, 7]),
        ({"assistant_masks": [0, 1, 0]}, [-100, 6, -100]),
    ],
)
def test_ids_keep_their_labels_or_get_them(row, labels):
    assert check_row({"input_ids": [5, 6, 7], **row}, "tokens") == {"input_ids": [5, 6, 7], "labels": labels}


LABEL = "a label must equal its input id (unshifted, the model shifts labels) or be -100 (ignored by the loss)"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"labels": [6, 7, -100]}, f"labels[0] is 6, but input_ids[0] is 5; {LABEL}"),
        ({"labels": [5, 0, 7]}, f"labels[1] is 0, but input_ids[1] is 6; {LABEL}"),
        ({"labels": [5, 6]}, "labels must have the length of input_ids (3), got 2"),
        (
            {"attention_mask": [1, 1, 0]},
            "attention_mask[2] is 0: the row is padded; remove the padding from every column",
        ),
        ({"attention_mask": [1, 1]}, "attention_mask must have the length of input_ids (3), got 2"),
        ({"attention_mask": [1, 2, 1]}, "attention_mask[1] must be 0 or 1, got the number 2"),
        (
            {"labels": [5, 6, 7], "completion_mask": [0, 1, 1]},
            "labels, completion_mask are all loss masks; keep one of them",
        ),
        ({"completion_mask": [True, True, True]}, "completion_mask[0] must be an integer, got the boolean true"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [5, -1]}, "input_ids[1] must be at least 0, got the number -1"),
        ({"input_ids": [5, 1.0]}, "input_ids[1] must be an integer, got the number 1.0"),
        ({"input_ids": [[5]]}, "input_ids[0] must be an integer, got a list"),
        ({"input_ids": None}, "input_ids must be a list of integers, got null"),
        (
            {"input_ids": "[5]"},
            "input_ids must be a list of integers, got a string; use .jsonl or .parquet, where a column can hold "
            "lists",
        ),
    ],
)  # fmt: skip
def test_ids_that_would_train_on_something_else_are_refused(row, message):
    with pytest.raises(BadRow) as caught:
        check_row({"input_ids": [5, 6, 7], **row}, "tokens")
    assert str(caught.value) == message


def test_ids_are_recognised_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": [5, 6], "labels": [-100, 6], "length": 2}))
    data = load_data(DataSection(train="ids.jsonl"))
    assert (data.train[0].format, list(data.train[0].rows)) == ("tokens", [{"input_ids": [5, 6], "labels": [-100, 6]}])
    assert data.notes == ["ids.jsonl: 1 row of tokens (recognized from the column input_ids); ignored: length"]
