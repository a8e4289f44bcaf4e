"""What an adapter section names in vain, or cannot have of a model: told with what there is."""

from math import prod

import pytest

from tests.estimates.shapes import H100, LLAMA_1B
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.memory.states import num_trainable_params, trained_tensors
from tunekit.planner.decisions.adapters import adapter_faults
from tunekit.planner.resolve import resolve
from tunekit.probe.model import known_model
from tunekit.recipe.sections.adapters import LoraAdapter, OftAdapter

ENDINGS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
LEAVES = ("gate_up_proj", "down_proj")
UNFUSED = "k_proj, o_proj, q_proj, v_proj"
MOE = "Qwen/Qwen3-30B-A3B"

REFUSED = {
    "an expression that is an ending": (
        {"target_modules": "q_proj"},
        "adapter.target_modules: no linear layer of llama-3.2-1b matches the regular expression 'q_proj'; it must "
        f"match full names such as model.layers.0.self_attn.q_proj; for name suffixes write a list of: {ENDINGS}",
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
        "adapter.rank_pattern: no adapted module has the name suffix up_proj; available: q_proj",
    ),
    "an alpha of nothing": (
        {"layers_to_transform": [0], "alpha_pattern": {r"layers\.1\..*": 8.0}},
        r"adapter.alpha_pattern: no adapted module has the name suffix layers\.1\..*; available: " + ENDINGS,
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
        "adapter.target_modules: PEFT keeps only the last part of the names that a regular expression matches in "
        f"{MOE}; "
        "list the modules, such as [q_proj, v_proj]",
    ),
    "left out": (
        {"exclude_modules": ["q_proj", "down_proj"]},
        f"adapter.exclude_modules: PEFT ignores it for the experts and routers of {MOE}: down_proj; "
        "list other modules in adapter.target_modules",
    ),
    "a rank": (
        {"rank_pattern": {"gate_up_proj": 4}},
        f"adapter.rank_pattern: PEFT overrides it for the experts and routers of {MOE}: gate_up_proj; "
        f"limit it to {UNFUSED}",
    ),
}

