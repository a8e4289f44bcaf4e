"""What a plan says of learning rates by group, and what it refuses."""

import pytest

from tests.estimates.shapes import LLAMA_8B
from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.resolve import resolve
from tunekit.recipe.schema import Recipe


def planned(adapter, train=None, machine="8xh100", **parallel):
    asked = {"model": "m", "data": {"train": "x", "max_length": 1024}, "adapter": adapter, "parallel": parallel}
    asked["train"] = {"global_batch_size": 64, "max_steps": 10, "learning_rate": 1e-4, **(train or {})}
    return resolve(Recipe.model_validate(asked), find_machine(machine).hardware(), LLAMA_8B, DataFacts(num_train=1000))


def rates(plan):
    return [(reason.choice, reason.why) for reason in plan.reasons if reason.topic == "learning rates"]


def test_lora_plus_on_8b_is_counted_by_hand():
    """Rank 16: A has 16 rows of the inputs of q, k, v, o, gate, up and down, and B 16 columns of their outputs."""
    inputs, outputs = 6 * 4096 + 14336, 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096
    assert (16 * 32 * inputs, 16 * 32 * outputs) == (19_922_944, 22_020_096)
    ((choice, why),) = rates(planned({"type": "lora", "rank": 16, "loraplus_lr_ratio": 16}))
    assert choice == "19.9 M parameters at 0.0001, 22 M parameters at 0.0016"
    assert why == "set by the recipe; the schedule scales all of them, and logs show the first, 0.0001"


def test_rates_by_layer_are_named_from_the_last_to_the_first():
    ((choice, _),) = rates(planned("full", {"layerwise_lr_decay": 0.5}))
    first, second, *_, last = choice.split(", ")
    assert first.endswith("at 0.0001")
    assert second.endswith("at 5e-05")
    # The embedding lies below 32 layers.
    assert last == f"525 M parameters at {1e-4 * 0.5**32:.3g}"


def test_one_rate_for_all_is_not_told_twice():
    assert rates(planned("lora")) == []


def test_a_pattern_that_matches_nothing_that_is_trained_is_refused():
    with pytest.raises(PlanError, match=r"no trained parameter of .* matches 'embed_tokens'"):
        planned("lora", {"learning_rates": {"embed_tokens": 1e-5}})
    assert planned("full", {"learning_rates": {"embed_tokens": 1e-5}})


@pytest.mark.parametrize("parallel", [{"strategy": "zero3"}, {"strategy": "fsdp2", "tp_size": 8}])
def test_layouts_in_which_groups_are_untested_are_refused(parallel):
    with pytest.raises(PlanError, match="several learning rates are untested with this layout") as refused:
        planned("full", {"layerwise_lr_decay": 0.9}, **parallel)
    assert "fsdp2" in refused.value.hint
