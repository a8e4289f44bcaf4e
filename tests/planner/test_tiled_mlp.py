"""When MLPs are computed in tiles, what a plan says of it, and where it is refused."""

import pytest

from tests.estimates.shapes import GIB, LAPTOP
from tests.planner.golden import ROWS, known_facts, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.resolve import resolve
from tunekit.planner.resume import differences

LONG = {"max_length": 131_072}


def planned(machine="h100", *, known="meta-llama/Llama-3.1-8B", hardware=None, **sections):
    return resolve(recipe(**sections), hardware or find_machine(machine).hardware(), known_facts(known), ROWS)


def reasons(plan, topic):
    return [(reason.choice, reason.why) for reason in plan.reasons if reason.topic == topic]


def test_mlps_are_tiled_where_recomputing_and_offloading_are_not_enough():
    plan = planned("l40s", data=LONG)
    assert plan.layout_words == "single device, checkpointing, activations offloaded, tiled MLP"
    assert plan.mlp_tile_tokens == 4096
    ((choice, why),) = reasons(plan, "MLP")
    assert choice == "tiles of 4,096 tokens"
    assert why == "all tokens at once would not fit; each tile is recomputed in the backward pass"


def test_what_fits_without_is_not_tiled():
    assert planned("h100", data=LONG).mlp_tile_tokens is None


def test_mlps_are_tiled_where_host_memory_is_too_small_for_activations():
    cpu = LAPTOP.cpu.model_copy(update={"memory_free_bytes": 16 * GIB})
    plan = planned(hardware=find_machine("h100").hardware().model_copy(update={"cpu": cpu}), data=LONG)
    assert (plan.activation_offloading, plan.mlp_tile_tokens) == (False, 4096)


def test_the_saving_is_that_of_the_wide_values_counted_by_hand():
    """Gate, up and their product, and what reads them, are 14,336 wide: of each token they are not there any more."""
    train = {"micro_batch_size": 1, "gradient_checkpointing": True, "activation_offloading": False}
    whole, tiled = (
        planned("h200", data=LONG, train={**train, "tiled_mlp": tiles}, parallel={"strategy": "single"})
        for tiles in (False, True)
    )
    saved = whole.memory.phases["last layer"] - tiled.memory.phases["last layer"]
    # Three of 2 bytes that are kept, and at least two of their gradients, less the gradients of what tiles read, and
    # what one of them reads.
    wide, read = 5 * 2 * 14_336, 2 * 4096
    assert saved > (131_072 - 4096) * wide - 131_072 * 2 * read - 4096 * read
    assert whole.memory.phases["forward"] == tiled.memory.phases["forward"]


def test_the_price_is_one_forward_of_gate_and_up_projections():
    train = {"micro_batch_size": 1, "gradient_checkpointing": True}
    whole, tiled = (planned(train={**train, "tiled_mlp": tiles}) for tiles in (False, True))
    flops = [plan.speed.flops_per_token for plan in (whole, tiled)]
    assert flops[1] - flops[0] == 2 * 32 * 2 * 4096 * 14_336


def test_a_recipe_can_ask_for_it_and_forbid_it():
    tiled = planned(train={"tiled_mlp": True})
    assert tiled.mlp_tile_tokens == 4096
    assert reasons(tiled, "MLP")[0][1].startswith("set by the recipe; ")
    assert "tiled MLP off -> on" in differences(planned(train={"tiled_mlp": False}), tiled)
    with pytest.raises(PlanError) as caught:
        planned("l40s", data=LONG, train={"tiled_mlp": False}, parallel={"strategy": "single"})
    assert caught.value.changes == ("train.tiled_mlp=auto",)
    assert planned(data=LONG).change_first.startswith("train.tiled_mlp=true: ")


REFUSED = {
    "devices": ({}, "2xh100", "tiled MLPs are untested on several devices"),
    "method": ({"method": "dpo"}, "h100", "tiled MLPs are untested with dpo"),
    "dropout": ({"adapter": {"type": "lora", "dropout": 0.1}}, "h100", "untested with adapter.dropout"),
    "dora": ({"adapter": {"type": "lora", "use_dora": True}}, "h100", "untested with adapter.use_dora"),
    "bfloat16": ({"adapter": "full", "train": {"pure_bf16": True}}, "h100", "summed in bfloat16"),
    "fp8": ({"adapter": "full", "train": {"fp8": True}}, "h200", "untested with train.fp8"),
    "compiled": ({"train": {"torch_compile": True}}, "h100", "untested with train.torch_compile"),
    "liger": ({"model": {"path": "m", "kernels": "liger"}}, "h100", "untested with liger's kernels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_is_not_proved_it_is_refused_with_the_remedy(name):
    sections, machine, words = REFUSED[name]
    hardware = find_machine(machine).hardware()
    with pytest.raises(PlanError) as caught:
        planned(hardware=hardware, **{**sections, "train": {"tiled_mlp": True, **sections.get("train", {})}})
    assert words in caught.value.problem
    assert "unset train.tiled_mlp" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Qwen/Qwen3-30B-A3B", "the experts of qwen3_moe are not computed per token"),
        ("Qwen/Qwen3.5-9B", "untested"),
    ],
)
def test_models_whose_mlps_are_no_function_of_a_token_are_refused(model, words):
    with pytest.raises(PlanError, match=words):
        planned("h200", known=model, train={"tiled_mlp": True})


def test_on_a_cpu_it_is_done_where_it_is_asked_for():
    plan = planned(hardware=LAPTOP, known="Qwen/Qwen3-0.6B", data={"max_length": 512}, train={"tiled_mlp": True})
    assert (plan.layout.strategy, plan.mlp_tile_tokens) == ("single", 1024)
