"""The tensors of a model from its config.json alone: what transformers would build, named and shaped, without building.

Every family here is a decoder of Llama's kind, described by where it differs. Names and shapes are those of the modules
in transformers 5: the experts of a layer are two fused tensors there, though many files store them one by one, and a
head that is tied to the embedding has no tensor of its own. The tests build each family on torch's meta device and
compare every name and shape.

A type that is not here is refused. A guess from Llama-like keys would miss biases, norms or experts without a word.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunekit.errors import ModelError

Config = Mapping[str, Any]
"""What config.json says of the decoder, the defaults of its family filled in."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors, within what they belong to."""


@dataclass(frozen=True)
class Family:
    """A kind of decoder: how its layers differ from Llama's, and what transformers takes for what config.json omits."""

    attention: Callable[[Config], Shapes]
    mlp: Callable[[Config, int], Shapes]
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """The norms of a layer, each as wide as the hidden state."""
    defaults: Config = field(default_factory=dict)
    full_attention_every: int | None = None
    """Of so many layers one sees all tokens and the others a sliding window; None where all layers are alike."""


def tensors_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by name, as transformers' causal language model for this config.json has them.

    A tied head is left out, and so are buffers. Where config.json has a vision tower, it is among them.

    Raises:
        ModelError: The type is not known here, or a number is missing.
    """
    outer = complete(config)
    text = text_config(outer)
    family = FAMILIES[text["model_type"]]
    decoder = "model.language_model." if "text_config" in outer else "model."
    tensors: dict[str, tuple[int, ...]] = {}
    if "vision_config" in outer:
        tensors |= dict(_vision(outer["vision_config"], _number(text, "hidden_size")))
    hidden, vocabulary = _number(text, "hidden_size"), _number(text, "vocab_size")
    tensors[decoder + "embed_tokens.weight"] = (vocabulary, hidden)
    for layer in range(_number(text, "num_hidden_layers")):
        prefix = f"{decoder}layers.{layer}."
        tensors |= {prefix + "self_attn." + name: shape for name, shape in family.attention(text)}
        tensors |= {prefix + "mlp." + name: shape for name, shape in family.mlp(text, layer)}
        tensors |= {f"{prefix}{norm}.weight": (hidden,) for norm in family.norms}
    tensors[decoder + "norm.weight"] = (hidden,)
    if not outer["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (vocabulary, hidden)
    return tensors


def is_known(config: Config) -> bool:
    """Whether the tensors of a model can be told from this config.json."""
    others_known = "text_config" not in config or config.get("model_type") in WITH_VISION
    return others_known and text_config(config).get("model_type") in FAMILIES


def complete(config: Config) -> dict[str, Any]:
    """A config.json with what it omits, which is then as transformers has it by default.

    Raises:
        ModelError: The type is not known here.
    """
    if not is_known(config):
        raise ModelError(
            f"the tensors of a {config.get('model_type')!r} model cannot be told from its config.json alone",
            hint=f"its safetensors files say them; known without are {', '.join([*FAMILIES, *sorted(WITH_VISION)])}",
        )
    decoder = text_config(config)
    text = {**FAMILIES[decoder["model_type"]].defaults, **decoder}
    if "text_config" not in config:
        return text
    vision = {**VISION_DEFAULTS, **(config.get("vision_config") or {})}
    return {"tie_word_embeddings": True, **config, "text_config": text, "vision_config": vision}


def text_config(config: Config) -> Config:
    """What config.json says of the decoder: the whole, unless it describes other parts besides."""
    nested: Config | None = config.get("text_config")
    return config if nested is None else nested


def mlp_width_of(config: Config) -> int:
    """Width of the gated MLP that a token goes through, that of all its experts taken together."""
    if not num_experts_of(config):
        return _number(config, "intermediate_size")
    inner = _first_count(config, "moe_intermediate_size", "intermediate_size")
    return inner * (num_experts_per_token_of(config) + _first_count(config, "n_shared_experts"))


def sliding_window_of(config: Config) -> int | None:
    """Tokens that a layer with a sliding window looks back; None where no layer has one."""
    return None if config.get("use_sliding_window") is False else _first_count(config, "sliding_window") or None


def layer_types_of(config: Config) -> tuple[str, ...]:
    """How each layer attends, by transformers' names: as config.json says, or as its type alternates by default."""
    if config.get("layer_types"):
        return tuple(config["layer_types"])
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None or family.full_attention_every is None:
        return ()
    every = config.get("sliding_window_pattern") or family.full_attention_every
    layers = range(1, _number(config, "num_hidden_layers") + 1)
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


