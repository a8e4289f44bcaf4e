"""Tensors from a config.json alone are those that transformers builds on the meta device, name by name."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import save_file

from tunekit.errors import ModelError
from tunekit.estimates.memory.experts import Mixture
from tunekit.estimates.memory.states import num_trainable_params, trained_tensors
from tunekit.estimates.models.architectures import FAMILIES, tensors_of
from tunekit.estimates.models.model_config import complete, layer_types_of, model_types
from tunekit.models.load import attach_adapter
from tunekit.planner.decisions.adapters import expert_faults
from tunekit.probe.model import probe_model, sketch_model
from tunekit.recipe.sections.adapters import LoraAdapter
from tunekit.recipe.sections.model import ModelSection

SMALL = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 12, "q_lora_rank": 20, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 24, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
VISION = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7, "model_type": "siglip_vision_model",
}  # fmt: skip

TINY = {
    "llama": {},
    "llama-with-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "llama-without-grouped-heads": {"model_type": "llama", "num_key_value_heads": None},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"head_dim": 10},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 20},
    "qwen3-with-biases": {"model_type": "qwen3", "attention_bias": True},
    "phi3": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {"mlp_bias": True},
    "mixtral": MOE,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_moe-partly-dense": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "mlp_only_layers": [0], "decoder_sparse_step": 2,
    },
    "gpt_oss": {**MOE, "head_dim": 8},
    "deepseek_v3": LATENT,
    "deepseek_v3-without-compressed-queries": {
        **LATENT, "model_type": "deepseek_v3", "q_lora_rank": None, "attention_bias": True
    },
}  # fmt: skip


def built(config):
    """The model of a config.json, on the meta device."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**settings))


def shapes(model):
    """Shapes of parameters by name, each parameter once."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def facts_of(config):
    """Facts as `tunekit plan` has them for a folder with nothing but this config.json."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({"architectures": ["SomeForCausalLM"], **config}))
        return sketch_model(ModelSection(path=folder))


def tiny(name):
    return {**SMALL, "model_type": name.partition("-")[0], **TINY[name]}


@pytest.mark.parametrize("name", TINY)
def test_every_name_and_shape_is_that_of_the_module(name):
    assert tensors_of(tiny(name)) == shapes(built(tiny(name)))


def test_every_family_has_its_defaults():
    assert set(FAMILIES) == set(model_types().defaults)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_config_json_omits_is_what_transformers_takes(name):
    from transformers import CONFIG_MAPPING

    assert tensors_of({"model_type": name}) == shapes(built({"model_type": name}))
    theirs = CONFIG_MAPPING[name]()
    assert complete({"model_type": name})["max_position_embeddings"] == theirs.max_position_embeddings
    ours = facts_of({"model_type": name})
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.num_kv_heads == theirs.num_key_value_heads


