"""The tensors of a model from its config.json alone: what transformers would build, named and shaped, without building.

Every family here is a decoder of Llama's kind, described by where it differs. Names and shapes are those of the modules
in transformers 5: the experts of a layer are two fused tensors there, though many files store them one by one, and a
head that is tied to the embedding has no tensor of its own. The tests build each family on torch's meta device and
compare every name and shape.

A type that is not here is refused. A guess from Llama-like keys would miss biases, norms or experts without a word.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tunekit.estimates.models.model_config import Config, complete, head_dim_of, num_experts_of, number, text_config

Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors, within what they belong to."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Names in a configuration's `layer_types` of layers that see other tokens through masked attention alone."""


@dataclass(frozen=True)
class Family:
    """A kind of decoder: the parts of its layers."""

    attention: Callable[[Config], Shapes]
    mlp: Callable[[Config, int], Shapes]
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """The norms of a layer, each as wide as the hidden state."""


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
        tensors |= dict(_vision(outer["vision_config"], number(text, "hidden_size")))
    hidden, vocabulary = number(text, "hidden_size"), number(text, "vocab_size")
    tensors[decoder + "embed_tokens.weight"] = (vocabulary, hidden)
    for layer in range(number(text, "num_hidden_layers")):
        prefix = f"{decoder}layers.{layer}."
        tensors |= {prefix + "self_attn." + name: shape for name, shape in family.attention(text)}
        tensors |= {prefix + "mlp." + name: shape for name, shape in family.mlp(text, layer)}
        tensors |= {f"{prefix}{norm}.weight": (hidden,) for norm in family.norms}
    tensors[decoder + "norm.weight"] = (hidden,)
    if not outer["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (vocabulary, hidden)
    return tensors


def _linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Shapes:
    yield name + ".weight", (outputs, inputs)
    if bias:
        yield name + ".bias", (outputs,)


def _widths(config: Config) -> tuple[int, int, int]:
    """Width of the hidden state, of all queries, and of all keys."""
    heads, size = number(config, "num_attention_heads"), head_dim_of(config)
    return number(config, "hidden_size"), heads * size, (config.get("num_key_value_heads") or heads) * size


def _attention(config: Config) -> Shapes:
    """Four projections, of which `attention_bias` gives each a bias."""
    bias = bool(config.get("attention_bias"))
    yield from _projections(config, bias=bias, output_bias=bias)


def _projections(config: Config, *, bias: bool, output_bias: bool) -> Shapes:
    hidden, queries, keys = _widths(config)
    yield from _linear("q_proj", queries, hidden, bias=bias)
    yield from _linear("k_proj", keys, hidden, bias=bias)
    yield from _linear("v_proj", keys, hidden, bias=bias)
    yield from _linear("o_proj", hidden, queries, bias=output_bias)


_plain_attention = partial(_projections, bias=False, output_bias=False)


def _attention_with_head_norms(config: Config) -> Shapes:
    """Queries and keys are normalized head by head."""
    yield from _attention(config)
    yield "q_norm.weight", (head_dim_of(config),)
    yield "k_norm.weight", (head_dim_of(config),)


def _attention_with_wide_norms(config: Config) -> Shapes:
    """Queries and keys are normalized over all heads at once."""
    yield from _attention(config)
    _, queries, keys = _widths(config)
    yield "q_norm.weight", (queries,)
    yield "k_norm.weight", (keys,)


def _fused_attention(config: Config) -> Shapes:
    """One projection to queries, keys and values."""
    hidden, queries, keys = _widths(config)
    yield from _linear("qkv_proj", queries + 2 * keys, hidden)
    yield from _linear("o_proj", hidden, queries)


def _attention_with_sinks(config: Config) -> Shapes:
    """Each head has a learned logit of attending to nothing."""
    yield from _attention(config)
    yield "sinks", (number(config, "num_attention_heads"),)


def _latent_attention(config: Config) -> Shapes:
    """Queries, keys and values are made from compressed ones (multi-head latent attention, arXiv 2405.04434)."""
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    bias, compressed = bool(config.get("attention_bias")), number(config, "kv_lora_rank")
    values, without_position = number(config, "v_head_dim"), number(config, "qk_nope_head_dim")
    queries = heads * head_dim_of(config)
    if config.get("q_lora_rank") is None:
        yield from _linear("q_proj", queries, hidden)
    else:
        rank = number(config, "q_lora_rank")
        yield from _linear("q_a_proj", rank, hidden, bias=bias)
        yield "q_a_layernorm.weight", (rank,)
        yield from _linear("q_b_proj", queries, rank)
    yield from _linear("kv_a_proj_with_mqa", compressed + number(config, "qk_rope_head_dim"), hidden, bias=bias)
    yield "kv_a_layernorm.weight", (compressed,)
    yield from _linear("kv_b_proj", heads * (without_position + values), compressed)
    yield from _linear("o_proj", hidden, heads * values, bias=bias)


def _mlp(config: Config, layer: int) -> Shapes:
    """Gate, up and down, of which `mlp_bias` gives each a bias."""
    return _gated(config, number(config, "intermediate_size"), bias=bool(config.get("mlp_bias")))


def _gated(config: Config, inner: int, *, bias: bool = False) -> Shapes:
    hidden = number(config, "hidden_size")
    yield from _linear("gate_proj", inner, hidden, bias=bias)
    yield from _linear("up_proj", inner, hidden, bias=bias)
    yield from _linear("down_proj", hidden, inner, bias=bias)


def _plain_mlp(config: Config, layer: int) -> Shapes:
    return _gated(config, number(config, "intermediate_size"))


def _fused_mlp(config: Config, layer: int) -> Shapes:
    """Gate and up in one projection."""
    hidden, inner = number(config, "hidden_size"), number(config, "intermediate_size")
    yield from _linear("gate_up_proj", 2 * inner, hidden)
    yield from _linear("down_proj", hidden, inner)


def _experts(config: Config, inner: int) -> Shapes:
    """A router, and the experts as two tensors for all of them. None of the three is a linear module."""
    experts, hidden = num_experts_of(config), number(config, "hidden_size")
    yield "gate.weight", (experts, hidden)
    yield "experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield "experts.down_proj", (experts, hidden, inner)


def _mixtral_mlp(config: Config, layer: int) -> Shapes:
    return _experts(config, number(config, "intermediate_size"))


def _qwen3_moe_mlp(config: Config, layer: int) -> Shapes:
    """Experts in every `decoder_sparse_step`-th layer that is not listed as dense."""
    if layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % number(config, "decoder_sparse_step"):
        return _gated(config, number(config, "intermediate_size"))
    return _experts(config, number(config, "moe_intermediate_size"))


def _gpt_oss_mlp(config: Config, layer: int) -> Shapes:
    """Experts with biases, their matrices stored inputs first."""
    experts, hidden, inner = num_experts_of(config), number(config, "hidden_size"), number(config, "intermediate_size")
    yield from _linear("router", experts, hidden, bias=True)
    yield "experts.gate_up_proj", (experts, hidden, 2 * inner)
    yield "experts.gate_up_proj_bias", (experts, 2 * inner)
    yield "experts.down_proj", (experts, inner, hidden)
    yield "experts.down_proj_bias", (experts, hidden)


def _deepseek_mlp(config: Config, layer: int) -> Shapes:
    """The first layers dense, the others with experts and an MLP that every token goes through."""
    if layer < config["first_k_dense_replace"]:
        yield from _gated(config, number(config, "intermediate_size"))
        return
    inner = number(config, "moe_intermediate_size")
    yield from _experts(config, inner)
    shared = _gated(config, inner * number(config, "n_shared_experts"))
    yield from (("shared_experts." + name, shape) for name, shape in shared)


def _vision(config: Config, text_hidden: int) -> Shapes:
    """SigLIP and the projection to the decoder, as Gemma 3 has them (arXiv 2303.15343, 2503.19786)."""
    hidden, inner, patch = number(config, "hidden_size"), number(config, "intermediate_size"), config["patch_size"]
    tower = "model.vision_tower."
    yield tower + "embeddings.patch_embedding.weight", (hidden, config["num_channels"], patch, patch)
    yield tower + "embeddings.patch_embedding.bias", (hidden,)
    yield tower + "embeddings.position_embedding.weight", ((config["image_size"] // patch) ** 2, hidden)
    for layer in range(number(config, "num_hidden_layers")):
        prefix = f"{tower}encoder.layers.{layer}."
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{prefix}self_attn.{projection}", hidden, hidden, bias=True)
        yield from _norm(prefix + "layer_norm1", hidden)
        yield from _norm(prefix + "layer_norm2", hidden)
        yield from _vision_mlp(prefix, hidden, inner)
    yield from _norm(tower + "post_layernorm", hidden)
    if config["vision_use_head"]:
        head = tower + "head."
        yield head + "probe", (1, 1, hidden)
        yield head + "attention.in_proj_weight", (3 * hidden, hidden)
        yield head + "attention.in_proj_bias", (3 * hidden,)
        yield from _linear(head + "attention.out_proj", hidden, hidden, bias=True)
        yield from _norm(head + "layernorm", hidden)
        yield from _vision_mlp(head, hidden, inner)
    yield "model.multi_modal_projector.mm_input_projection_weight", (hidden, text_hidden)
    yield "model.multi_modal_projector.mm_soft_emb_norm.weight", (hidden,)


def _vision_mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    yield from _linear(prefix + "mlp.fc1", inner, hidden, bias=True)
    yield from _linear(prefix + "mlp.fc2", hidden, inner, bias=True)


def _norm(name: str, width: int) -> Shapes:
    """A layer norm with its bias."""
    yield name + ".weight", (width,)
    yield name + ".bias", (width,)


_BEHIND_BOTH = ("post_attention_layernorm", "post_feedforward_layernorm")
_AROUND_BOTH = ("input_layernorm", "pre_feedforward_layernorm", *_BEHIND_BOTH)

FAMILIES: dict[str, Family] = {
    "llama": Family(_attention, _mlp),
    "smollm3": Family(_attention, _mlp),
    "mistral": Family(_plain_attention, _plain_mlp),
    "qwen2": Family(partial(_projections, bias=True, output_bias=False), _plain_mlp),
    "qwen3": Family(_attention_with_head_norms, _plain_mlp),
    "phi3": Family(_fused_attention, _fused_mlp),
    "gemma": Family(_attention, _plain_mlp),
    "gemma2": Family(_attention, _plain_mlp, _AROUND_BOTH),
    "gemma3_text": Family(_attention_with_head_norms, _plain_mlp, _AROUND_BOTH),
    "olmo2": Family(_attention_with_wide_norms, _plain_mlp, _BEHIND_BOTH),
    "olmo3": Family(_attention_with_wide_norms, _plain_mlp, _BEHIND_BOTH),
    "mixtral": Family(_plain_attention, _mixtral_mlp),
    "qwen3_moe": Family(_attention_with_head_norms, _qwen3_moe_mlp),
    "gpt_oss": Family(_attention_with_sinks, _gpt_oss_mlp),
    "deepseek_v3": Family(_latent_attention, _deepseek_mlp),
}
"""Types of decoders by transformers' names."""