def _number(config: Config, name: str) -> int:
    number = config.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ModelError(f"{name} of a {config.get('model_type')!r} model is {number!r}", hint="mend its config.json")
    return number


def _linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Shapes:
    yield name + ".weight", (outputs, inputs)
    if bias:
        yield name + ".bias", (outputs,)


def head_dim_of(config: Config) -> int:
    """Size of a head of the queries."""
    if config.get("kv_lora_rank"):
        return _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    return config.get("head_dim") or _number(config, "hidden_size") // _number(config, "num_attention_heads")


def _widths(config: Config) -> tuple[int, int]:
    """Width of all queries, and of all keys."""
    heads, size = _number(config, "num_attention_heads"), head_dim_of(config)
    return heads * size, (config.get("num_key_value_heads") or heads) * size


def _attention(config: Config) -> Shapes:
    """Four projections, of which `attention_bias` gives each a bias."""
    bias = bool(config.get("attention_bias"))
    yield from _projections(config, bias=bias, output_bias=bias)


def _projections(config: Config, *, bias: bool, output_bias: bool) -> Shapes:
    hidden, (queries, keys) = _number(config, "hidden_size"), _widths(config)
    yield from _linear("q_proj", queries, hidden, bias=bias)
    yield from _linear("k_proj", keys, hidden, bias=bias)
    yield from _linear("v_proj", keys, hidden, bias=bias)
    yield from _linear("o_proj", hidden, queries, bias=output_bias)


def _plain_attention(config: Config) -> Shapes:
    return _projections(config, bias=False, output_bias=False)


def _qwen2_attention(config: Config) -> Shapes:
    return _projections(config, bias=True, output_bias=False)


def _attention_with_head_norms(config: Config) -> Shapes:
    """Queries and keys are normalised head by head."""
    yield from _attention(config)
    yield "q_norm.weight", (head_dim_of(config),)
    yield "k_norm.weight", (head_dim_of(config),)


def _attention_with_wide_norms(config: Config) -> Shapes:
    """Queries and keys are normalised over all heads at once."""
    yield from _attention(config)
    queries, keys = _widths(config)
    yield "q_norm.weight", (queries,)
    yield "k_norm.weight", (keys,)


def _fused_attention(config: Config) -> Shapes:
    """One projection to queries, keys and values."""
    hidden, (queries, keys) = _number(config, "hidden_size"), _widths(config)
    yield from _linear("qkv_proj", queries + 2 * keys, hidden)
    yield from _linear("o_proj", hidden, queries)


def _attention_with_sinks(config: Config) -> Shapes:
    """Each head has a learned logit of attending to nothing."""
    yield from _attention(config)
    yield "sinks", (_number(config, "num_attention_heads"),)


def _latent_attention(config: Config) -> Shapes:
    """Queries, keys and values are made from compressed ones (multi-head latent attention, arXiv 2405.04434)."""
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    bias, compressed = bool(config.get("attention_bias")), _number(config, "kv_lora_rank")
    values, without_position = _number(config, "v_head_dim"), _number(config, "qk_nope_head_dim")
    queries = heads * head_dim_of(config)
    if config.get("q_lora_rank") is None:
        yield from _linear("q_proj", queries, hidden)
    else:
        rank = _number(config, "q_lora_rank")
        yield from _linear("q_a_proj", rank, hidden, bias=bias)
        yield "q_a_layernorm.weight", (rank,)
        yield from _linear("q_b_proj", queries, rank)
    yield from _linear("kv_a_proj_with_mqa", compressed + _number(config, "qk_rope_head_dim"), hidden, bias=bias)
    yield "kv_a_layernorm.weight", (compressed,)
    yield from _linear("kv_b_proj", heads * (without_position + values), compressed)
    yield from _linear("o_proj", hidden, heads * values, bias=bias)


def _mlp(config: Config, layer: int) -> Shapes:
    """Gate, up and down, of which `mlp_bias` gives each a bias."""
    return _gated(config, _number(config, "intermediate_size"), bias=bool(config.get("mlp_bias")))


