"""Rows that a caller holds become a file named by its content, or the first that cannot is named with a remedy."""

import base64
import io
import json
import subprocess
import sys

import datasets
import numpy
import pandas
import pytest
from PIL import Image

from tunekit.data.formats.row_formats import learner_of
from tunekit.data.sources.in_memory import write_rows
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection

ROWS = [
    {"messages": [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "a\u2028b"}], "n": 1},
    {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}], "n": 2},
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.mark.parametrize(
    "held",
    [
        ROWS,
        tuple(ROWS),
        (dict(row) for row in ROWS),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).with_format("numpy"),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        pandas.DataFrame(ROWS),
        pandas.DataFrame({"messages": [numpy.array(row["messages"]) for row in ROWS], "n": numpy.array([1, 2])}),
    ],
    ids=["list", "tuple", "generator", "dataset", "formatted", "iterable-dataset", "pandas", "pandas-of-arrays"],
)
def test_rows_of_every_kind_are_the_same_file(held):
    path = write_rows(held, "train_dataset")
    assert read(path) == ROWS
    assert path == write_rows(ROWS, "train_dataset")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_rows_of_polars_are_the_same_file():
    polars = pytest.importorskip("polars", reason="needs polars, which tunekit does not install: pip install polars")
    assert write_rows(polars.DataFrame(ROWS), "train_dataset") == write_rows(ROWS, "train_dataset")
    with pytest.raises(DataError, match=r"a LazyFrame has no rows yet; pass train_dataset=frame.collect\(\)"):
        write_rows(polars.DataFrame(ROWS).lazy(), "train_dataset")


def test_other_rows_are_another_file():
    assert write_rows(ROWS[:1], "train_dataset") != write_rows(ROWS, "train_dataset")


def test_keys_that_a_table_adds_to_every_object_are_left_out():
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}]
    assert read(write_rows(datasets.Dataset.from_list(rows), "train_dataset")) == rows


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([], "train_dataset: no rows; pass at least one row; a generator yields its rows only once"),
        ([{"a": "b"}, "c"], "train_dataset[1]: must be a dict, got str; pass rows as dicts of columns"),
        (
            [{"a": 1.0}, {"a": [{"b": float("nan")}]}],
            "train_dataset[1]['a'][0]['b']: nan is not a JSON value; drop the row, or pass None for a missing value: "
            "frame.astype(object).where(frame.notna(), None)",
        ),
        (
            pandas.DataFrame({"a": ["x", None], "b": [1.0, None]}),
            "train_dataset[1]['a']: nan is not a JSON value; drop the row, or pass None for a missing value: "
            "frame.astype(object).where(frame.notna(), None)",
        ),
        (
            [{"a": 1}, {"a": pandas.NA}],
            "train_dataset[1]['a']: NAType is not a JSON value; drop the row, or pass None for a missing value: "
            "frame.astype(object).where(frame.notna(), None)",
        ),
        (
            pandas.DataFrame([[1, 2]], columns=["a", "a"]),
            "train_dataset: two columns are named 'a'; rename one of them",
        ),
        (
            [{"a": b"b"}],
            "train_dataset[0]['a']: bytes is not a JSON value; decode it to text; of an image, pass a PIL image or "
            "its path",
        ),
        ([{"a": {1, 2}}], "train_dataset[0]['a']: set is not a JSON value; convert it to text or a number"),
        ([{1: "b"}], "train_dataset[0]: a key must be a string, got int; rename it"),
        (
            [{"a": "\ud800"}],
            "train_dataset[0]: holds half a character ('\\ud800'); decode the text with errors='replace'",
        ),
        (
            {"train": ROWS},
            "train_dataset: takes rows, got a dict; pass a split, such as dataset['train'], or rows: [{...}, {...}]",
        ),
        ({"prompt": "a"}, "train_dataset: takes rows, got a dict; pass a list of rows: [{...}]"),
        ("rows.jsonl", "train_dataset: takes rows, got a path; set data.train to the file or dataset"),
        (3, "train_dataset: takes rows, got int; pass a list of dicts, a datasets.Dataset or a DataFrame"),
        (
            [{"image": Image.new("CMYK", (2, 2))}],
            "train_dataset[0]['image']: an image of mode CMYK, which PNG does not support; convert it: "
            "picture.convert('RGB')",
        ),
    ],
)
def test_what_is_no_row_is_named_with_its_remedy(held, message, tmp_path):
    with pytest.raises(DataError) as caught:
        write_rows(held, "train_dataset")
    assert str(caught.value) == message
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_a_row_that_holds_itself_is_told():
    row = {}
    row["a"] = row
    with pytest.raises(DataError, match=r"train_dataset\[0\]: nested too deeply"):
        write_rows([row], "train_dataset")


def test_pictures_become_data_urls_of_the_same_pixels_that_are_read_as_rows():
    picture = Image.frombytes("RGB", (3, 2), bytes(range(18)))
    row = {
        "messages": [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "dots"}],
        "images": [picture],
    }
    path = write_rows([row], "train_dataset")
    (url,) = read(path)[0]["images"]
    decoded = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    assert (decoded.mode, decoded.size, decoded.tobytes()) == (picture.mode, picture.size, picture.tobytes())
    data = load_data(DataSection.model_validate({"train": {"path": str(path)}}), learner_of("sft"))
    assert data.train[0].media


def test_nothing_is_imported_for_rows_that_need_it_not():
    code = "import sys; from tunekit.data.sources.in_memory import write_rows; write_rows([{'a': 1}], 'train_dataset')"
    code += "; assert not {'pandas', 'polars', 'datasets', 'PIL', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
