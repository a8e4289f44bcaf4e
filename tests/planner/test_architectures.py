"""Tensors from a config.json alone are those that transformers builds on the meta device, name by name."""

import re

import pytest
import torch

from tunekit.errors import ModelError
from tunekit.planner.architectures import FAMILIES, VISION_DEFAULTS, tensors_of

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


def tiny(name):
    return {**SMALL, "model_type": name.partition("-")[0], **TINY[name]}


@pytest.mark.parametrize("name", TINY)
def test_every_name_and_shape_is_that_of_the_module(name):
    assert tensors_of(tiny(name)) == shapes(built(tiny(name)))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_config_json_omits_is_what_transformers_takes(name):
    assert tensors_of({"model_type": name}) == shapes(built({"model_type": name}))


@pytest.mark.parametrize("with_head", [True, False])
def test_a_vision_tower_is_counted_with_its_decoder(with_head):
    text = {**SMALL, "model_type": "gemma3_text", "head_dim": 16}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {**VISION, "vision_use_head": with_head}}
    assert tensors_of(config) == shapes(built(config))
