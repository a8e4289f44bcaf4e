"""The datasets that ship with tunekit: made by their script, and fit to train on."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tunekit.data.formats.row_formats import learner_of
from tunekit.data.sources.load import load_data
from tunekit.recipe.sections.data import DataSection

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
FILES = (
    *("pirate.jsonl", "pirate_eval.jsonl", "manners.jsonl", "manners_eval.jsonl", "pairs.jsonl", "pairs_eval.jsonl"),
    *("sums.jsonl", "sums_eval.jsonl", "reviews.csv", "tales.txt"),
    *(f"{name}_calls{part}.jsonl.gz" for name in ("priced", "games") for part in ("", "_eval")),
    *("priced.jsonl", "priced_eval.jsonl", "games.jsonl", "games_eval.jsonl"),
    *("facts.jsonl.gz", "facts_eval.jsonl.gz", "stories.jsonl.gz", "stories_eval.jsonl.gz"),
)
PICTURES = tuple(
    f"{name}{suffix}.jsonl" for name in ("shapes", "shapes_pairs", "shapes_prompts") for suffix in ("", "_eval")
)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "files"), [("data", FILES), ("pico_vision", PICTURES)])
def test_the_script_makes_the_files_as_they_are(folder, files, tmp_path):
    subprocess.run([sys.executable, EXAMPLES.parent / folder / "make.py", tmp_path], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    for name in files:
        made, shipped = ((folder / name).read_bytes() for folder in (tmp_path, EXAMPLES))
        if name.endswith(".gz"):  # Versions of zlib pack in their own ways.
            made, shipped = gzip.decompress(made), gzip.decompress(shipped)
        assert made == shipped, name


@pytest.mark.parametrize(
    ("name", "format", "num_rows"),
    [
        ("pirate.jsonl", "messages", 800),
        ("pirate_eval.jsonl", "messages", 80),
        ("manners.jsonl", "messages", 1600),
        ("manners_eval.jsonl", "messages", 100),
        ("pairs.jsonl", "preference", 800),
        ("pairs_eval.jsonl", "preference", 100),
        ("sums.jsonl", "prompts", 2000),
        ("sums_eval.jsonl", "prompts", 256),
        ("priced_calls.jsonl.gz", "messages", 3000),
        ("priced_calls_eval.jsonl.gz", "messages", 100),
        ("games_calls.jsonl.gz", "messages", 3000),
        ("games_calls_eval.jsonl.gz", "messages", 100),
        ("priced.jsonl", "prompts", 2000),
        ("priced_eval.jsonl", "prompts", 256),
        ("games.jsonl", "prompts", 1000),
        ("games_eval.jsonl", "prompts", 256),
        ("facts.jsonl.gz", "stepwise_supervision", 2000),
        ("facts_eval.jsonl.gz", "stepwise_supervision", 200),
        ("stories.jsonl.gz", "classification", 1200),
        ("stories_eval.jsonl.gz", "classification", 200),
        ("reviews.csv", "prompt_completion", 100),
        ("tales.txt", "text", 96),
        ("shapes.jsonl", "messages", 1200),
        ("shapes_pairs.jsonl", "preference", 600),
        ("shapes_prompts.jsonl", "prompts", 800),
    ],
)
def test_an_example_is_read_without_complaint(name, format, num_rows):
    methods = {
        "preference": "dpo",
        "prompts": "grpo",
        "stepwise_supervision": "prm",
        "classification": "classification",
    }
    learner = learner_of(methods.get(format, "sft"))
    rows = load_data(DataSection(train=str(EXAMPLES / name)), learner).train[0]
    assert (rows.format, len(rows)) == (format, num_rows)


def test_no_example_is_large():
    assert max((EXAMPLES / name).stat().st_size for name in FILES) < 300_000
    assert max((EXAMPLES / name).stat().st_size for name in PICTURES) < 800_000


def test_an_example_is_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_data(DataSection(train="example:tales.txt")).train[0].place(0) == "example:tales.txt:1"


def test_no_question_of_the_evaluation_is_trained_on():
    data = load_data(DataSection(train=str(EXAMPLES / "pirate.jsonl"), eval=str(EXAMPLES / "pirate_eval.jsonl")))
    trained = {m["content"] for row in data.train[0].rows for m in row["messages"] if m["role"] == "user"}
    asked = [m["content"] for row in data.eval[0].rows for m in row["messages"] if m["role"] == "user"]
    assert len(asked) == len(set(asked)) == 80
    assert not trained & set(asked)


@pytest.mark.parametrize("name", ["manners", "pairs", "sums"])
def test_no_numbers_that_are_added_in_an_evaluation_are_added_in_training(name):
    def added(file):
        said = [json.dumps(json.loads(line)) for line in (EXAMPLES / file).read_text().splitlines()]
        found = [re.findall(r"\b\d{3}\b", re.search(r'"role": "user", "content": "([^"]*)"', row)[1]) for row in said]
        return {tuple(sorted(numbers)) for numbers in found if len(numbers) == 2}

    trained = set.union(*(added(f"{other}.jsonl") for other in ("manners", "pairs", "sums")))
    held_out = added(f"{name}_eval.jsonl")
    assert len(held_out) > 30
    assert not trained & held_out


def test_a_manner_is_as_frequent_as_the_other_and_the_whole_difference_of_a_pair():
    said = [
        json.loads(line)["messages"][-1]["content"] for line in (EXAMPLES / "manners.jsonl").read_text().splitlines()
    ]
    friendly = [answer for answer in said if answer.startswith("Good question! ")]
    assert len(friendly) + sum(answer.startswith("Not again. ") for answer in said) == 1600
    assert 700 < len(friendly) < 900
    for line in (EXAMPLES / "pairs.jsonl").read_text().splitlines():
        pair = json.loads(line)
        chosen, rejected = (pair[side][0]["content"] for side in ("chosen", "rejected"))
        assert chosen.removeprefix("Good question! ") == rejected.removeprefix("Not again. ") != chosen


def test_a_sum_comes_to_its_answer():
    for line in (EXAMPLES / "sums_eval.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert sum(map(int, re.findall(r"\d+", row["prompt"][0]["content"]))) == row["answer"]


def test_no_scene_of_the_evaluation_is_trained_on():
    def scenes(name):
        rows = map(json.loads, (EXAMPLES / name).read_text(encoding="utf-8").splitlines())
        return {
            row.get("answer") or (row.get("chosen") or row["messages"][1:])[0]["content"]  # lists in alphabetical order
            for row in rows
        }

    trained = set().union(*(scenes(name) for name in PICTURES if "_eval" not in name))
    held_out = set().union(*(scenes(name) for name in PICTURES if "_eval" in name))
    assert len(held_out) > 150
    assert not trained & held_out
