"""Architecture of a model from its config.json, and well-known models by name.

Architecture of a model from its config.json, with the defaults that transformers uses for omitted keys.

Published configurations leave out what equals the defaults of their configuration class: Gemma 3's do not say how many
heads there are. The defaults are written down here for the types whose tensors `tunekit.estimates.models.architectures`
knows; the tests compare them with transformers.

Well-known models by their hub names, so that a plan for them needs no network: `models.yaml`, beside this file.

It holds what their config.json says of shapes. The tensors are made from that, and their number is compared with the
published one of each entry by a test.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tunekit.errors import ModelError

Config = Mapping[str, Any]
"""A config.json, or the part of one that describes the decoder."""


def _defaults(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int | None,
    max_position_embeddings: int,
    **others: Any,
) -> Config:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        **others,
    }


_WINDOW = {"sliding_window": 4096}
_WINDOW_UNUSED = {"sliding_window": 4096, "use_sliding_window": False}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}

DEFAULTS: dict[str, Config] = {
    "llama": _defaults(32000, 4096, 11008, 32, 32, None, 2048),
    "smollm3": _defaults(128256, 2048, 11008, 36, 16, 4, 32768, use_sliding_window=False, tie_word_embeddings=True),
    "mistral": _defaults(32000, 4096, 14336, 32, 32, 8, 131072, **_WINDOW),
    "qwen2": _defaults(151936, 4096, 22016, 32, 32, 32, 32768, **_WINDOW_UNUSED),
    "qwen3": _defaults(151936, 4096, 22016, 32, 32, 32, 32768, head_dim=128, **_WINDOW_UNUSED),
    "phi3": _defaults(32064, 3072, 8192, 32, 32, None, 4096),
    "gemma": _defaults(256000, 3072, 24576, 28, 16, 16, 8192, **_GEMMA),
    "gemma2": _defaults(256000, 2304, 9216, 26, 8, 4, 8192, **_GEMMA, **_WINDOW),
    "gemma3_text": _defaults(262208, 2304, 9216, 26, 8, 4, 131072, **_GEMMA, **_WINDOW),
    "olmo2": _defaults(50304, 4096, 11008, 32, 32, None, 2048),
    "olmo3": _defaults(50304, 4096, 11008, 32, 32, None, 2048, **_WINDOW),
    "mixtral": _defaults(32000, 4096, 14336, 32, 32, 8, 131072, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": {
        **_defaults(151936, 2048, 6144, 24, 32, 4, 32768, **_WINDOW_UNUSED),
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "gpt_oss": {
        **_defaults(201088, 2880, 2880, 36, 64, 8, 131072, head_dim=64, attention_bias=True, sliding_window=128),
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "deepseek_v3": {
        **_defaults(129280, 7168, 18432, 61, 128, 128, 4096),
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
    },
}
"""Defaults of transformers' configuration classes, 5.23, by the type of the decoder."""

FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4}
"""Of so many layers one sees all tokens and the others a sliding window; in other types all layers are alike."""

ROUTER_AUX_LOSS_COEF: Mapping[str, float] = {
    **dict.fromkeys(
        (
            "deepseek_v4",
            "doge",
            "ernie4_5_moe",
            "gpt_oss",
            "granitemoe",
            "granitemoe_swa",
            "granitemoehybrid",
            "granitemoeshared",
            "jamba",
            "laguna",
            "lara_mini",
            "llama4_text",
            "mellum",
            "minimax",
            "minimax_m2",
            "minimax_m3_vl_text",
            "mixtral",
            "phimoe",
            "qwen2_moe",
            "qwen3_5_moe_text",
            "qwen3_moe",
            "qwen3_next",
            "qwen4_exp_text",
        ),
        0.001,
    ),
    "flex_olmo": 0.01,
    "flint": 0.0005,
    "olmoe": 0.01,
}
"""Default coefficient of the routers' auxiliary loss by the type of the decoder, of those that return its logits. Other
types have none, and TRL adds none."""

WITH_VISION = frozenset({"gemma3"})
"""Types with a vision tower besides the decoder that transformers loads as causal language models, tower and all."""

VISION_DEFAULTS: Config = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}
"""Defaults of transformers for keys that the config.json of a SigLIP tower omits."""


def is_known(config: Config) -> bool:
    """Return whether the tensors of a model can be derived from this config.json."""
    others_known = "text_config" not in config or config.get("model_type") in WITH_VISION
    return others_known and text_config(config).get("model_type") in DEFAULTS


