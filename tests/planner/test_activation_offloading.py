"""When activations are offloaded, what a plan says of it, and where it is refused."""

import pytest

from tests.estimates.shapes import GIB, H100, LAPTOP, LLAMA_8B
from tests.planner.golden import ROWS, known_facts, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.resolve import resolve
from tunekit.planner.resume import differences

LONG = {"max_length": 131_072}


def planned(hardware=None, *, model="meta-llama/Llama-3.1-8B", **sections):
    return resolve(recipe(**sections), hardware or find_machine("h100").hardware(), known_facts(model), ROWS)


def reasons(plan, topic):
    return [(reason.choice, reason.why) for reason in plan.reasons if reason.topic == topic]


def test_activations_are_offloaded_where_recomputation_alone_does_not_fit():
    plan = planned(data=LONG)
    assert (plan.layout.strategy, plan.gradient_checkpointing, plan.activation_offloading) == ("single", True, True)
    assert plan.layout_words == "single device, checkpointing, activations offloaded"
    # By hand: 32 layers x 131,072 tokens x 4096 values of 2 bytes, of which 5 layers' wait for their copies.
    layer = 131_072 * 4096 * 2
    assert plan.memory.offloaded_bytes == 32 * layer == 32 * GIB
    without = planned(data=LONG, train={"micro_batch_size": 1}, parallel={"strategy": "single"}, hardware=H200)
    assert not without.activation_offloading
    assert without.memory.phases["last layer"] - plan.memory.phases["last layer"] == (32 - 5) * layer
    assert without.memory.phases["first layer"] == plan.memory.phases["first layer"]
    assert 32 * layer < plan.memory.host_bytes < 40 * layer
    ((choice, why),) = reasons(plan, "activations")
    assert choice == "layer inputs in pinned host memory, 32.0 GiB"
    assert why == (
        "recomputation alone would not be enough; copied on a separate stream while other layers compute (predicted, "
        "not measured); host memory of this machine unknown"
    )
    # 64 GiB there and back.
    ((sent, _),) = reasons(plan, "communication")
    assert sent.startswith("68.7 GB per micro-batch to host memory, hidden by its 131,072 tokens")
    assert plan.memory.confidence == "closed form"


H200 = find_machine("h200").hardware()


def test_what_fits_without_is_not_offloaded():
    for length in (8192, 32_768, 65_536):
        plan = planned(data={"max_length": length})
        assert (plan.layout.strategy, plan.activation_offloading) == ("single", False)


def test_pinned_memory_is_counted_in_powers_of_two():
    """Of rows of 100,000 tokens each layer's input is 0.76 GiB, for which torch takes one of 1 GiB."""
    plan = planned(data={"max_length": 100_000}, train={"activation_offloading": True, "micro_batch_size": 1})
    assert plan.memory.offloaded_bytes == 32 * 100_000 * 4096 * 2
    assert plan.memory.host_bytes > 32 * GIB


def test_host_memory_that_is_too_small_rules_it_out():
    def hardware(host_gib):
        cpu = LAPTOP.cpu.model_copy(update={"memory_free_bytes": host_gib * GIB})
        return find_machine("h100").hardware().model_copy(update={"cpu": cpu})

    assert planned(hardware(64), data=LONG).activation_offloading
    with pytest.raises(PlanError, match=r"needs 36\.\d GiB of host memory per node, limit 28\.8 GiB"):
        planned(hardware(32), data=LONG, parallel={"strategy": "single"}, train={"tiled_mlp": False})


def test_a_recipe_can_ask_for_it_and_forbid_it():
    plan = planned(train={"activation_offloading": True})
    assert (plan.gradient_checkpointing, plan.activation_offloading) == (True, True)
    assert reasons(plan, "activations")[0][1].startswith("set by the recipe; ")
    neither = {"activation_offloading": False, "tiled_mlp": False}
    forbidden = planned(data=LONG, train=neither)
    assert (forbidden.activation_offloading, forbidden.layout.offloads) == (False, True)
    with pytest.raises(PlanError) as caught:
        planned(data=LONG, train=neither, parallel={"strategy": "single"})
    assert caught.value.changes == ("train.activation_offloading=auto",)
    assert "activation offloading off -> on" in differences(forbidden, planned(data=LONG))


def test_it_is_what_to_change_first_where_memory_may_run_out():
    plan = planned(data={"max_length": 65_536}, train={"micro_batch_size": 1})
    assert plan.change_first.startswith("train.activation_offloading=true: ")


REFUSED = {
    "cpu": ({}, LAPTOP, "single device: on a CPU, activations are in host memory already"),
    "devices": ({}, find_machine("2xh100").hardware(), "DDP: activation offloading is untested on several devices"),
    "zero": ({"parallel": {"strategy": "zero3"}}, H100, "activation offloading is untested on several devices"),
    "fp8": ({"adapter": "full", "train": {"fp8": True}}, find_machine("h200").hardware(), "untested with train.fp8"),
    "compiled": ({"train": {"torch_compile": True}}, H100, "untested with train.torch_compile"),
    "method": (
        {"method": {"type": "orpo"}, "data": {"packing": False}},
        H100,
        "TRL does not offload activations of orpo",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_is_not_done_right_it_is_refused_with_the_remedy(name):
    sections, hardware, words = REFUSED[name]
    train = {"activation_offloading": True, **sections.get("train", {})}
    with pytest.raises(PlanError) as caught:
        resolve(recipe(**{**sections, "train": train}), hardware, LLAMA_8B, ROWS)
    assert words in caught.value.problem
    assert "unset train.activation_offloading" in str(caught.value)
