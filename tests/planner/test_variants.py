"""Plans of one recipe with changes: every combination, and the largest that fits."""

import json

import pytest

from tests.planner.golden import ROWS, known_facts, recipe
from tunekit.errors import PlanError, RecipeError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.models.model_config import known_models
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.planner.variants import (
    LENGTH_STEP,
    Variant,
    Variants,
    changed,
    combinations,
    largest_batch,
    largest_length,
    largest_models,
    read_values,
)
from tunekit.recipe.load import load_recipe

MODEL = "Qwen/Qwen3-8B"


def plan_of(machine, model=MODEL):
    hardware = find_machine(machine).hardware()

    def plan(asked):
        facts = known_facts(asked.model.path if model is None else model)
        try:
            return resolve(asked, hardware, facts, ROWS)
        except PlanError as error:
            return error

    return plan


ASKED = load_recipe(
    recipe(model=MODEL, data={"max_length": 1024}, adapter="qlora", train={"global_batch_size": 8, "max_steps": 100})
)


def test_values_are_read_as_a_list_in_yaml():
    words = ["adapter.target_modules=[q_proj,v_proj],all-linear", "train.learning_rate=1e-4,0.5", "adapter.rank=8"]
    assert read_values([*words, "adapter.rank=16"]) == {
        "adapter.target_modules": [["q_proj", "v_proj"], "all-linear"],
        "train.learning_rate": [1e-4, 0.5],
        "adapter.rank": [8, 16],
    }


@pytest.mark.parametrize("word", ["adapter.rank", "adapter.rank=", "adapter.rank=[8", "adapter.rank=8]"])
def test_words_that_are_no_list_are_refused_by_name(word):
    with pytest.raises(RecipeError, match=r"--sweep adapter\.rank.*write key=value,value"):
        read_values([word])


def test_every_combination_makes_a_recipe_and_the_last_key_changes_fastest():
    found = combinations(ASKED, {"adapter.type": ["lora", "full"], "data.max_length": [256, 512]})
    assert [(asked.adapter.type, asked.data.max_length) for _, asked in found] == [
        ("lora", 256),
        ("lora", 512),
        ("full", 256),
        ("full", 512),
    ]
    assert found[1][0] == {"adapter.type": "lora", "data.max_length": 512}


def test_what_is_not_swept_over_stays_as_it_is():
    ((_, asked),) = combinations(ASKED, {"adapter.rank": [4]})
    assert asked.adapter.rank == 4
    assert asked.model_copy(update={"adapter": ASKED.adapter}) == ASKED


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adapter.type": ["lora", "qlorra"]}, r"with adapter\.type=qlorra: .*did you mean 'qlora'"),
        ({"adapter.rnak": [8]}, r"with adapter\.rnak=8: .*did you mean 'rank'"),
        ({"adapter.type": ["lora", "full"], "adapter.rank": [8]}, r"with adapter\.type=full adapter\.rank=8: "),
        ({"adapter.rank": [1, 2] * 6, "train.seed": [1, 2, 3] * 3}, r"12 x 9 = 108 plans exceeds the limit of 100"),
    ],
)
def test_a_value_that_is_not_valid_is_refused_by_name_before_anything_is_planned(values, message):
    with pytest.raises(RecipeError, match=message):
        combinations(ASKED, values)


def test_machines_count_among_the_plans_of_a_sweep():
    with pytest.raises(RecipeError, match=r"26 x 4 = 104 plans"):
        combinations(ASKED, {"train.seed": list(range(26))}, num_machines=4)


@pytest.mark.parametrize("machine", ["t4", "rtx4090"])
def test_the_longest_length_fits_and_the_next_does_not(machine):
    plan = plan_of(machine)
    as_it_is, largest, beyond = largest_length(ASKED, plan, machine, 40960)
    assert as_it_is.changes == {"data.max_length": 1024} and as_it_is.plan == plan(ASKED)
    length = largest.changes["data.max_length"]
    assert isinstance(plan(changed(ASKED, {"data.max_length": length})), Plan)
    assert beyond.changes["data.max_length"] == length + LENGTH_STEP
    assert isinstance(plan(changed(ASKED, {"data.max_length": length + LENGTH_STEP})), PlanError)


def test_a_length_beyond_what_the_model_has_is_told_as_such():
    _, largest, beyond = largest_length(ASKED, plan_of("h200"), "h200", 40960)
    assert largest.changes["data.max_length"] == 40960
    assert "40960 positions" in str(beyond.plan)