def test_the_coefficient_of_routers_is_that_of_transformers():
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = {name: CONFIG_MAPPING[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    theirs = {
        name: config.router_aux_loss_coef
        for name, config in classes.items()
        if hasattr(config, "output_router_logits") and hasattr(config, "router_aux_loss_coef")
    }
    assert theirs == {
        name: coefficient for name, coefficient in model_types().router_aux_loss_coef.items() if name in classes
    }
    assert all(name in CONFIG_MAPPING for name in model_types().router_aux_loss_coef)


def tiny_with_vision(**vision):
    text = {**SMALL, "model_type": "gemma3_text", "head_dim": 16}
    return {"model_type": "gemma3", "text_config": text, "vision_config": {**VISION, **vision}}


@pytest.mark.parametrize("with_head", [True, False])
def test_a_vision_tower_is_counted_with_its_decoder(with_head):
    config = tiny_with_vision(vision_use_head=with_head)
    assert tensors_of(config) == shapes(built(config))


def test_adapters_do_not_reach_the_vision_tower():
    config, adapter = tiny_with_vision(vision_use_head=False), LoraAdapter(target_modules="all-linear")
    adapted = attach_adapter(built(config), adapter, seed=0)
    facts = facts_of(config)
    assert set(facts.adapter_linears("all-linear")) == set(adapted.targeted_module_names)
    assert any("vision_tower" in name for name in facts.linears)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_alternate_as_transformers_has_them(name):
    from transformers import CONFIG_MAPPING

    theirs = getattr(CONFIG_MAPPING[name](), "layer_types", None) or []
    alternates = len(set(theirs)) > 1
    assert layer_types_of(complete({"model_type": name})) == (tuple(theirs) if alternates else ())


@pytest.mark.parametrize("name", TINY)
def test_linear_layers_are_those_of_the_module(name):
    """What bitsandbytes quantises, fused experts and routers not among it."""
    model = built(tiny(name))
    theirs = {found for found, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(facts_of(tiny(name)).linears) == theirs - {"lm_head"}


ATTENTION = ["o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
TARGETS = [(name, "all-linear") for name in TINY] + [
    (name, targets)
    for name in ("llama", "qwen3_moe", "qwen3_moe-partly-dense", "deepseek_v3")
    for targets in (ATTENTION, MLP, ATTENTION + MLP)
]  # fmt: skip
TARGETS += [("mixtral", ["w1", "w2", "w3"]), ("mixtral", ["q_proj", "gate"])]


@pytest.mark.filterwarnings("ignore:The following")
@pytest.mark.parametrize(("name", "targets"), TARGETS)
def test_what_peft_adapts_is_counted_so(name, targets):
    """Also where PEFT takes names of former linear layers for fused experts."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(built(tiny(name)), LoraConfig(r=4, target_modules=targets))
    facts = facts_of(tiny(name))
    modules = {*adapted.targeted_module_names, *adapted.targeted_parameter_names}
    assert set(facts.adapter_linears(targets)) == {found.removesuffix(".weight") for found in modules}
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert num_trainable_params(facts, LoraAdapter(rank=4, target_modules=targets)) == trained


REFUSED = {
    "a part of a fused matrix": {"target_modules": ["q_proj", "gate_proj"]},
    "the other part": {"target_modules": ["up_proj", "down_proj"]},
    "dropout": {"dropout": 0.1},
    "dropout on a router": {"dropout": 0.1, "target_modules": ["gate"]},
    "dora": {"use_dora": True, "target_modules": ["down_proj"]},
}
TAKEN = {
    "attention with dropout": {"dropout": 0.1, "target_modules": ["q_proj"]},
    "attention with dora": {"use_dora": True, "target_modules": ["q_proj"]},
    "both parts": {"target_modules": ["gate_proj", "up_proj"]},
    "all of it": {},
}


@pytest.mark.parametrize("name", [*REFUSED, *TAKEN])
def test_what_peft_refuses_of_experts_is_refused_before(name):
    from peft import LoraConfig, get_peft_model

    adapter = LoraAdapter(rank=4, **(REFUSED | TAKEN)[name])
    config = LoraConfig(
        r=4, target_modules=adapter.target_modules, lora_dropout=adapter.dropout, use_dora=adapter.use_dora
    )
    model, facts = built(tiny("qwen3_moe")), facts_of(tiny("qwen3_moe"))
    if name in TAKEN:
        assert not list(expert_faults(facts, adapter))
        get_peft_model(model, config)
        return
    assert all(problem and hint for problem, hint in expert_faults(facts, adapter))
    assert list(expert_faults(facts, adapter))
    with pytest.raises(ValueError, match=r"fused|does not work with"):
        get_peft_model(model, config)


def test_a_part_is_named_with_what_is_missing():
    ((problem, _),) = expert_faults(facts_of(tiny("mixtral")), LoraAdapter(target_modules=["w1", "w2"]))
    assert re.search(r"w1 without w3; .* in one matrix, gate_up_proj", problem)
    dense = facts_of(tiny("llama"))
    assert not list(expert_faults(dense, LoraAdapter(target_modules=["gate_proj"], dropout=0.1)))


def test_the_sizes_of_a_mixture_are_those_of_its_config():
    facts = facts_of(tiny("deepseek_v3"))
    assert facts.mixture == Mixture(num_layers=2, num_experts=4, per_token=2, inner=24, shared=48, dense=80)
    assert facts_of(tiny("llama")).mixture is None


def test_the_types_whose_experts_peft_adapts_are_those_it_names():
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    theirs = {name: base for name, base in _MODEL_TO_CONVERSION_PATTERN.items() if base in _MOE_TARGET_MODULE_MAPPING}
    causal = {name: base for name, base in theirs.items() if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert set(model_types().former_linears) == set(causal)
    for name, base in causal.items():
        former = {old: new.removesuffix(".weight") for old, new in _MOE_TARGET_MODULE_MAPPING[base].items()}
        assert model_types().former_linears[name] == former


def test_experts_and_router_are_counted_and_are_no_linear_layers():
    facts = facts_of(tiny("qwen3_moe"))
    assert (facts.num_experts, facts.num_experts_per_token) == (4, 2)
    experts = 3 * (4 * 2 * 16 * 48 + 4 * 48 * 16)
    assert facts.num_params - facts.num_active_params == experts // 2
    assert not any("experts" in name or name.endswith("mlp.gate") for name in facts.linears)
    assert facts.intermediate_size == 2 * 16


def stored_facts(config, tensors):
    """Facts of a folder whose weights are stored under other names than transformers' modules have."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({"architectures": ["SomeForCausalLM"], **config}))
        Path(folder, "tokenizer.json").write_text("{}")
        meta = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}
        save_file(meta, Path(folder, "model.safetensors"))
        return probe_model(ModelSection(path=folder))


def one_by_one(tensors, block, names):
    """Experts and routers as files store them."""
    stored = {name: shape for name, shape in tensors.items() if ".experts." not in name}
    gate, up, down = names
    for name, (num_experts, outputs, inputs) in ((n, s) for n, s in tensors.items() if ".experts." in n):
        layer = name.partition(".mlp.")[0]
        for expert in range(num_experts):
            at = f"{layer}.{block}.experts.{expert}."
            if name.endswith("gate_up_proj"):
                stored |= {f"{at}{part}.weight": (outputs // 2, inputs) for part in (gate, up)}
            else:
                stored[f"{at}{down}.weight"] = (outputs, inputs)
    return stored


@pytest.mark.parametrize(
    ("name", "block", "names"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("deepseek_v3", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_that_files_store_one_by_one_are_fused_as_in_the_modules(name, block, names):
    fused = facts_of(tiny(name))
    apart = stored_facts(tiny(name), one_by_one(fused.tensors, block, names))
    assert len(apart.tensors) == len(fused.tensors)
    assert apart.linears == fused.linears
    assert (apart.num_params, apart.num_active_params) == (fused.num_params, fused.num_active_params)
    assert apart.mixture == fused.mixture is not None
    for adapter in (LoraAdapter(rank=4), LoraAdapter(rank=4, target_modules=["o_proj"])):
        assert num_trainable_params(apart, adapter) == num_trainable_params(fused, adapter)
        assert sorted(trained_tensors(apart, adapter).values()) == sorted(trained_tensors(fused, adapter).values())


def test_what_transformers_leaves_out_of_deepseeks_files_is_no_parameter():
    """A layer that predicts the token after next, and a buffer."""
    fused = facts_of(tiny("deepseek_v3"))
    last = {name.replace(".2.", ".3."): shape for name, shape in fused.tensors.items() if ".layers.2." in name}
    more = {"model.layers.3.eh_proj.weight": (48, 96), "model.layers.1.mlp.gate.e_score_correction_bias": (4,)}
    assert stored_facts(tiny("deepseek_v3"), {**fused.tensors, **last, **more}).tensors == fused.tensors
    model = built(tiny("deepseek_v3"))
    assert any(name.endswith("e_score_correction_bias") for name, _ in model.named_buffers())
    assert any("layers" in pattern for pattern in model._keys_to_ignore_on_load_unexpected)


def test_a_window_that_is_not_used_is_none():
    assert facts_of({**tiny("qwen2"), "sliding_window": 64, "use_sliding_window": False}).sliding_window is None
    assert facts_of({**tiny("mistral"), "sliding_window": 64}).sliding_window == 64


def test_a_tied_head_has_no_tensor():
    assert facts_of(tiny("llama-tied")).has_tied_head
    assert not facts_of(tiny("llama")).has_tied_head


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba2"},
        {**SMALL, "model_type": "nothing-known"},
        {"model_type": "mistral3", "text_config": {**SMALL, "model_type": "mistral"}},
    ],
)
def test_an_unknown_type_is_refused_rather_than_guessed(config):
    with pytest.raises(
        ModelError,
        match=rf"cannot derive the tensors of a '{config['model_type']}' model .*; .* supported without them: ",
    ):
        tensors_of(config)


def test_a_number_that_is_none_is_named():
    with pytest.raises(ModelError, match="hidden_size of a 'llama' model must be a positive integer, got None"):
        tensors_of({"model_type": "llama", "hidden_size": None})
