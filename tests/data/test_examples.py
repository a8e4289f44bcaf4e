"""The datasets that ship with tunekit: made by their script, and fit to train on."""

import subprocess
import sys
from pathlib import Path

import pytest

from tunekit.data.load import load_data
from tunekit.recipe.schema import DataSection

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
FILES = ("pirate.jsonl", "pirate_eval.jsonl", "reviews.csv", "tales.txt")


def test_the_script_makes_the_files_as_they_are(tmp_path):
    subprocess.run([sys.executable, EXAMPLES / "make.py", tmp_path], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (EXAMPLES / name).read_bytes(), name


@pytest.mark.parametrize(
    ("name", "format", "num_rows"),
    [
        ("pirate.jsonl", "messages", 800),
        ("pirate_eval.jsonl", "messages", 80),
        ("reviews.csv", "prompt_completion", 100),
        ("tales.txt", "text", 96),
    ],
)
def test_an_example_is_read_without_complaint(name, format, num_rows):
    rows = load_data(DataSection(train=str(EXAMPLES / name))).train[0]
    assert (rows.format, len(rows)) == (format, num_rows)


def test_an_example_is_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_data(DataSection(train="example:tales.txt")).train[0].place(0) == "example:tales.txt:1"


def test_no_question_of_the_evaluation_is_trained_on():
    data = load_data(DataSection(train=str(EXAMPLES / "pirate.jsonl"), eval=str(EXAMPLES / "pirate_eval.jsonl")))
    trained = {m["content"] for row in data.train[0].rows for m in row["messages"] if m["role"] == "user"}
    asked = [m["content"] for row in data.eval[0].rows for m in row["messages"] if m["role"] == "user"]
    assert len(asked) == len(set(asked)) == 80
    assert not trained & set(asked)
