"""Bytes of activations in a training step on one device: those of the decoder layers, and of the head.

Closed forms for Llama-like decoders. The counts are exact for Hugging Face's modules with SDPA: they equal the bytes
that autograd saves, which the tests measure. Where an architecture differs they are an estimate.

Symbols: h hidden size, i intermediate size, q = heads x head size, kv = key-value heads x head size, e bytes of the
compute type, T tokens of a micro-batch.
"""

from dataclasses import dataclass, replace
from typing import Literal

from tunekit.planner.facts import ModelFacts
from tunekit.planner.states import BYTES, Dtype, num_trainable_params
from tunekit.recipe.schema import FullAdapter, LoraAdapter

HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""Largest tile in which TRL's fused head computes logits: tokens x vocabulary entries."""


def activation_bytes_per_layer(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    dtype: Dtype,
    *,
    mask_length: int | None,
    autocast: bool = True,
) -> int:
    """Bytes that autograd keeps per token for one decoder layer without checkpointing.

    `autocast` says whether trained weights are float32 and each product casts them: so on one device and under DDP.
    FSDP2 and DeepSpeed hand a layer all its weights in the compute type.

    Norms keep their float32 input and, where their weight is trained, the normalised values; each linear layer its
    input; SDPA its q, k, v, output and one log-sum per head; the gated MLP four intermediates. Where it has a mask,
    SDPA keeps k and v repeated for every head, and a mask row of `mask_length`.
    """
    h, i, n = model.hidden_size, model.intermediate_size, model.num_heads
    q, kv = n * model.head_dim, model.num_kv_heads * model.head_dim
    e = BYTES[dtype]
    full = isinstance(adapter, FullAdapter)
    attention = 2 * e * q + 2 * e * kv + 4 * n + _query_norm_bytes(model, full=full, e=e)
    mlp = 4 * e * i
    # A single key-value head is repeated without a copy.
    repeated = 2 * (q - kv) if model.num_kv_heads > 1 else 0
    mask = 0 if mask_length is None else e * (repeated + mask_length)
    # Norms behind attention and MLP, where there are any, keep their input in float32.
    behind = max(0, model.num_stream_norms - 2) * (4 + (8 if full else 4) * h)
    if isinstance(adapter, FullAdapter):
        # Under autocast the residual stream is float32 and each norm keeps a cast copy besides.
        norms = 24 * h if e == 4 else 26 * h if autocast else 16 * h
        if e == 2 and not autocast and model.model_type.startswith("gemma"):
            # Gemma multiplies by a norm's weight in float32; the others cast first.
            norms += 4 * h
        return norms + behind + attention + mlp + mask + 8
    norms = 16 * h if e == 4 else 12 * h
    lora = 7 * e * adapter.rank
    # Float32 adapters under autocast read float32 copies of their inputs.
    casts = 6 * h + 2 * q if e == 2 and autocast else 0
    return norms + behind + attention + mlp + lora + casts + mask + 8


def _query_norm_bytes(model: ModelFacts, *, full: bool, e: int) -> int:
    """Bytes per token that norms of queries and keys keep, where a model has them (Qwen 3, Gemma 3)."""
    if not model.has_query_norms:
        return 0
    heads = model.num_heads + model.num_kv_heads
    # Gemma multiplies by its weight in float32; the others cast first.
    normed = 0 if not full else 4 if model.model_type.startswith("gemma") else e
    return heads * (model.head_dim * (4 + normed) + 4)


def cast_weights_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype) -> int:
    """Bytes of the copies in the compute type that autocast keeps of float32 weights for the backward pass."""
    if dtype == "float32":
        return 0
    if isinstance(adapter, FullAdapter):
        return 2 * model.num_linear_params
    return 2 * num_trainable_params(model, adapter)


@dataclass(frozen=True)
class Layers:
    """Bytes of the decoder layers in a step."""

    stream: int
    """The residual stream, and so its gradient."""
    kept: int
    """Of all layers, kept for the backward pass."""
    forward_only: int
    """Besides, until the forward pass ends."""
    first: int
    """Of the first layer, while its backward pass runs, recomputed where it has to be."""
    recomputed: int
    """Of one layer, recomputed in the backward pass."""
    passing: int
    """Of one layer's forward pass, beyond what it keeps, where that is much."""
    working: int
    """Of one layer's backward pass, beyond what was kept for it."""
    shared: int
    """Masks, which all layers read."""


