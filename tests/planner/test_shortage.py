"""What is said where memory ran out after all."""

import pytest

from tests.estimates.shapes import LLAMA_1B, RTX_4090
from tunekit.estimates.facts import DataFacts
from tunekit.estimates.memory.memory import MemoryEstimate
from tunekit.planner.decisions.shortage import Shortage, change_that_fits
from tunekit.planner.plan import gib
from tunekit.planner.resolve import resolve
from tunekit.recipe.schema import Recipe

GIB = 2**30
PARTS = {"weights": 3, "optimizer": 2, "activations": 4, "context": 1, "reserve": 1}
PLANNED = MemoryEstimate(
    parts={part: size * GIB for part, size in PARTS.items()}, phase="head", phases={"head": 9 * GIB}
)


def ran_out(**found) -> Shortage:
    sizes = {name: size * GIB for name, size in found.items()}
    held = {"weights": 3 * GIB, "optimizer": 2 * GIB}
    return Shortage(planned=PLANNED, held=held, context_bytes=None, **sizes)


def test_a_plan_that_was_short_by_so_much_has_to_need_so_much_less():
    # 12 of tensors were there or asked for and 10 planned: 2 were not foreseen, and 11 are there for the next.
    assert ran_out(taken_bytes=10, free_bytes=1, asked_bytes=2).limit_bytes == (1 + 11 - 2) * GIB
    # What was asked for did not fit, so as much as is missing is what has to be saved.
    assert PLANNED.total_bytes - 10 * GIB == 1 * GIB


def test_a_device_with_less_than_was_planned_is_the_limit():
    assert ran_out(taken_bytes=5, free_bytes=1, asked_bytes=2).limit_bytes == (1 + 5 + 1) * GIB


def test_what_is_to_fit_is_less_than_what_did_not():
    assert ran_out(taken_bytes=10, free_bytes=8).limit_bytes < PLANNED.total_bytes


def test_the_plan_stands_beside_what_was_measured():
    found = ran_out(taken_bytes=10, free_bytes=1, asked_bytes=2, allocated_bytes=9)
    assert found.words() == "2.00 GiB requested; 9.00 GiB allocated and 10.0 GiB reserved, 1.00 GiB free"
    assert found.table().splitlines() == [
        "                         planned      measured",
        "  weights               3.00 GiB      3.00 GiB",
        "  optimizer             2.00 GiB      2.00 GiB",
        "  activations, reserve  5.00 GiB      5.00 GiB",
        "  context               1.00 GiB  not measured",
        "  total                 11.0 GiB      10.0 GiB",
    ]


@pytest.fixture
def plan():
    def make(**train):
        recipe = {"model": "m", "data": {"train": "x", "max_length": 2048}, "adapter": "full"}
        recipe["train"] = {"global_batch_size": 16, "max_steps": 1, "optim": "adafactor", **train}
        return resolve(Recipe.model_validate(recipe), RTX_4090, LLAMA_1B, DataFacts(num_train=100))

    return make


def test_a_smaller_micro_batch_is_tried_before_the_result_changes(plan):
    before = plan(micro_batch_size=8, gradient_checkpointing=True)
    words, changes = change_that_fits(before, LLAMA_1B, before.memory.total_bytes - 1)
    assert words.startswith("set train.micro_batch_size=4: needs ")
    assert words.endswith(", with the same result")
    assert changes == ("train.micro_batch_size=4",)


def test_with_one_sequence_activations_are_recomputed(plan):
    before = plan(micro_batch_size=1, gradient_checkpointing=False)
    words, changes = change_that_fits(before, LLAMA_1B, before.memory.total_bytes - 1)
    assert words.startswith("set train.gradient_checkpointing=true: needs ")
    assert changes == ("train.gradient_checkpointing=true",)
    after = plan(micro_batch_size=1, gradient_checkpointing=True)
    assert f"needs {gib(after.memory.total_bytes)}," in words


def test_where_no_micro_batch_fits_something_else_has_to_change(plan):
    words, changes = change_that_fits(plan(), LLAMA_1B, 6 * GIB)
    assert words.startswith("set adapter.type=lora: needs ")
    assert changes == ("adapter.type=lora",)
