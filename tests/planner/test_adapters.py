"""What an adapter section names in vain, or cannot have of a model: told with what there is."""

import pytest

from tests.estimates.shapes import H100, LLAMA_1B
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.planner.resolve import resolve
from tunekit.probe.model import known_model

ENDINGS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
UNFUSED = "k_proj, o_proj, q_proj, v_proj"
MOE = "Qwen/Qwen3-30B-A3B"

REFUSED = {
    "an expression that is an ending": (
        {"target_modules": "q_proj"},
        "adapter.target_modules: no linear layer of llama-3.2-1b matches the regular expression 'q_proj'; it must "
        f"match whole names such as model.layers.0.self_attn.q_proj; for name endings write a list of: {ENDINGS}",
    ),
    "an unknown module left out": (
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj", "mlp"]},
        "adapter.exclude_modules: no adapted module is named mlp; available: q_proj, v_proj",
    ),
    "nothing left": (
        {"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
        "adapter.exclude_modules: no module is left to adapt; unset exclude_modules, or adapt more modules",
    ),
    "a layer too many": (
        {"layers_to_transform": [0, 16]},
        "adapter.layers_to_transform: llama-3.2-1b has no layer 16; its layers are 0 to 15",
    ),
    "a rank of nothing": (
        {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4, "up_proj": 8}},
        "adapter.rank_pattern: no adapted module has a name that ends in up_proj; available: q_proj",
    ),
    "an alpha of nothing": (
        {"layers_to_transform": [0], "alpha_pattern": {r"layers\.1\..*": 8.0}},
        r"adapter.alpha_pattern: no adapted module has a name that ends in layers\.1\..*; available: " + ENDINGS,
    ),
}
OF_EXPERTS = {
    "layers": (
        {"layers_to_transform": [0]},
        f"adapter.layers_to_transform: PEFT adapts the experts and routers of {MOE} in all layers; "
        f"limit adapter.target_modules to {UNFUSED}",
    ),
    "an expression": (
        {"target_modules": r".*\.experts\..*"},
        f"adapter.target_modules: PEFT takes only the last names of what a regular expression matches in {MOE}; "
        "list the modules, such as [q_proj, v_proj]",
    ),
    "left out": (
        {"exclude_modules": ["q_proj", "down_proj"]},
        f"adapter.exclude_modules: PEFT adapts the experts and routers of {MOE} nevertheless: down_proj; "
        "leave them out of a list in adapter.target_modules",
    ),
    "a rank": (
        {"rank_pattern": {"gate_up_proj": 4}},
        f"adapter.rank_pattern: PEFT sets that of the experts and routers of {MOE} itself: gate_up_proj; "
        f"limit it to {UNFUSED}",
    ),
}


def planned(model, **adapter):
    return resolve(recipe(adapter={"type": "lora", **adapter}), H100, model, ROWS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_named_in_vain_is_refused_with_what_there_is(name):
    options, message = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        planned(LLAMA_1B, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_what_peft_would_do_to_all_experts_alike_is_refused(name):
    options, message = OF_EXPERTS[name]
    with pytest.raises(PlanError) as caught:
        planned(known_model(MOE), **options)
    assert str(caught.value) == message


def test_beside_experts_an_expression_and_layers_choose_of_what_is_not_fused():
    attention = planned(known_model(MOE), target_modules=r".*\.self_attn\.[qv]_proj")
    some = planned(known_model(MOE), target_modules=["q_proj", "v_proj"], layers_to_transform=[0, 1, 2])
    assert attention.num_trainable_params == 16 * some.num_trainable_params


def test_the_plan_says_what_is_chosen():
    plan = planned(
        LLAMA_1B,
        exclude_modules=["down_proj"],
        layers_to_transform=[14, 15],
        rank_pattern={"q_proj": 4},
        alpha_pattern={"q_proj": 8.0},
    )
    (reason,) = [reason for reason in plan.reasons if reason.topic == "adapter"]
    assert reason.choice == (
        "lora, rank 16, alpha 32, on all-linear without down_proj in layers 14, 15; rank 4 on q_proj; alpha 8 on q_proj"
    )
    # By hand, of Llama 3.2 1B: queries 2048 x 2048 at rank 4; keys and values 512 x 2048, output 2048 x 2048, gate and
    # up 8192 x 2048 at rank 16; in two layers.
    each = 4 * 4096 + 16 * (2 * (512 + 2048) + 4096 + 2 * (8192 + 2048))
    assert plan.num_trainable_params == 2 * each