def _gated(config: Config, inner: int, *, bias: bool = False) -> Shapes:
    hidden = _number(config, "hidden_size")
    yield from _linear("gate_proj", inner, hidden, bias=bias)
    yield from _linear("up_proj", inner, hidden, bias=bias)
    yield from _linear("down_proj", hidden, inner, bias=bias)


def _plain_mlp(config: Config, layer: int) -> Shapes:
    return _gated(config, _number(config, "intermediate_size"))


def _fused_mlp(config: Config, layer: int) -> Shapes:
    """Gate and up in one projection."""
    hidden, inner = _number(config, "hidden_size"), _number(config, "intermediate_size")
    yield from _linear("gate_up_proj", 2 * inner, hidden)
    yield from _linear("down_proj", hidden, inner)


def _experts(config: Config, inner: int) -> Shapes:
    """A router, and the experts as two tensors for all of them. None of the three is a linear module."""
    experts, hidden = num_experts_of(config), _number(config, "hidden_size")
    yield "gate.weight", (experts, hidden)
    yield "experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield "experts.down_proj", (experts, hidden, inner)


def _mixtral_mlp(config: Config, layer: int) -> Shapes:
    return _experts(config, _number(config, "intermediate_size"))


def _qwen3_moe_mlp(config: Config, layer: int) -> Shapes:
    """Experts in every `decoder_sparse_step`-th layer that is not listed as dense."""
    if layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % _number(config, "decoder_sparse_step"):
        return _gated(config, _number(config, "intermediate_size"))
    return _experts(config, _number(config, "moe_intermediate_size"))


def _gpt_oss_mlp(config: Config, layer: int) -> Shapes:
    """Experts with biases, their matrices stored inputs first."""
    experts, hidden, inner = num_experts_of(config), _number(config, "hidden_size"), _number(config, "intermediate_size")
    yield from _linear("router", experts, hidden, bias=True)
    yield "experts.gate_up_proj", (experts, hidden, 2 * inner)
    yield "experts.gate_up_proj_bias", (experts, 2 * inner)
    yield "experts.down_proj", (experts, inner, hidden)
    yield "experts.down_proj_bias", (experts, hidden)


def _deepseek_mlp(config: Config, layer: int) -> Shapes:
    """The first layers dense, the others with experts and an MLP that every token goes through."""
    if layer < config["first_k_dense_replace"]:
        yield from _gated(config, _number(config, "intermediate_size"))
        return
    inner = _number(config, "moe_intermediate_size")
    yield from _experts(config, inner)
    shared = _gated(config, inner * _number(config, "n_shared_experts"))
    yield from (("shared_experts." + name, shape) for name, shape in shared)


