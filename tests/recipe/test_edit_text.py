"""Changing a recipe's text: it says what it should, and all else stays as the user wrote it."""

import textwrap
from typing import Any

import pytest

from tunekit.errors import RecipeError
from tunekit.files import list_recipes
from tunekit.recipe.entries import UNSET, recipe_entries
from tunekit.recipe.load import load_recipe, read_text
from tunekit.recipe.reading.rewrite import edit_text, short_recipe

TEXT = """\
# My recipe.
model: pico  # small

data:
  train: chats.jsonl  # mine
  # Not too long:
  max_length: 256

adapter:  # low rank
  type: lora
  rank: 32  # found by trying
  target_modules: [q_proj, v_proj]

train: {max_steps: 30, learning_rate: 5e-5}
"""


def changed(before: str, after: str) -> tuple[list[str], list[str]]:
    """The lines that went, and those that came."""
    old, new = before.splitlines(), after.splitlines()
    return [line for line in old if line not in new], [line for line in new if line not in old]


@pytest.mark.parametrize(
    ("key", "value", "gone", "come"),
    [
        ("adapter.rank", 8, ["  rank: 32  # found by trying"], ["  rank: 8  # found by trying"]),
        ("adapter.rank", UNSET, ["  rank: 32  # found by trying"], []),
        ("adapter.alpha", 64, [], ["  alpha: 64"]),
        ("data.max_length", "many", ["  max_length: 256"], ["  max_length: many"]),
        (
            "adapter.target_modules",
            "all-linear",
            ["  target_modules: [q_proj, v_proj]"],
            ["  target_modules: all-linear"],
        ),
        ("model.path", "no", ["model: pico  # small"], ["model: 'no'  # small"]),
        ("model.dtype", "float32", ["model: pico  # small"], ["model:  # small", "  path: pico", "  dtype: float32"]),
        (
            "train.learning_rate",
            2e-5,
            ["train: {max_steps: 30, learning_rate: 5e-5}"],
            ["train: {max_steps: 30, learning_rate: 2.0e-05}"],
        ),
        (
            "data.train.split",
            "train[:5%]",
            ["  train: chats.jsonl  # mine"],
            ["  train:  # mine", "    path: chats.jsonl", "    split: train[:5%]"],
        ),
        ("method.type", "dpo", [], ["method: dpo"]),
        ("method.trainer_args.adam_beta1", 0.8, [], ["method:", "  trainer_args:", "    adam_beta1: 0.8"]),
    ],
)
def test_a_field_is_changed_and_nothing_else(key: str, value: Any, gone: list[str], come: list[str]) -> None:
    went, came = changed(TEXT, edit_text(TEXT, key, value))
    assert went == gone
    assert [line for line in came if line != "  type: sft"] == come


def test_a_section_stands_where_it_does_in_the_schema() -> None:
    tops = [line.partition(":")[0] for line in edit_text(TEXT, "method.type", "dpo").splitlines() if line[:1].isalpha()]
    assert tops == ["model", "data", "method", "adapter", "train"]
    assert "\n\nmethod: dpo\n\nadapter:" in edit_text(TEXT, "method.type", "dpo")


def test_another_variant_takes_out_what_it_does_not_have() -> None:
    text = edit_text(TEXT, "adapter.type", "full")
    assert read_text(text)["adapter"] == {"type": "full"}
    assert "adapter:  # low rank\n  type: full\n\ntrain:" in text
    text = edit_text(TEXT, "adapter.type", "qlora")
    assert read_text(text)["adapter"] == {"type": "qlora", "rank": 32, "target_modules": ["q_proj", "v_proj"]}


def test_a_section_goes_with_its_last_field() -> None:
    text = "model: pico\ndata:\n  train: a\nparallel:\n  max_restarts: 3\n"
    assert edit_text(text, "parallel.max_restarts", UNSET) == "model: pico\ndata:\n  train: a\n"