def layers_of(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    dtype: Dtype,
    num_tokens: int,
    mask_length: int | None,
    sliding_mask_length: int | None,
    *,
    gradient_checkpointing: bool,
    accumulates: bool,
    autocast: bool = True,
) -> Layers:
    """What the decoder layers hold in a step; the arguments are those of `memory.estimate`."""
    h, i, e = model.hidden_size, model.intermediate_size, BYTES[dtype]
    full = isinstance(adapter, FullAdapter)
    casted = autocast and e == 2
    stream = (4 if full and casted else e) * h * num_tokens
    casts = cast_weights_bytes(model, adapter, dtype) if casted else 0

    def kept(length: int | None) -> int:
        saved = activation_bytes_per_layer(model, adapter, dtype, mask_length=length, autocast=autocast) * num_tokens
        return saved + casts // model.num_layers

    sliding = model.num_sliding_layers
    # Of the first and the last layer, the one that keeps more is what decides.
    one = max(kept(mask_length), kept(sliding_mask_length) if sliding else 0)
    others = sliding * kept(sliding_mask_length) + (model.num_layers - sliding) * kept(mask_length) - one
    working = stream + _working_bytes(model, adapter, e, casted=casted, recomputes=gradient_checkpointing) * num_tokens
    if full:
        # The gradient of the MLP's last weight is there; its cast copy is not any more.
        working += (0 if accumulates else (4 if casted else e) * h * i) - (2 * h * i if casted else 0)
    # The masks themselves, one for each kind of layer: a byte for each pair of tokens.
    kinds = (mask_length if sliding < model.num_layers else None, sliding_mask_length if sliding else None)
    shared = num_tokens * sum(length or 0 for length in kinds)
    if gradient_checkpointing:
        # The copy that a layer was recomputed from is kept already. Autocast remembers its casts until the pass ends.
        again = one - (stream if e == 4 or (full and casted) else 0)
        return Layers(stream, model.num_layers * stream, casts, stream + again, again, 0, working, shared)
    # Nothing before the first adapter needs a gradient, so its norm keeps nothing.
    first = one if full else one - 4 * h * num_tokens
    passing = 0 if full or not casted else _adapter_copy_bytes(model, e) * num_tokens
    return Layers(stream, first + others, 0, first, 0, passing, working, shared)


def with_gathered_keys(model: ModelFacts, layers: Layers, dtype: Dtype, num_tokens: int) -> Layers:
    """The same in context parallel, where a layer gathers keys and values of the whole sequence, and their gradients.

    So does torch's `context_parallel` by its default, all-gather.
    """
    gathered = 4 * BYTES[dtype] * model.num_kv_heads * model.head_dim * num_tokens
    return replace(layers, working=layers.working + gathered)


def _working_bytes(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, e: int, *, casted: bool, recomputes: bool
) -> int:
    """Bytes per token that a layer's backward pass needs beyond what was kept for it: the most of its moments."""
    h, i = model.hidden_size, model.intermediate_size
    full = isinstance(adapter, FullAdapter)
    sandwich = model.num_stream_norms > 2
    # Where the MLP's product is taken apart: gradients of both factors and of the product, whose own copy is gone.
    # So is what the norm behind it kept.
    moments = [2 * e * i - (0 if not sandwich else 8 * h if full else 4 * h)]
    if sandwich:
        # That norm itself, in float32: its gradient, product, quotient and power.
        moments.append(4 * 4 * h if full else 5 * 4 * h)
    if recomputes and not full and casted:
        moments.append(_adapter_copy_bytes(model, e))
    return max(moments)


def _adapter_copy_bytes(model: ModelFacts, e: int) -> int:
    """Bytes per token at the end of a layer's forward pass under autocast, beyond what it keeps.

    The MLP's product, a float32 copy of it for the last adapter, and what the layer's code still has names for.
    """
    if e == 4:
        return 0
    return (e + 4) * model.intermediate_size + (5 if model.num_stream_norms > 2 else 4) * e * model.hidden_size


@dataclass(frozen=True)
class Head:
    """Bytes of the final norm and of TRL's fused head in a step."""

    kept: int
    """What the norm and the head keep."""
    forward: int
    """Besides, in the forward pass."""
    backward: int
    """Besides, in the backward pass, without the weight's gradient."""


def head_of(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    device: Literal["cpu", "cuda", "mps"],
    dtype: Dtype,
    num_tokens: int,
    *,
    autocast: bool = True,
    scored_share: float = 1.0,
) -> Head:
    """TRL's head, which never makes all logits: it goes through them in tiles (trl/kernels/chunked_logprob.py).

    On CUDA the tile's buffer has all its columns also where the vocabulary is smaller; on a CPU what is not touched is
    not resident, but the statistics are torch operations on float32 copies of the tile. Only there the head also goes
    through tokens that do not count: on CUDA those that do are a copy, `scored_share` of all.
    """
    h, e = model.hidden_size, BYTES[dtype]
    scored = int(scored_share * num_tokens) if device == "cuda" else num_tokens
    rows, columns = min(scored, HEAD_TOKENS), min(model.vocab_size, HEAD_COLUMNS)
    tile = rows * (e * HEAD_COLUMNS if device == "cuda" else (e + 12) * columns)
    if not isinstance(adapter, FullAdapter):
        # A float32 input of the norm; what the head reads, in the compute type; the gradient in float32 and cast.
        kept = 4 * h * num_tokens + e * h * scored
        return Head(kept, tile + e * h * num_tokens, tile + (4 + (e if e == 2 else 0)) * h * scored)
    stream, read = 4 * h * num_tokens, 4 * h * scored
    if e == 4:
        return Head(2 * stream + read, tile + stream, tile + read)
    if not autocast:
        # The float32 input, the normalised values and what the head reads; then the gradient in float32 and cast.
        return Head(stream + stream // 2 + read // 2, tile + stream // 2, tile + read + read // 2)
    # The backward pass casts a tile of the weight, and of what the head reads, while it still holds the last ones.
    more_rows = scored > HEAD_TOKENS
    held = min(model.vocab_size - columns, HEAD_COLUMNS) if model.vocab_size > columns else columns * more_rows
    casts = e * h * (rows * (1 + more_rows) + columns)
    return Head(2 * stream + read, tile + casts + stream, tile + casts + e * h * held + read)