def test_more_memory_never_fits_shorter_sequences_or_smaller_batches():
    lengths, sizes = [], []
    for machine in ("t4", "rtx4090", "rtx5090", "h100"):
        plan = plan_of(machine)
        lengths.append(list(largest_length(ASKED, plan, machine, 40960))[1].changes["data.max_length"])
        batches = largest_batch(ASKED, plan, machine, num_devices=1, num_rows=1000)
        sizes.append(list(batches)[1].changes["train.micro_batch_size"])
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_the_largest_batch_is_one_micro_batch_a_step_on_each_device():
    plan = plan_of("8xrtx4090")
    as_it_is, largest, beyond = largest_batch(ASKED, plan, None, num_devices=8, num_rows=10**6)
    size = largest.changes["train.micro_batch_size"]
    assert as_it_is.changes == {"train.micro_batch_size": None, "train.global_batch_size": 8}
    assert largest.changes["train.global_batch_size"] == 8 * size
    assert (largest.plan.micro_batch_size, largest.plan.gradient_accumulation_steps) == (size, 1)
    assert largest.plan.layout.strategy == as_it_is.plan.layout.strategy
    assert isinstance(beyond.plan, PlanError) and beyond.changes["train.micro_batch_size"] == size + 1


def test_a_batch_is_never_larger_than_the_rows():
    _, largest, beyond = largest_batch(ASKED, plan_of("h200"), None, num_devices=1, num_rows=3)
    assert largest.changes["train.micro_batch_size"] == 3
    assert "only 3 training rows" in str(beyond.plan)


@pytest.mark.parametrize("offload", ["auto", "cpu"])
def test_what_fits_is_held_on_the_devices_unless_the_recipe_says_otherwise(offload):
    lora = recipe(
        model=MODEL,
        data={"max_length": 512},
        parallel={"offload_param_device": offload, "offload_optimizer_device": offload},
    )
    *_, largest = largest_models(lora, plan_of("t4", None), "t4", ["Qwen/Qwen2.5-72B", "Qwen/Qwen3-0.6B"])
    expected = {"auto": ("Qwen/Qwen3-0.6B", "none"), "cpu": ("Qwen/Qwen2.5-72B", "cpu")}[offload]
    assert (largest.changes["model.path"], largest.plan.layout.offload_param_device) == expected


def test_where_nothing_fits_only_the_least_is_shown():
    asked = recipe(model="meta-llama/Llama-3.1-70B", adapter="lora", parallel={"strategy": "single"})
    found = list(largest_length(asked, plan_of("t4", "meta-llama/Llama-3.1-70B"), "t4", 131072))
    assert [variant.note for variant in found] == ["unchanged", "next"]
    assert all(isinstance(variant.plan, PlanError) for variant in found)


def test_the_largest_models_are_one_of_each_maker_below_one_that_does_not_fit():
    names = [
        "Qwen/Qwen2.5-32B",
        "google/gemma-3-27b-it",
        "Qwen/Qwen3-14B",
        "Qwen/Qwen3-8B",
        "microsoft/Phi-4-mini-instruct",
    ]
    lora = recipe(model={"path": MODEL, "revision": "main"}, data={"max_length": 1024}, parallel={"strategy": "single"})
    plan = plan_of("rtx5090", None)
    found = list(largest_models(lora, plan, "rtx5090", names))
    fitting = [variant.changes["model.path"] for variant in found if isinstance(variant.plan, Plan)]
    assert fitting == ["Qwen/Qwen3-8B", "microsoft/Phi-4-mini-instruct"]
    assert found[0].note == "next" and found[0].changes["model.path"] == "Qwen/Qwen3-14B"
    assert known_models()["Qwen/Qwen3-14B"].num_params > known_models()[fitting[0]].num_params
    assert all(variant.plan.recipe.model.revision is None for variant in found[1:])


def test_variants_are_plain_data_and_a_table():
    plan, error = plan_of("h100")(ASKED), PlanError("too much", hint="take less")
    variants = Variants(ASKED, (Variant("h100", {"adapter.rank": 8}, plan), Variant(None, {"adapter.rank": 9}, error)))
    found = json.loads(json.dumps(variants.to_dict()))
    assert found["variants"][0]["plan"]["layout"]["strategy"] == plan.layout.strategy
    assert found["variants"][1] == {
        "machine": None,
        "note": "",
        "changes": {"adapter.rank": 9},
        "refused": "too much; take less",
    }
    frame = variants.to_frame()
    assert list(frame["fits"]) == [True, False]
    assert frame["memory_gib"][0] == plan.memory.total_bytes / 2**30
    assert frame["tokens_per_second_low"][0] == plan.speed.tokens_per_second.low
    assert "<table" in variants._repr_html_() and "too much; take less" in variants._repr_html_()