def test_sources_are_added_changed_and_removed() -> None:
    two = edit_text(TEXT, "data.train[1]", {"path": "more.jsonl"})
    assert read_text(two)["data"]["train"] == [{"path": "chats.jsonl"}, {"path": "more.jsonl"}]
    weighted = edit_text(edit_text(two, "data.train[0].weight", 3), "data.train[1].weight", 1)
    assert textwrap.dedent(weighted[weighted.index("data:") : weighted.index("  # Not")]) == (
        "data:\n  train:  # mine\n    - path: chats.jsonl\n      weight: 3\n    - path: more.jsonl\n      weight: 1\n"
    )
    one = edit_text(weighted, "data.train[0]", UNSET)
    assert read_text(one)["data"]["train"] == [{"path": "more.jsonl", "weight": 1}]
    assert "# Not too long:" in one


def test_items_that_stay_keep_their_comments() -> None:
    text = "model: pico\nmethod:\n  type: grpo\n  rewards:\n    # First.\n    - exact_match  # a\n    - length  # b\n"
    added = edit_text(text, "method.rewards[2]", {"type": "math"})
    assert added == f"{text}    - math\n"
    assert edit_text(added, "method.rewards[1]", UNSET) == text.replace("    - length  # b\n", "    - math\n")
    assert edit_text(text, "method.rewards[0].weight", 2) == text.replace(
        "- exact_match  # a", "- type: exact_match\n      weight: 2  # a"
    )


@pytest.mark.parametrize(
    "text",
    [
        "{model: pico, data: {train: a.jsonl}, adapter: {type: lora, rank: 8}}",
        "model: pico\ndata: {train: a.jsonl}\nadapter: lora",
        "model: pico\ndata:\n- wrong\nadapter: 3\n",
        "adapter:\n",
        "",
        "# only this\n",
        "base: &base {rank: 8}\nmodel: pico\nadapter:\n  <<: *base\n  type: lora\ntrain: &base2\n  seed: 3\n",
        "model: pico\nadapter:\n  type: >-\n    lora\n\n  rank: 8\no:\n  s:\n  - |\n    Hi\n\n  - b\n",
        'model: pico\n"adapter" : lora # x\n',
    ],
)
def test_it_says_what_it_should_however_it_was_written(text: str) -> None:
    before = read_text(text)
    after = read_text(edit_text(text, "adapter.rank", 4))
    assert after["adapter"]["rank"] == 4
    assert after["adapter"]["type"] == "lora"
    assert {name: value for name, value in after.items() if name != "adapter"} == {
        name: value for name, value in before.items() if name != "adapter"
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["sft/quickstart", "pico/grpo"])
def test_every_field_of_a_shipped_recipe_is_set_and_taken_out_with_all_comments_kept(name: str) -> None:
    text = next(recipe.path for recipe in list_recipes() if recipe.name == name).read_text()
    comments = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    for entry in recipe_entries(read_text(text)):
        if entry.kind in ("section", "sections") or entry.is_tag:
            continue
        edited = edit_text(text, entry.key, "other")
        after = {one.key: one.value for one in recipe_entries(read_text(edited))}
        before = {
            one.key: one.value for one in recipe_entries(read_text(text)) if one.kind not in ("section", "sections")
        }
        assert after[entry.key] == "other"
        assert {key: after[key] for key in before if key != entry.key and not key.endswith(".type")} == {
            key: value for key, value in before.items() if key != entry.key and not key.endswith(".type")
        }
        assert [line for line in edited.splitlines() if line.lstrip().startswith("#")] == comments, entry.key
        if entry.value is UNSET:
            back = read_text(edit_text(edited, entry.key, UNSET))
            assert {name: value for name, value in back.items() if name in read_text(text)} == read_text(text)


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes()])
def test_a_recipe_without_its_defaults_is_the_same(name: str) -> None:
    recipe = load_recipe(name)
    text = short_recipe(recipe)
    assert load_recipe(read_text(text)) == recipe
    assert len(text.splitlines()) < 40


def test_a_text_or_key_that_cannot_be_edited_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"recipe:1:8: unclosed '\['"):
        edit_text("model: [pico\n", "adapter.rank", 3)
    with pytest.raises(RecipeError, match=r"adapter\.rnak: unknown key"):
        edit_text(TEXT, "adapter.rnak", 3)
    with pytest.raises(RecipeError, match=r"data.train\[3\]: the list has 1 items; the next item is data.train\[1\]"):
        edit_text(TEXT, "data.train[3]", {"path": "x"})