def _vision(config: Config, text_hidden: int) -> Shapes:
    """SigLIP and the projection to the decoder, as Gemma 3 has them (arXiv 2303.15343, 2503.19786)."""
    hidden, inner, patch = _number(config, "hidden_size"), _number(config, "intermediate_size"), config["patch_size"]
    tower = "model.vision_tower."
    yield tower + "embeddings.patch_embedding.weight", (hidden, config["num_channels"], patch, patch)
    yield tower + "embeddings.patch_embedding.bias", (hidden,)
    yield tower + "embeddings.position_embedding.weight", ((config["image_size"] // patch) ** 2, hidden)
    for layer in range(_number(config, "num_hidden_layers")):
        prefix = f"{tower}encoder.layers.{layer}."
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{prefix}self_attn.{projection}", hidden, hidden, bias=True)
        yield from _norm(prefix + "layer_norm1", hidden)
        yield from _norm(prefix + "layer_norm2", hidden)
        yield from _linear(prefix + "mlp.fc1", inner, hidden, bias=True)
        yield from _linear(prefix + "mlp.fc2", hidden, inner, bias=True)
    yield from _norm(tower + "post_layernorm", hidden)
    if config["vision_use_head"]:
        head = tower + "head."
        yield head + "probe", (1, 1, hidden)
        yield head + "attention.in_proj_weight", (3 * hidden, hidden)
        yield head + "attention.in_proj_bias", (3 * hidden,)
        yield from _linear(head + "attention.out_proj", hidden, hidden, bias=True)
        yield from _norm(head + "layernorm", hidden)
        yield from _linear(head + "mlp.fc1", inner, hidden, bias=True)
        yield from _linear(head + "mlp.fc2", hidden, inner, bias=True)
    yield "model.multi_modal_projector.mm_input_projection_weight", (hidden, text_hidden)
    yield "model.multi_modal_projector.mm_soft_emb_norm.weight", (hidden,)


def _norm(name: str, width: int) -> Shapes:
    """A layer norm with its bias."""
    yield name + ".weight", (width,)
    yield name + ".bias", (width,)


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


_AROUND_BOTH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_BEHIND_BOTH = ("post_attention_layernorm", "post_feedforward_layernorm")

FAMILIES: dict[str, Family] = {
    "llama": Family(_attention, _mlp, defaults=_defaults(32000, 4096, 11008, 32, 32, None, 2048)),
    "mistral": Family(
        _plain_attention, _plain_mlp, defaults=_defaults(32000, 4096, 14336, 32, 32, 8, 131072, sliding_window=4096)
    ),
    "qwen2": Family(
        _qwen2_attention,
        _plain_mlp,
        defaults=_defaults(
            151936, 4096, 22016, 32, 32, 32, 32768, sliding_window=4096, use_sliding_window=False
        ),
    ),
    "qwen3": Family(
        _attention_with_head_norms,
        _plain_mlp,
        defaults=_defaults(151936, 4096, 22016, 32, 32, 32, 32768, head_dim=128, sliding_window=4096, use_sliding_window=False),
    ),
    "phi3": Family(_fused_attention, _fused_mlp, defaults=_defaults(32064, 3072, 8192, 32, 32, None, 4096)),
    "gemma": Family(
        _attention,
        _plain_mlp,
        defaults=_defaults(256000, 3072, 24576, 28, 16, 16, 8192, head_dim=256, tie_word_embeddings=True),
    ),
    "gemma2": Family(
        _attention,
        _plain_mlp,
        _AROUND_BOTH,
        _defaults(256000, 2304, 9216, 26, 8, 4, 8192, head_dim=256, sliding_window=4096, tie_word_embeddings=True),
        full_attention_every=2,
    ),
    "gemma3_text": Family(
        _attention_with_head_norms,
        _plain_mlp,
        _AROUND_BOTH,
        _defaults(262208, 2304, 9216, 26, 8, 4, 131072, head_dim=256, sliding_window=4096, tie_word_embeddings=True),
        full_attention_every=6,
    ),
    "olmo2": Family(
        _attention_with_wide_norms,
        _plain_mlp,
        _BEHIND_BOTH,
        _defaults(50304, 4096, 11008, 32, 32, None, 2048),
    ),
    "olmo3": Family(
        _attention_with_wide_norms,
        _plain_mlp,
        _BEHIND_BOTH,
        _defaults(50304, 4096, 11008, 32, 32, None, 2048, sliding_window=4096),
        full_attention_every=4,
    ),
    "smollm3": Family(
        _attention, _mlp, defaults=_defaults(128256, 2048, 11008, 36, 16, 4, 32768, tie_word_embeddings=True)
    ),
    "mixtral": Family(
        _plain_attention,
        _mixtral_mlp,
        defaults=_defaults(32000, 4096, 14336, 32, 32, 8, 131072, num_local_experts=8, num_experts_per_tok=2),
    ),
    "qwen3_moe": Family(
        _attention_with_head_norms,
        _qwen3_moe_mlp,
        defaults=_defaults(
            151936, 2048, 6144, 24, 32, 4, 32768,
            decoder_sparse_step=1, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, sliding_window=4096,
            use_sliding_window=False,
        ),
    ),
    "gpt_oss": Family(
        _attention_with_sinks,
        _gpt_oss_mlp,
        defaults=_defaults(
            201088, 2880, 2880, 36, 64, 8, 131072,
            head_dim=64, attention_bias=True, sliding_window=128, num_local_experts=128, num_experts_per_tok=4,
        ),
        full_attention_every=2,
    ),
    "deepseek_v3": Family(
        _latent_attention,
        _deepseek_mlp,
        defaults=_defaults(
            129280, 7168, 18432, 61, 128, 128, 4096,
            moe_intermediate_size=2048, n_shared_experts=1, n_routed_experts=256, num_experts_per_tok=8,
            kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128,
            first_k_dense_replace=3,
        ),
    ),
}  # fmt: skip
"""Types of decoders by transformers' names. The defaults are those of its configuration classes, 5.23."""

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
"""What transformers takes for what the config.json of a SigLIP tower omits."""
