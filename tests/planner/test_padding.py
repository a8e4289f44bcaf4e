"""When rows are padded, when they lie one behind the other, and what it costs."""

import pytest

from tests.estimates.shapes import H100, LLAMA_1B
from tunekit.estimates.facts import DataFacts
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.recipe.schema import Recipe

ROWS = DataFacts(num_train=1000)
FLASH = H100.model_copy(update={"flash_attn": True})


def planned(hardware=H100, *, size=4, model_type="llama", **data) -> Plan:
    facts = LLAMA_1B.model_copy(update={"model_type": model_type})
    section = {"train": "chats.jsonl", **data}
    train = {"global_batch_size": 16, "max_steps": 5, "micro_batch_size": size}
    # Whose head scores tokens is not what is looked at.
    model = {"path": "m", "kernels": "torch"}
    return resolve(Recipe.model_validate({"model": model, "data": section, "train": train}), hardware, facts, ROWS)


def padding(plan: Plan) -> tuple[bool, str, str]:
    (reason,) = (reason for reason in plan.reasons if reason.topic == "padding")
    return plan.padding_free, reason.choice, reason.why


PADDED, FREE = "to the longest row in the micro-batch", "none (padding-free)"
A_MASK = "sdpa separates documents by a mask over the whole micro-batch"

SDPA = H100.model_copy(update={"accelerators": (H100.device.model_copy(update={"compute_capability": (7, 5)}),)})
"""A device without flash attention."""

CASES = {
    "sdpa": (planned(SDPA), PADDED, "padding-free with sdpa would need a quadratic mask"),
    "own": (planned(), FREE, "tunekit_varlen reads the row boundaries"),
    "own, one row": (planned(size=1), PADDED, "one row per micro-batch"),
    "flash": (planned(FLASH), FREE, "flash_attention_2 reads the row boundaries"),
    "flash, one row": (planned(FLASH, size=1), PADDED, "one row per micro-batch"),
    "flash, state": (
        planned(FLASH, model_type="qwen3_next"),
        PADDED,
        "recurrent layers would process padding-free rows one by one",
    ),
    "asked for with sdpa": (planned(SDPA, padding_free=True), FREE, f"set by the recipe; {A_MASK}"),
    "asked for with flash": (planned(FLASH, padding_free=True), FREE, "set by the recipe"),
    "not wanted": (planned(FLASH, padding_free=False), PADDED, "set by the recipe"),
    "packed with sdpa": (planned(SDPA, packing=True), FREE, f"packed; {A_MASK}"),
    "packed with flash": (planned(FLASH, packing=True), FREE, "packed"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_whether_rows_are_padded_and_why(name):
    plan, choice, why = CASES[name]
    assert padding(plan) == (choice == FREE, choice, why)


def test_rows_one_behind_the_other_need_memory_for_their_mask_and_flash_attention_has_none():
    def activations(*args, **options):
        return planned(*args, **options).memory.parts["activations"]

    assert activations(FLASH) == activations(FLASH, packing=True) == activations(FLASH, padding_free=True)
    assert activations() == activations(FLASH)
    assert activations(FLASH) < activations(FLASH, padding_free=False) == activations(SDPA)
    assert activations(SDPA) < activations(SDPA, padding_free=True) == activations(SDPA, packing=True)
    # A single row: padded to nothing, and packed with a mask of its own.
    assert activations(SDPA, size=1) == activations(SDPA, size=1, padding_free=True)
    assert activations(SDPA, size=1) < activations(SDPA, size=1, packing=True)


def test_a_mask_over_the_whole_micro_batch_keeps_it_small():
    """More than keeps the device busy only makes the mask wider, where it would fit as well."""
    for data in ({"packing": True}, {"padding_free": True}):
        plan = planned(SDPA, size=None, **data)
        assert plan.micro_batch_size == 2
        (reason,) = (reason for reason in plan.reasons if reason.topic == "batch")
        assert reason.why == "enough to keep the device busy; more would only widen the sdpa mask"
        assert planned(FLASH, size=None, **data).micro_batch_size == 16
    assert planned(SDPA, size=None).micro_batch_size == 16
    assert planned(SDPA, size=None, packing=True, max_length=4096).micro_batch_size == 1
