"""One source or a list of them: what the data code is given, and how a list is written down."""

import pytest
import yaml
from pydantic import ValidationError

from tunekit.errors import RecipeError
from tunekit.recipe.load import dump_recipe, load_recipe
from tunekit.recipe.reading.parse import dotted, to_inline_yaml, to_yaml, undotted
from tunekit.recipe.sections.data import CompleteSource, DataSection

MIXED = {"train": [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1}]}


def test_a_source_alone_is_one_of_one_and_takes_what_the_section_says() -> None:
    section = DataSection(train="a.jsonl", format="alpaca", columns={"output": "answer"}, loss_on="last")
    assert section.sources == (
        CompleteSource(key="data.train", path="a.jsonl", format="alpaca", columns={"output": "answer"}, loss_on="last"),
    )
    assert section.eval_sources == ()


def test_what_a_source_says_itself_wins_over_the_section() -> None:
    own = {"path": "b", "split": "test", "format": "text", "columns": {}, "loss_on": "all", "weight": 1}
    section = DataSection(
        train=[{"path": "a", "weight": 2}, own], eval=["e"], format="messages", columns={"messages": "chat"}
    )
    first, second = section.sources
    assert (first.key, first.format, first.columns, first.loss_on, first.weight) == (
        "data.train[0]", "messages", {"messages": "chat"}, "assistant", 2,
    )  # fmt: skip
    assert second == CompleteSource(key="data.train[1]", **own)
    (evaluated,) = section.eval_sources
    assert (evaluated.key, evaluated.path, evaluated.columns) == ("data.eval[0]", "e", {"messages": "chat"})


def test_the_same_source_may_be_listed_twice() -> None:
    assert [source.path for source in DataSection(train=["a.jsonl", "a.jsonl"]).sources] == ["a.jsonl", "a.jsonl"]


def test_a_section_made_in_python_is_held_to_the_same_rules() -> None:
    with pytest.raises(ValidationError, match=r"train\[1\]\.weight: missing for 'b'.*; give all sources a weight"):
        DataSection(train=[{"path": "a", "weight": 2}, "b"])


@pytest.mark.parametrize(
    "section",
    [
        {**MIXED, "weight_by": "tokens", "stopping_strategy": "all_exhausted"},
        {**MIXED, "mixing": "concatenate", "shuffle": False},
        {"train": ["a.jsonl", "b.jsonl"], "mixing": "concatenate", "shuffle": False},
        {"train": ["a.jsonl", "b.jsonl"], "streaming": True, "mixing": "concatenate"},
        {"train": "a.jsonl", "eval": ["b.jsonl"], "packing": True, "shuffle": True, "padding_free": True},
        {"train": ["a.jsonl", "b.jsonl"], "shuffle": False, "curriculum": "length"},
        {"train": ["a.jsonl", "b.jsonl"], "shuffle": False, "curriculum_column": "difficulty"},
        {"train": "a.jsonl", "weight_by": "rows", "stopping_strategy": "first_exhausted", "mixing": "interleave"},
    ],
)
def test_what_goes_together_is_taken(section) -> None:
    loaded = load_recipe({"model": "pico", "data": section, "train": {"max_steps": 5}})
    assert load_recipe(loaded) == loaded


def test_a_list_is_written_as_a_list_one_key_a_line(tmp_path) -> None:
    recipe = load_recipe({"model": "pico", "data": MIXED})
    text = dump_recipe(recipe)
    assert "  train:\n    - path: a.jsonl\n      name: null\n" in text
    (tmp_path / "recipe.yaml").write_text(text)
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again.data == recipe.data


def test_a_list_is_written_on_one_line_as_an_override_takes_it() -> None:
    line = to_inline_yaml(MIXED["train"])
    assert line == "[{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}]"
    recipe = load_recipe({"model": "pico", "data": {"train": "x.jsonl"}}, [f"data.train={line}"])
    assert recipe.data == DataSection(**MIXED)


@pytest.mark.parametrize("end", ["\r", "\x85", "\u2028", "\u2029"])
def test_an_end_of_line_that_readers_disagree_about_is_written_as_an_escape(end: str) -> None:
    text = to_yaml({"system": f"be brief{end}and kind"})
    assert end not in text
    assert yaml.safe_load(text) == {"system": f"be brief{end}and kind"}


@pytest.mark.parametrize("text", ["adapter.rank", "data.train[0]", "data.train[12].columns.prompt", "a[0][1].b"])
def test_keys_are_read_as_they_are_written(text: str) -> None:
    key = undotted(text)
    assert key is not None
    assert dotted(key) == text


@pytest.mark.parametrize("text", ["", ".", "a..b", "[0]", "a[x]", "a[-1]", "a[]", "a[0", "a]0[", "a[0]b", "a.[0]"])
def test_what_is_no_key_is_not_read_as_one(text: str) -> None:
    assert undotted(text) is None


@pytest.mark.parametrize(
    ("data", "method", "problem"),
    [
        ({}, "sft", "curriculum: requires data.shuffle=false"),
        ({"packing": True}, "sft", "curriculum: unsupported with data.packing"),
        ({"shuffle": False, "streaming": True}, "sft", "curriculum: unsupported with data.streaming"),
        ({"shuffle": False, "train": ["a.jsonl", "b.jsonl"], "mixing": "concatenate"}, "sft", "mixing: has no effect"),
        ({"shuffle": False}, "dpo", "curriculum: unsupported with method dpo"),
        ({"shuffle": False}, "grpo", "curriculum: unsupported with method grpo"),
    ],
)
def test_a_curriculum_that_cannot_be_kept_is_refused(data, method, problem) -> None:
    section = {"train": "a.jsonl", "curriculum": "length", **data}
    with pytest.raises(RecipeError, match=problem):
        load_recipe({"model": "pico", "method": method, "data": section, "train": {"max_steps": 5}})


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "curriculum_column: requires data.shuffle=false"),
        ({"packing": True}, "curriculum_column: unsupported with data.packing"),
        ({"shuffle": False, "streaming": True}, "curriculum_column: unsupported with data.streaming"),
        ({"shuffle": False, "train": ["a.jsonl", "b.jsonl"], "mixing": "concatenate"}, "mixing: has no effect"),
        ({"shuffle": False, "curriculum": "length"}, "curriculum_column: mutually exclusive with data.curriculum"),
    ],
)
def test_a_curriculum_by_a_column_that_cannot_be_kept_is_refused(data, problem) -> None:
    section = {"train": "a.jsonl", "curriculum_column": "difficulty", **data}
    with pytest.raises(RecipeError, match=problem):
        load_recipe({"model": "pico", "data": section, "train": {"max_steps": 5}})