def complete(config: Config) -> dict[str, Any]:
    """A config.json with what it omits, which is then as transformers has it by default.

    Raises:
        ModelError: The type is not known here.
    """
    if not is_known(config):
        raise ModelError(
            f"the tensors of a {config.get('model_type')!r} model cannot be told from its config.json alone",
            hint=f"its safetensors files say them; known without are {', '.join([*DEFAULTS, *sorted(WITH_VISION)])}",
        )
    decoder = text_config(config)
    text = {**DEFAULTS[decoder["model_type"]], **decoder}
    if "text_config" not in config:
        return text
    vision = {**VISION_DEFAULTS, **(config.get("vision_config") or {})}
    return {"tie_word_embeddings": True, **config, "text_config": text, "vision_config": vision}


def text_config(config: Config) -> Config:
    """Return the decoder's part of config.json: the whole, unless it describes other parts besides."""
    nested: Config | None = config.get("text_config")
    return config if nested is None else nested


def mlp_width_of(config: Config) -> int:
    """Width of the gated MLP that a token goes through, that of all its experts taken together."""
    if not num_experts_of(config):
        return number(config, "intermediate_size")
    inner = _first_count(config, "moe_intermediate_size", "intermediate_size")
    return inner * (num_experts_per_token_of(config) + _first_count(config, "n_shared_experts"))


def sliding_window_of(config: Config) -> int | None:
    """Tokens that a layer with a sliding window looks back; None where no layer has one."""
    return None if config.get("use_sliding_window") is False else _first_count(config, "sliding_window") or None


def layer_types_of(config: Config) -> tuple[str, ...]:
    """Return the attention of each layer by transformers' names: as config.json says, or as its type alternates by
    default.
    """
    if config.get("layer_types"):
        return tuple(config["layer_types"])
    full_every = FULL_ATTENTION_EVERY.get(config.get("model_type", ""))
    if full_every is None:
        return ()
    every = config.get("sliding_window_pattern") or full_every
    layers = range(1, number(config, "num_hidden_layers") + 1)
    return tuple("sliding_attention" if layer % every else "full_attention" for layer in layers)


def num_experts_of(config: Config) -> int:
    """Number of routed experts in a layer that has them; 0 in a dense model."""
    return _first_count(config, "num_local_experts", "num_experts", "n_routed_experts")


def num_experts_per_token_of(config: Config) -> int:
    """Number of routed experts that a token goes through."""
    return _first_count(config, "num_experts_per_tok")


def _first_count(config: Config, *names: str) -> int:
    """The first of some numbers that is there; 0 where none is, or none is a single number."""
    return next((config[name] for name in names if isinstance(config.get(name), int) and config[name] > 0), 0)


def router_aux_loss_coef_of(config: Config) -> float | None:
    """Coefficient of the routers' auxiliary loss by config.json; None where the model's code has none."""
    default = ROUTER_AUX_LOSS_COEF.get(config.get("model_type", ""))
    coefficient = config.get("router_aux_loss_coef")
    return default if coefficient is None or default is None else float(coefficient)


def head_dim_of(config: Config) -> int:
    """Size of a head of the queries."""
    if config.get("kv_lora_rank"):
        return number(config, "qk_nope_head_dim") + number(config, "qk_rope_head_dim")
    return config.get("head_dim") or number(config, "hidden_size") // number(config, "num_attention_heads")


def number(config: Config, name: str) -> int:
    """A positive number of config.json.

    Raises:
        ModelError: It is none.
    """
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name} of a {config.get('model_type')!r} model is {value!r}", hint="mend its config.json")
    return value


TABLE = Path(__file__).parent / "models.yaml"
"""The table as it ships with the package."""


@dataclass(frozen=True)
class KnownModel:
    """Row of the table for one hub name."""

    config: Mapping[str, Any]
    """Its config.json as far as shapes go."""
    num_params: int
    """The published number of parameters."""
    source: str
    """Publication of that number."""
    has_chat_template: bool


@cache
def known_models() -> dict[str, KnownModel]:
    """The table by hub name."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {
        name: KnownModel(entry["config"], entry["num_params"], table["sources"][entry["source"]], kind == "chat")
        for entry in table["models"]
        for kind in ("base", "chat")
        for name in entry.get(kind, ())
    }
