"""What a plan says of training a part of a model, and what it refuses."""

import pytest

from tests.estimates.shapes import LAPTOP, LLAMA_1B, LLAMA_8B
from tunekit.errors import PlanError, RecipeError
from tunekit.estimates.facts import DataFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.resolve import resolve
from tunekit.probe.model import known_model
from tunekit.recipe.load import load_recipe
from tunekit.recipe.schema import Recipe

QWEN_MOE = known_model("Qwen/Qwen3-30B-A3B")


def planned(model=LLAMA_8B, machine="8xh100", parallel=None, **adapter):
    asked = {"model": "m", "data": {"train": "x", "max_length": 1024}, "adapter": {"type": "full", **adapter}}
    asked |= {"train": {"global_batch_size": 64, "max_steps": 10}, "parallel": parallel or {}}
    hardware = LAPTOP if machine is None else find_machine(machine).hardware()
    return resolve(Recipe.model_validate(asked), hardware, model, DataFacts(num_train=1000))


def test_the_last_layers_of_8b_are_counted_by_hand():
    """Attention 2 x 4096 x (4096 + 1024), MLP 3 x 4096 x 14336, two norms."""
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096
    plan = planned(last_layers=2, machine="h100")
    assert plan.num_trainable_params == 2 * layer
    assert plan.layout.strategy == "single"
    assert plan.memory.parts["weights"] == 4 * LLAMA_8B.num_params
    (adapter,) = (reason for reason in plan.reasons if reason.topic == "adapter")
    assert adapter.choice == "full, of the last 2 layers"
    assert adapter.why.startswith(
        "436 M of 8.03 B parameters trained, 5.43%; no activations stored for the first 30 layers"
    )


def test_new_layers_of_8b_are_counted_by_hand():
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096
    plan = planned(new_layers=4, machine="h100")
    assert plan.num_trainable_params == 4 * layer
    assert plan.num_params == LLAMA_8B.num_params + 4 * layer
    assert plan.memory.parts["weights"] == 4 * plan.num_params
    (adapter,) = (reason for reason in plan.reasons if reason.topic == "adapter")
    assert adapter.choice == "full, of 4 new layers, 36 in total"
    assert "no activations stored for the first 8 layers" in adapter.why


def test_a_model_whose_states_do_not_fit_on_a_device_fits_in_part():
    assert planned(machine="h100").layout.offloads
    assert not planned(machine="h100", last_layers=1, unfrozen_parameters=["lm_head"]).layout.offloads


@pytest.mark.parametrize(
    ("model", "adapter", "why", "hint"),
    [
        (LLAMA_8B, {"last_layers": 33}, "33 exceeds the 32 layers", "32 or less"),
        (LLAMA_8B, {"unfrozen_parameters": ["lm_haed"]}, "no parameter that matches 'lm_haed'", "lm_head.weight"),
        (LLAMA_1B, {"unfrozen_parameters": ["lm_head"]}, "no parameter that matches 'lm_head'", "name the embedding"),
        (LLAMA_8B, {"new_layers": 5}, "5 does not divide the 32 layers", "1, 2, 4, 8, 16, 32"),
        (
            QWEN_MOE,
            {"new_layers": 1},
            "unknown whether the layers of .* end in products",
            "dense text model",
        ),
    ],
    ids=["layers", "pattern", "tied head", "new layers", "new layers of experts"],
)
def test_a_part_that_a_model_does_not_have_is_refused(model, adapter, why, hint):
    with pytest.raises(PlanError, match=why) as refused:
        planned(model, "h100", **adapter)
    assert hint in refused.value.hint


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_a_part_is_not_trained_in_layouts_in_which_it_is_untested(strategy):
    with pytest.raises(PlanError, match="training some of the parameters is untested with this layout") as refused:
        planned(parallel={"strategy": strategy}, last_layers=2)
    assert "use ddp" in refused.value.hint


def test_several_devices_train_a_part_by_ddp():
    assert planned(last_layers=2).layout.strategy == "ddp"


def test_a_pattern_that_is_none_is_refused_at_its_line(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model: m\ndata: {train: x.jsonl}\nadapter:\n  type: full\n  unfrozen_parameters:\n    - 'layers.('\n"
    )
    with pytest.raises(RecipeError, match=r"recipe.yaml:6:7: .*'layers.\(' is not a valid regular expression"):
        load_recipe(file)
