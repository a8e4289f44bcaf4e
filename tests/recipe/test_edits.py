"""What becomes of each edit of a recipe when a run goes on."""

from typing import get_args

import pytest

from tunekit.files import read_table
from tunekit.recipe.edits import _TABLE, Effect, edits, ruling, ruling_of, rulings
from tunekit.recipe.load import load_recipe
from tunekit.recipe.reading.parse import dotted
from tunekit.recipe.schema import all_fields, sections_of

BASE = {"model": "pico", "data": {"train": "example:chats.jsonl"}}
LEAVES = {key: field for key, field in all_fields() if not sections_of(field)}


def recipe(*overrides, **sections):
    return load_recipe({**BASE, **sections}, overrides)


def effects(before, now, strategy="single"):
    return {edit.name: ruling(edit, before, strategy).effect for edit in edits(before, now)}


def test_every_field_of_a_recipe_is_classified():
    assert [dotted(key) for key in LEAVES if ruling_of(key) is None] == []


def test_every_classified_key_is_one_of_a_recipe():
    known = {dotted(key) for key, _ in all_fields()}
    assert set(rulings()) <= known


@pytest.mark.parametrize("section", ["train", "parallel", "method", "output"])
def test_a_new_field_of_these_sections_has_to_be_thought_of(section):
    # What model, adapter and data say stays as it is unless somebody says otherwise.
    assert section not in rulings()


def test_every_key_has_one_ruling_of_a_known_effect():
    assert sum(len(group["keys"]) for group in read_table(_TABLE)) == len(rulings())
    assert {found.effect for found in rulings().values()} == set(get_args(Effect))


def test_what_cannot_be_had_says_why():
    assert [name for name, found in rulings().items() if found.effect != "takes effect" and not found.why] == []


@pytest.mark.parametrize(
    ("override", "effect"),
    [
        ("train.max_steps=7", "takes effect"),
        ("train.logging_steps=3", "takes effect"),
        ("train.lr_scheduler_type=constant", "takes effect"),
        ("parallel.max_restarts=2", "takes effect"),
        ("train.learning_rate=0.5", "saved state"),
        ("train.weight_decay=0.1", "saved state"),
        ("train.optim=sgd", "saved state"),
        ("train.seed=1", "saved state"),
        ("train.global_batch_size=4", "saved state"),
        ("data.shuffle=false", "saved state"),
        ("model=other", "refused"),
        ("adapter.rank=4", "refused"),
        ("adapter=full", "refused"),
        ("data.max_length=64", "refused"),
        ("data.train=example:sums.jsonl", "refused"),
        ("method=dpo", "refused"),
        ("method.trainer_args={adam_beta1: 0.5}", "refused"),
    ],
)
def test_an_edit_has_the_effect_that_its_field_has(override, effect):
    found = effects(recipe(), recipe(override))
    assert set(found.values()) == {effect}


def test_a_learning_rate_that_is_spelled_out_is_no_edit():
    assert edits(recipe(), recipe("train.learning_rate=2e-4")) == []


def test_an_edit_shows_what_was_and_what_is():
    (edit,) = edits(recipe(), recipe("train.max_steps=200"))
    assert edit.words == "train.max_steps (not set) -> 200"


def test_deepspeed_keeps_the_norm_of_gradients_and_others_do_not():
    before, now = recipe(), recipe("train.max_grad_norm=0.5")
    assert effects(before, now) == {"train.max_grad_norm": "takes effect"}
    assert effects(before, now, "zero2") == {"train.max_grad_norm": "saved state"}
    assert effects(before, now, "zero3") == {"train.max_grad_norm": "takes effect"}


def test_a_stream_may_have_more_bad_rows_and_prepared_rows_are_what_they_are():
    for streaming, effect in ((True, "takes effect"), (False, "refused")):
        data, train = {"train": "example:chats.jsonl", "streaming": streaming}, {"max_steps": 4}
        before, now = recipe(data=data, train=train), recipe("data.max_bad_rows=9", data=data, train=train)
        assert effects(before, now) == {"data.max_bad_rows": effect}