NAMED = {
    "no such": (
        {"target_parameters": ["experts.w1"]},
        f"{MOE} has no parameter named experts.w1; available: experts.down_proj, experts.gate_up_proj",
    ),
    "a linear layer": (
        {"target_parameters": ["q_proj.weight"], "target_modules": ["v_proj"]},
        "q_proj.weight: model.layers.0.self_attn.q_proj.weight (4096 x 2048) is not a stack of expert matrices; "
        "available: experts.down_proj, experts.gate_up_proj",
    ),
    "twice": (
        {"target_parameters": ["experts.down_proj"]},
        "experts.down_proj is adapted by adapter.target_modules already; remove it from one of them",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_parameters_that_get_an_adapter_are_stacks_that_no_module_names(name):
    options, message = NAMED[name]
    with pytest.raises(PlanError) as caught:
        planned(known_model(MOE), **options)
    assert f"adapter.target_parameters: {message}" in str(caught.value)


def test_a_stack_that_is_named_itself_gets_the_rank_and_not_twice_that():
    model = known_model(MOE)
    adapters = (LoraAdapter(rank=4, target_modules=[], target_parameters=[f"experts.{leaf}"]) for leaf in LEAVES)
    for adapter in adapters:
        assert not list(adapter_faults(adapter, model))
        shapes = [shape for name, shape in model.tensors.items() if adapter.targets_parameter(name)]
        counted = sum(4 * experts * (outputs + inputs) for experts, outputs, inputs in shapes)
        assert counted and num_trainable_params(model, adapter) == counted
        assert sum(prod(shape) for shape in trained_tensors(model, adapter).values()) == counted


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_what_peft_cannot_do_with_parameters_is_refused_with_the_recipe(option):
    with pytest.raises(ValueError, match="unsupported by PEFT with target_parameters; unset one of them"):
        LoraAdapter(target_parameters=["experts.down_proj"], **option)


@pytest.mark.parametrize("start", ["gaussian", "olora"])
def test_biases_of_an_adapter_with_another_start_than_peft_has_them_for_are_refused(start):
    with pytest.raises(ValueError, match=f"unsupported by PEFT with init_lora_weights {start}; unset one of them"):
        LoraAdapter(lora_bias=True, init_lora_weights=start)


STARTS = {
    "quantized": (
        {"type": "qlora", "init_lora_weights": "pissa"},
        "pissa needs base weights that are not quantized; set adapter.type=lora, or use gaussian",
    ),
    "quantized, orthogonal": (
        {"type": "qlora", "init_lora_weights": "orthogonal"},
        "orthogonal needs base weights that are not quantized; set adapter.type=lora, or use gaussian",
    ),
    "odd ranks": (
        {"init_lora_weights": "orthogonal", "rank_pattern": {"q_proj": 3}},
        "orthogonal needs even ranks, got 3; change adapter.rank or rank_pattern",
    ),
    "dora": (
        {"init_lora_weights": "olora", "use_dora": True},
        "olora is unsupported with use_dora: the saved adapter subtracts its initial values, but DoRA normalizes the "
        "sum; unset one of them",
    ),
    "rslora of several ranks": (
        {"init_lora_weights": "pissa_niter_16", "use_rslora": True, "rank_pattern": {"q_proj": 4}},
        "pissa_niter_16 with use_rslora needs one rank and alpha; unset rank_pattern and alpha_pattern",
    ),
    "corda, quantized": (
        {"type": "qlora", "init_lora_weights": "corda"},
        "corda needs base weights that are not quantized; set adapter.type=lora, or use gaussian",
    ),
    "corda and dora": (
        {"init_lora_weights": "corda", "use_dora": True},
        "corda is unsupported with use_dora: the saved adapter subtracts its initial values, but DoRA normalizes the "
        "sum; unset one of them",
    ),
    "loftq of a whole base": (
        {"init_lora_weights": "loftq"},
        "loftq requires a 4-bit base; set adapter.type=qlora, or use pissa",
    ),
    "loftq and dora": (
        {"type": "qlora", "init_lora_weights": "loftq", "use_dora": True},
        "loftq is unsupported with use_dora, whose magnitudes are those of the base; unset one of them",
    ),
    "a rank too large": (
        {"init_lora_weights": "pissa", "rank": 600},
        "pissa: a rank exceeds the smaller size of its weight; lower adapter.rank or rank_pattern",
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_start_that_peft_or_what_is_saved_cannot_have_is_refused(name):
    options, message = STARTS[name]
    with pytest.raises(PlanError) as caught:
        planned(LLAMA_1B, **options)
    assert str(caught.value) == f"adapter.init_lora_weights: {message}"


def test_oft_of_weights_that_are_stored_transposed_is_refused():
    transposed = LLAMA_1B.model_copy(update={"model_type": "gpt2"})
    problem, hint = next(adapter_faults(OftAdapter(oft_block_size=32), transposed))
    assert problem == "adapter.type: oft is unsupported by PEFT for gpt2 models: their weights are stored transposed"
    assert hint == "set adapter.type=lora"
    assert not list(adapter_faults(LoraAdapter(), transposed))
    assert not list(adapter_faults(OftAdapter(oft_block_size=32), LLAMA_1B))


def test_ranks_that_rows_distribute_are_not_set_by_name_and_have_as_many_inputs():
    with pytest.raises(PlanError, match=r"adapter.rank_pattern: init_lora_weights=eva distributes ranks itself; unset"):
        planned(LLAMA_1B, init_lora_weights="eva", rank_pattern={"q_proj": 4})
    with pytest.raises(PlanError, match=r"adapter.rho: 2 times a rank of 1500 exceeds the 2048 inputs of a module"):
        planned(LLAMA_1B, init_lora_weights="eva", rank=1500)
    assert planned(LLAMA_1B, init_lora_weights="eva", rank_pattern={"q_proj": 4}, rho=1.0)


@pytest.mark.parametrize("start", ["corda", "eva"])
def test_rows_that_an_adapter_begins_with_are_tokens_in_a_file(start):
    adapter = {"type": "lora", "init_lora_weights": start}
    pairs = ROWS.model_copy(update={"format": "preference"})
    with pytest.raises(
        PlanError,
        match=f"{start} needs tokenized rows before training, but TRL tokenizes those of orpo during training",
    ):
        resolve(recipe(method={"type": "orpo"}, adapter=adapter), H100, LLAMA_1B, pairs)
    stream = {"path": "rows.jsonl", "train": "rows.jsonl", "streaming": True, "max_length": 128}
    del stream["path"]
    with pytest.raises(PlanError, match=f"{start} samples rows at random, which a stream does not allow"):
        resolve(recipe(data=stream, adapter=adapter, train={"max_steps": 5}), H100, LLAMA_1B, ROWS)


@pytest.mark.parametrize("start", ["eva", "loftq"])
def test_what_needs_whole_weights_is_refused_where_they_are_sharded(start):
    kind = "qlora" if start == "loftq" else "lora"
    asked = recipe(adapter={"type": kind, "init_lora_weights": start}, parallel={"strategy": "fsdp2"})
    with pytest.raises(PlanError, match=f"{start} needs unsharded weights in each process; use ddp, or gaussian"):
        resolve(asked, find_machine("2xh100").hardware(), LLAMA_1B, ROWS)


def test_an_adapter_that_makes_up_for_4_bits_is_not_compared_with_the_model_without_it():
    adapter, pairs = {"type": "qlora", "init_lora_weights": "loftq"}, ROWS.model_copy(update={"format": "preference"})
    with pytest.raises(PlanError, match=r"the model without its adapter is not the reference of dpo"):
        resolve(recipe(method={"type": "dpo"}, adapter=adapter), H100, LLAMA_1B, pairs)


def test_the_plan_says_what_bounds_ranks_that_rows_distribute():
    (reason,) = [r for r in planned(LLAMA_1B, rank=8, init_lora_weights="eva").reasons if r.topic == "adapter"]
    assert reason.why.startswith("at most ")
    words = "; 896 ranks distributed by the rows, at most 16 per module, estimated as if the largest modules got them"
    assert f"{words}; one forward pass over 256 rows before training" in reason.why


def test_experts_do_not_begin_with_parts_of_their_weights():
    with pytest.raises(PlanError, match=r"pissa is for linear layers, and the adapters of .* reach experts"):
        planned(known_model(MOE), init_lora_weights="pissa")
    on_attention = LoraAdapter(init_lora_weights="pissa", target_modules=["q_proj"])
    assert not list(adapter_faults(on_attention, known_model(MOE)))


def test_a_model_without_its_adapter_is_no_reference_once_its_weights_lack_a_part():
    with pytest.raises(PlanError, match=r"the model without its adapter is not the reference of dpo; use gaussian"):
        asked = recipe(method={"type": "dpo"}, adapter={"type": "lora", "init_lora_weights": "pissa"})
        resolve(asked, H100, LLAMA_1B, ROWS.model_copy(update={"format": "preference"}))


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_parts_are_taken_out_of_whole_weights(strategy):
    asked = recipe(adapter={"type": "lora", "init_lora_weights": "pissa"}, parallel={"strategy": strategy})
    with pytest.raises(PlanError, match=r"pissa decomposes unsharded weights; use ddp, or gaussian"):
        resolve(asked, find_machine("2xh100").hardware(), LLAMA_1B, ROWS)
    free = recipe(adapter={"type": "lora", "init_lora_weights": "pissa"})
    plan = resolve(free, find_machine("2xh100").hardware(), LLAMA_1B, ROWS)
    assert plan.layout.strategy == "ddp"


def test_the_plan_says_what_is_saved_of_a_start_in_the_base_weights():
    (reason,) = [r for r in planned(LLAMA_1B, rank=8, init_lora_weights="pissa").reasons if r.topic == "adapter"]
    assert reason.choice == "lora, rank 8, alpha 32, on all-linear, from pissa"
    plain, split = (planned(LLAMA_1B, rank=8, init_lora_weights=start) for start in ("gaussian", "pissa"))
    sizes = [(plan.saving.result_bytes, plan.saving.checkpoint_bytes) for plan in (plain, split)]
    more = 4 * plain.num_trainable_params
    assert [size + more for size in sizes[0]] == list(sizes[1])
    assert reason.why.endswith("; subtracted from the base weights, and saved as plain LoRA of rank 16")


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
