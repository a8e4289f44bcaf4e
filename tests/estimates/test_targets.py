"""Which modules an adapter section means, and with which ranks and scales: as PEFT chooses and builds them."""

from math import prod

import pytest
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer

from tests.estimates.test_architectures import built, facts_of, tiny, tiny_with_vision
from tunekit.estimates.memory.states import num_trainable_params, trained_tensors
from tunekit.models.load import attach_adapter
from tunekit.planner.decisions.adapters import adapter_faults
from tunekit.recipe.sections.adapters import LoraAdapter

pytestmark = pytest.mark.filterwarnings("ignore:The following", "ignore:You have passed exclude_modules")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LEAVES = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

OPTIONS = {
    "some are left out": {"exclude_modules": ["down_proj", "layers.1.self_attn.q_proj"]},
    "of a list": {"target_modules": ATTENTION, "exclude_modules": ["0.self_attn.q_proj", "o_proj"]},
    "in some layers": {"target_modules": LEAVES, "layers_to_transform": [0, 2]},
    "a whole name in another layer": {
        "target_modules": ["q_proj", "model.layers.1.mlp.up_proj"],
        "layers_to_transform": [2],
    },
    "an expression": {"target_modules": r"model\.layers\.[02]\.(self_attn\.[qv]|mlp\.up)_proj"},
    "an expression and some left out": {"target_modules": r".*_proj", "exclude_modules": ["v_proj"]},
    "ranks": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6}},
    "the first rank that matches": {"rank_pattern": {r"layers\.[01]\..*": 3, "q_proj": 2, ".*_proj": 9}},
    "ranks and scales": {
        "rank_pattern": {"^model.layers.0.self_attn.k_proj": 5},
        "alpha_pattern": {"k_proj": 3.0, r"2\.mlp\..*": 5.0},
        "use_rslora": True,
    },
    "biases": {"lora_bias": True, "rank_pattern": {"o_proj": 2}, "exclude_modules": ["k_proj"]},
    "ranks of dora": {"use_dora": True, "rank_pattern": {"o_proj": 2}, "exclude_modules": ["k_proj"]},
}


def by_peft(name, options):
    """PEFT's own adapters by these options: names, ranks and scales; and the number of trained values."""
    config = LoraConfig(r=4, lora_alpha=8, **{"target_modules": "all-linear"} | options)
    return described(get_peft_model(built(tiny(name)), config))


def described(model):
    layers = {
        name.removeprefix("base_model.model."): (layer.r["default"], layer.scaling["default"])
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    return layers, sum(p.numel() for p in model.parameters() if p.requires_grad)


BESIDE_EXPERTS = {
    "in a layer": {"target_modules": ATTENTION, "layers_to_transform": [1]},
    "some are left out": {"exclude_modules": ["q_proj", "1.self_attn.o_proj"]},
    "ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3.0}},
    "an expression": {"target_modules": r".*\.self_attn\.[qv]_proj"},
}
FAMILIES = ("llama", "qwen2", "gemma2")
CASES = [pytest.param(name, OPTIONS[option], id=f"{name}-{option}") for name in FAMILIES for option in OPTIONS]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_modules_ranks_and_scales_are_those_of_peft(name, options):
    adapter, facts = LoraAdapter(rank=4, alpha=8, **options), facts_of(tiny(name))
    layers, num_trained = by_peft(name, options)
    assert described(attach_adapter(built(tiny(name)), adapter, seed=0)) == (layers, num_trained)
    assert facts.adapted(adapter).ranks == {module: rank for module, (rank, _) in layers.items()}
    assert num_trainable_params(facts, adapter) == num_trained
    assert sum(map(prod, trained_tensors(facts, adapter).values())) == num_trained


@pytest.mark.parametrize("option", BESIDE_EXPERTS)
def test_beside_experts_they_are_those_of_peft_too(option):
    options, config = BESIDE_EXPERTS[option], tiny("qwen3_moe")
    adapter, facts = LoraAdapter(rank=4, alpha=8, **options), facts_of(config)
    assert not list(adapter_faults(adapter, facts))
    layers, num_trained = by_peft("qwen3_moe", options)
    assert described(attach_adapter(built(config), adapter, seed=0)) == (layers, num_trained)
    assert num_trainable_params(facts, adapter) == num_trained
    assert sum(map(prod, trained_tensors(facts, adapter).values())) == num_trained


def test_all_linear_layers_of_some_decoder_layers_are_adapted():
    """PEFT takes no layers beside `all-linear`; with the names of all linear layers it does."""
    adapter = LoraAdapter(rank=4, alpha=8, layers_to_transform=[1])
    layers, num_trained = by_peft("llama", {"target_modules": LEAVES, "layers_to_transform": [1]})
    assert described(attach_adapter(built(tiny("llama")), adapter, seed=0)) == (layers, num_trained)
    assert set(facts_of(tiny("llama")).adapter_linears(adapter)) == set(layers) and len(layers) == 7


def test_an_expression_reaches_neither_the_head_nor_what_is_no_linear_layer():
    """PEFT would adapt the embedding and the head, and fail at a decoder layer."""
    with pytest.raises(ValueError, match="is not supported"):
        by_peft("llama", {"target_modules": ".*"})
    adapter = LoraAdapter(rank=4, target_modules=".*")
    layers, _ = described(attach_adapter(built(tiny("llama")), adapter, seed=0))
    assert set(layers) == set(facts_of(tiny("llama")).linears) == set(facts_of(tiny("llama")).adapter_linears(adapter))


@pytest.mark.parametrize(
    "options",
    [{"exclude_modules": ["k_proj"]}, {"layers_to_transform": [1]}, {"target_modules": r".*\.[qv]_proj"}],
    ids=["left out", "a layer", "an expression"],
)
def test_a_vision_tower_has_no_adapter_whatever_is_chosen(options):
    config, adapter = tiny_with_vision(vision_use_head=False), LoraAdapter(rank=4, **options)
    layers, num_trained = described(attach_adapter(built(config), adapter, seed=0))
    assert layers and not any(
        "vision_tower" in name or ("k_proj" in name and "exclude" in str(options)) for name in layers
    )
    assert num_trainable_params(facts_of(config), adapter) == num_trained
