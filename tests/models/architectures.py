"""Tiny models of random weights, one for each architecture that is fused, with what it has of its own in them."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

WINDOW = 5
"""Tokens that a layer with a sliding window sees."""

BOTH_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.01}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, **BOTH_WINDOWS},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "_attn_implementation": "eager",
        **BOTH_WINDOWS,
    },
    "gemma3_text": {"query_pre_attn_scalar": 8, **BOTH_WINDOWS},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": WINDOW},
    "olmo2": {},
    "olmo3": BOTH_WINDOWS,
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "mixtral": {"num_local_experts": 3, **EXPERTS},
    "qwen3_moe": {"num_experts": 3, "decoder_sparse_step": 1, **EXPERTS},
}
"""What the configuration of each has besides the sizes. Qwen 2.5 is Qwen 2, and Phi 4 is Phi 3."""

HAVE_EXPERTS = ("mixtral", "qwen3_moe")


def make_model(architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A model for training whose weights are all random, norms and biases too.

    With the same seed the same weights, rounded to the type.
    """
    fields = SIZES | ARCHITECTURES[architecture]
    implementation = fields.pop("_attn_implementation", "sdpa")
    config = AutoConfig.for_model(architecture, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        centre = parameter.detach() if parameter.ndim == 1 else 0.0
        parameter.data = centre + scale * torch.randn(parameter.shape, generator=generator)
        assert name
    return model.to(dtype).train()


def padded_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two rows, of which the second is padded on the right; neither padding nor the first tokens are learnt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, SIZES["vocab_size"], (2, 13), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


def packed_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """One row of three sequences, told apart by their positions alone."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, SIZES["vocab_size"], (1, 18), generator=generator)
    positions = torch.cat([torch.arange(length) for length in (7, 1, 10)])[None]
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}
