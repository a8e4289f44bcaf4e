"""Bytes of activations in a training step on one device: those of the decoder layers, and of the head.

Closed forms for Llama-like decoders. The counts are exact for Hugging Face's modules with SDPA: they equal the bytes
that autograd saves, which the tests measure. Where an architecture differs they are an estimate. tunekit's kernels keep
less: a norm its input as it is, adapters one input for all of them, a gated MLP no activation (`Products.fused`).

Routed experts are counted as transformers 5 runs them on CUDA. The rows of all pairs of a token and an expert are
gathered in the order of the experts, and go through the experts' fused matrices in one product each (`grouped_mm`, the
default of `transformers.integrations.moe`). Autocast does not know that product (pytorch/pytorch#174763): it computes
in the type of the weights, so in float32 where experts are trained whole. PEFT adds an adapter's product to the whole
fused matrix before it is used (`ParamWrapper`): a matrix as large as the experts, which is kept for the backward pass,
and whose gradient is made there.

Symbols: h hidden size, i intermediate size, q = heads x head size, kv = key-value heads x head size, e bytes of the
compute type, T tokens of a micro-batch.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import assert_never

from tunekit.estimates.facts import DeviceKind, ModelFacts
from tunekit.estimates.memory.experts import ROUTERS, Mixture, last_part, trained_experts
from tunekit.estimates.memory.states import (
    BYTES,
    Dora,
    Dtype,
    Tables,
    dora_of,
    kept_beside,
    kept_matrices,
    num_trainable_params,
    reads_inputs,
    trained_tables,
    trained_whole,
)
from tunekit.estimates.models.model_config import model_types
from tunekit.kernels.chunks import chunk_rows, row_columns
from tunekit.recipe.methods.spec import HeadKind
from tunekit.recipe.sections.adapters import Adapter, FullAdapter, LoraAdapter, QloraAdapter, num_virtual_tokens
from tunekit.recipe.sections.section import QatSection

HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""Largest tile in which TRL's fused head computes logits: tokens x vocabulary entries."""


@dataclass(frozen=True)
class Scores:
    """Bytes that eager attention has for each score of a head: for each pair of tokens, seen or not.

    Attributes:
        kept: For the backward pass.
        forward: At the most while the layer's forward pass computes them.
        backward: At the most in its backward pass, beyond what is kept.
    """

    kept: int
    forward: int
    backward: int


SQUEEZES_SCORES = frozenset({"gemma2", "vaultgemma"})
"""Types whose scores go through a tanh, which keeps them once more."""


def scores_of(model_type: str, compute_bytes: int, *, wide: bool) -> Scores:
    """Return what transformers' `eager_attention_forward` has of a score, by the type's code (transformers 5.23).

    A softmax in float32 of a copy in float32, and its result in the compute type, which the product with the values
    keeps; in the backward pass that softmax, its gradient and what it makes of it. GPT-OSS has all in the compute type,
    and three copies of it while it puts its sinks beside the scores; in float32 where the residual stream, and so the
    mask that is added to them, is `wide`.
    """
    e = compute_bytes
    if model_type == "gpt_oss":
        s = 4 if wide else e
        return Scores(kept=s + (e if s > e else 0), forward=3 * s, backward=2 * e)
    squeezed = e if model_type in SQUEEZES_SCORES else 0
    if e == 4:
        return Scores(kept=4 + squeezed, forward=8 + squeezed, backward=8)
    return Scores(kept=4 + e + squeezed, forward=8 + e + squeezed, backward=6)


_FROM_ATTENTION, _FROM_MLP = "o_proj", "down_proj"
TO_MLP = frozenset({"gate_proj", "up_proj", "gate_up_proj"})
"""Last names of the products that read what an MLP reads."""

_MLP = TO_MLP | {_FROM_MLP}
_WIDE_IN = {"ia3": _MLP, "vera": _MLP, "oft": {_FROM_MLP}}
"""Last names of the products whose outputs, or with OFT inputs, are in float32 for a time, by `adapter.type`."""

_WIDE_BYTES = {"ia3": 6, "vera": 6, "oft": 2}
_WIDE_BYTES_AGAIN = {"ia3": 6, "vera": 6, "oft": 7}
"""Bytes of such a value in the backward pass, and where a layer is computed again in it: the most that traces show."""

_WIDE_PASSING = 6
"""The same in the forward pass."""


@dataclass(frozen=True)
class Products:
    """The products of a training step on a device: which are trained, and in which types.

    Attributes:
        model: The model, as a device has it.
        full: Whether all weights are trained.
        attention_rank: Of all adapters of a layer's attention together; 0 where the model is trained whole.
        mlp_rank: Of all adapters of a layer's MLP together.
        device: Where they are computed.
        e: Bytes of the compute type.
        casted: Whether autocast makes copies of float32 weights, and of what they are multiplied with.
        casts_inputs: Whether adapters read float32 copies; PEFT leaves that to autocast on CUDA for a 4-bit base.
        mask: Bytes of a mask of dropout for each value that an adapter reads; 0 without dropout.
        tables: Trained tables of the vocabulary. With the embedding the first layer has gradients to give to it.
        wide_norms: Whether trained norms keep their normalized values in float32.
        adapted: Names of the linear layers that have an adapter or are trained, without the numbers of layers.
        attention: Last names of those of attention.
        mlp: Last names of those of the MLP.
        cast_bytes: Bytes of the copies of weights that autocast keeps for the backward pass.
        dora: What DoRA adds; None without it.
        beside: Bytes per token that a layer's adapters keep besides their inputs and products of their ranks.
        matrices: Bytes of what a layer's adapters make of their weights, and keep.
        widens: Kind of an adapter that has values of an MLP in float32 for a time, where it adapts one; else None.
        quantised: Whether weights are kept in 4 bits, and made dense for each product.
        trained_bytes: Bytes of a trained weight, and of its gradient.
        fused: Whether tunekit's kernels compute the layers.
        rounded: Bytes that a layer keeps of its rounded weights; 0 where they are computed with as they are.
        rounds: Bytes per token that it keeps of its rounded inputs.
        has_virtual_tokens: Whether gradients pass through all layers to what comes before the first one.
    """

    model: ModelFacts
    full: bool
    attention_rank: int
    mlp_rank: int
    device: DeviceKind
    e: int
    casted: bool
    casts_inputs: bool
    mask: int
    tables: Tables
    wide_norms: bool
    adapted: frozenset[str]
    attention: frozenset[str]
    mlp: frozenset[str]
    cast_bytes: int
    dora: Dora | None
    beside: int
    matrices: int
    widens: str | None
    quantised: bool
    trained_bytes: int
    fused: bool = False
    rounded: int = 0
    rounds: int = 0
    has_virtual_tokens: bool = False

    @property
    def stream_bytes(self) -> int:
        """Bytes of a value of the residual stream: rows of a trained embedding are float32, where autocast casts."""
        return 4 if self.casted and self.tables.embedding else self.e

    @property
    def wide(self) -> bool:
        """True if autocast casts a float32 residual stream."""
        return self.stream_bytes > self.e

    def read_bytes(self, width: int, num_readers: int, *, is_kept: bool = False) -> int:
        """Bytes per token that `num_readers` layers keep of an input that they share; `is_kept`: that is there anyway.

        Each keeps its own where autocast casts it, or where it keeps what its dropout lets through, and a mask.
        """
        if self.casts_inputs or self.mask:
            return (self.e + self.mask) * width * num_readers
        return 0 if is_kept else self.e * width * (num_readers > 0)


def products_of(
    model: ModelFacts,
    adapter: Adapter,
    dtype: Dtype,
    device: DeviceKind = "cuda",
    *,
    autocast: bool = True,
    trained_dtype: Dtype = "float32",
    kernels: bool = False,
    qat: QatSection | None = None,
) -> Products:
    """Return the products of a step, computed in `dtype`, with `kernels` by tunekit's where these know the layers.

    `autocast` says whether each product casts trained weights that are float32: so on one device and under DDP. FSDP2
    and DeepSpeed hand a layer all its weights in the compute type. Weights that are trained in it are not cast.
    """
    autocast, adapter = autocast and trained_dtype == "float32", adapter.of_text
    lora = adapter if isinstance(adapter, LoraAdapter) else None
    full = isinstance(adapter, FullAdapter)
    linears = model.all_linears if isinstance(adapter, FullAdapter) else model.adapted(adapter)
    names = linears.kinds
    decoder = (name for name in names if not model.is_tower(name) and ".experts." not in name)
    leaves = frozenset(name.rpartition(".")[2] for name in decoder if reads_inputs(adapter))
    e = BYTES[dtype]
    mlp, casted = leaves & _MLP, autocast and e == 2
    fused = kernels and is_fused(model, adapter)
    in_4_bits = isinstance(adapter, QloraAdapter) and not model.is_packed_for(adapter)
    # CUDA's kernel makes a mask of bytes; else it is as wide as the values, which float32 adapters read in float32.
    mask = 1 if device == "cuda" else 4 if casted else e
    return Products(
        model=model,
        full=full,
        attention_rank=linears.rank_of(leaves - mlp - ROUTERS),
        mlp_rank=linears.rank_of(mlp),
        device=device,
        e=e,
        casted=casted,
        casts_inputs=casted and not (lora and (fused or (in_4_bits and device == "cuda"))),
        mask=mask if lora and lora.dropout and not fused else 0,
        # Of a part of a model as of all of it: an upper bound.
        tables=trained_tables(model, FullAdapter() if full else adapter),
        # Gemma multiplies by a norm's weight in float32; the others cast first.
        wide_norms=autocast or e == 4 or model.model_type.startswith("gemma"),
        adapted=names,
        attention=leaves - mlp - ROUTERS,
        mlp=mlp,
        cast_bytes=cast_weights_bytes(model, adapter, dtype) if casted and not (fused and lora) else 0,
        dora=dora_of(model, lora, e, casted=casted, last=_FROM_MLP) if lora and lora.use_dora else None,
        beside=kept_beside(model, adapter, e, casted=casted),
        matrices=kept_matrices(model, adapter, e, casted=casted),
        widens=adapter.type
        if casted and {last_part(name) for name in names} & _WIDE_IN.get(adapter.type, set())
        else None,
        quantised=in_4_bits,
        trained_bytes=BYTES[trained_dtype],
        fused=fused,
        rounded=0 if qat is None else _rounded_bytes(model, qat, e, casted=casted, full=full),
        rounds=0 if qat is None or qat.activation_dtype is None else _rounds_bytes(model, e, full=full),
        has_virtual_tokens=num_virtual_tokens(adapter) > 0,
    )


def _rounded_bytes(model: ModelFacts, qat: QatSection, e: int, *, casted: bool, full: bool) -> int:
    """Bytes that a layer keeps of its rounded weights for the backward pass (torchao 0.18, traced by hand).

    Each keeps the integers in the type of the weights, two scales for each group, and the values, which are those that
    autocast casts. Frozen ones keep the values alone.
    """
    if not full:
        return e * sum(outputs * inputs for outputs, inputs in model.linears.values()) // model.num_layers
    num, groups = (
        sum(outputs * inputs // size for outputs, inputs in model.linears.values() for size in [sizes or inputs])
        for sizes in (1, qat.group_size)
    )
    each = 4 if casted else 2 * e
    return (each * num + 2 * (4 if casted else e) * groups) // model.num_layers


def _rounds_bytes(model: ModelFacts, e: int, *, full: bool) -> int:
    """Bytes per token that a layer keeps of the rounded inputs of its linear layers.

    Where weights are trained these are the integers and the values, at most; else the integers, a scale and a zero
    point.
    """
    inputs = sum(inputs for _, inputs in model.linears.values())
    return e * (2 * inputs if full else inputs + 2 * len(model.linears)) // model.num_layers


def is_fused(model: ModelFacts, adapter: Adapter) -> bool:
    """Return whether tunekit's kernels compute all of a decoder layer, with what is trained of it."""
    if isinstance(adapter, LoraAdapter) and (adapter.use_dora or adapter.lora_bias):
        return False
    if model.is_packed_for(adapter):
        return False
    return model.model_type in model_types().fused and isinstance(adapter, FullAdapter | LoraAdapter)


def activation_bytes_per_layer(products: Products, mask_length: int | None, scores_length: int | None = None) -> int:
    """Bytes that autograd keeps per token for one dense decoder layer without checkpointing.

    `scores_length` is that of a row of scores where all of them are kept, as eager attention does, and None elsewhere.

    Norms keep their float32 input and, where their weight is trained, the normalized values; each linear layer its
    input, where it or its adapter is trained; SDPA its q, k, v, output and one log-sum per head; the gated MLP its
    intermediates. Where it has a mask, SDPA keeps k and v repeated for every head, and a mask row of `mask_length`.
    """
    mlp = _mlp_bytes(products, products.model.intermediate_size)
    return _attention_bytes(products, mask_length, scores_length) + mlp


def _attention_bytes(products: Products, mask_length: int | None, scores_length: int | None) -> int:
    """Bytes per token of a layer's attention and the norm before it, and of norms behind, where there are any."""
    model, e = products.model, products.e
    h, n = model.hidden_size, model.num_heads
    q, kv = n * model.head_dim, model.num_kv_heads * model.head_dim
    if scores_length is None:
        attention = 2 * e * q + 2 * e * kv + 4 * n
    else:
        # Queries, and keys and values repeated for every head; what the output layer reads is a copy.
        is_read = products.full or (_FROM_ATTENTION in products.attention and not products.casts_inputs)
        attention = (3 + is_read) * e * q + scores_of(model.model_type, e, wide=products.wide).kept * n * scores_length
    attention += _query_norm_bytes(products)
    if any(name.endswith("self_attn.qkv_proj") and not model.is_tower(name) for name in model.all_linears.kinds):
        # Values are a part of one tensor with queries and keys as they were before they were rotated.
        attention += e * (q + kv)
    # A single key-value head is repeated without a copy.
    repeated = 2 * (q - kv) if model.num_kv_heads > 1 else 0
    mask = 0 if mask_length is None or scores_length is not None else e * (repeated + mask_length)
    # Norms behind attention and MLP, where there are any, keep their input in float32.
    kept_behind = e if products.fused else 8 if products.full else 4
    behind = max(0, model.num_stream_norms - 2) * (4 + kept_behind * h)
    latents = model.latent_widths
    inputs = _input_bytes(products, len(products.attention - {_FROM_ATTENTION, *latents}))
    for reader, width in latents.items():
        # A norm as above, but its input is in the compute type also where the stream is not.
        inputs += 4 + (4 + e * products.full + e * (reader in products.attention)) * width
    if not products.full:
        read = products.read_bytes(model.attended_width, 1, is_kept=True)
        inputs += read if _FROM_ATTENTION in products.attention else 0
        inputs += e * products.attention_rank
        inputs += products.beside
    return attention + mask + behind + inputs


def _mlp_bytes(products: Products, width: int) -> int:
    """Bytes per token of a dense MLP of a width and the norm before it."""
    inputs = _input_bytes(products, len(products.mlp - {_FROM_MLP})) + products.e * products.mlp_rank
    # Gate, up and, by torch's operations, the activation.
    gated = (2 if products.fused else 3) * products.e * width
    return inputs + gated + (products.read_bytes(width, 1) if _FROM_MLP in products.mlp else 0)


def _input_bytes(products: Products, num_readers: int) -> int:
    """Bytes per token that a norm of the residual stream keeps, and the `num_readers` layers that read it."""
    h = products.model.hidden_size
    norm = 4 + ((8 if products.wide_norms else 6) * h if products.full else 4 * h)
    if products.fused:
        norm = 4 + products.stream_bytes * h
    return norm + products.read_bytes(h, num_readers)


def _query_norm_bytes(products: Products) -> int:
    """Bytes per token that norms of queries and keys keep, where a model has them (Qwen 3, Gemma 3)."""
    model = products.model
    if not model.has_query_norms:
        return 0
    heads = model.num_heads + model.num_kv_heads
    if products.fused:
        return heads * (model.head_dim * products.e + 4)
    # Gemma multiplies by its weight in float32; the others cast first.
    normed = 0 if not products.full else 4 if model.model_type.startswith("gemma") else products.e
    return heads * (model.head_dim * (4 + normed) + 4)


def is_traced(model: ModelFacts) -> bool:
    """Return whether the closed forms were derived for this kind of model; others use those of a Llama of its sizes."""
    types = model_types()
    return model.model_type in types.traced | types.traced_with_pictures


def cast_weights_bytes(model: ModelFacts, adapter: Adapter, dtype: Dtype) -> int:
    """Bytes of the copies in the compute type that autocast keeps of float32 weights for the backward pass."""
    if dtype == "float32":
        return 0
    if isinstance(adapter, FullAdapter):
        # Not of a tower: autocast keeps no copies of weights that are not trained.
        towers = sum(prod(sizes) for name, sizes in model.linears.items() if model.is_tower(name))
        return 2 * (model.num_linear_params - towers)
    tables = model.vocab_size * model.hidden_size * trained_tables(model, adapter).num
    if isinstance(adapter, LoraAdapter):
        return 2 * (num_trainable_params(model, adapter) - tables)
    # What others make of their own weights is `kept_matrices`.
    whole = trained_whole(model, adapter)
    return 2 * (model.num_params_in(whole) - tables) if whole else 0


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
    """Of the first layer, while its backward pass runs, recomputed where it has to be; of those with experts."""
    leading: int
    """Of the first layer, with all that its backward pass needs: little where it is dense before those with experts."""
    recomputed: int
    """Of one layer, recomputed in the backward pass."""
    passing: int
    """Of one layer's forward pass, beyond what it keeps, where that is much."""
    working: int
    """Of one layer's backward pass, beyond what was kept for it."""
    shared: int
    """Masks, which all layers read."""


def layers_of(
    products: Products,
    num_tokens: int,
    mask_length: int | None,
    sliding_mask_length: int | None,
    *,
    gradient_checkpointing: bool,
    accumulates: bool,
    scores_length: int | None = None,
    num_gathered: int = 0,
    mlp_tile_tokens: int | None = None,
) -> Layers:
    """Return the activations of the decoder layers in a step; the arguments are those of `memory.estimate`.

    In context parallelism a layer gathers keys and values of `num_gathered` tokens, the whole sequence, and their
    gradients: so does torch's `context_parallel` by its default, all-gather.
    MLPs compute `mlp_tile_tokens` at a time, and again in the backward pass; all at once where that is None.
    """
    model, e = products.model, products.e
    stream, casts = products.stream_bytes * model.hidden_size * num_tokens, products.cast_bytes
    copies = casts // model.num_layers + products.matrices + (products.dora.copies if products.dora else 0)
    copies += products.rounded

    def attention(length: int | None) -> int:
        return (_attention_bytes(products, length, scores_length) + products.rounds) * num_tokens + copies

    if mlp_tile_tokens is None:
        mlps = _mlps(products, num_tokens, recomputes=gradient_checkpointing, accumulates=accumulates)
    else:
        mlps = _tiled_mlps(products, num_tokens, min(mlp_tile_tokens, num_tokens), accumulates=accumulates)
    # Of the first and the last layer, the one that keeps more is what decides.
    sliding = model.num_sliding_layers
    one_attention = max(attention(mask_length), attention(sliding_mask_length) if sliding else 0)
    layer_bytes = one_attention + mlps.one
    other_layers = sliding * attention(sliding_mask_length) + (model.num_layers - sliding) * attention(mask_length)
    other_layers += mlps.others - one_attention
    # The masks themselves, one for each kind of layer: a byte for each pair of tokens.
    kinds = (mask_length if sliding < model.num_layers else None, sliding_mask_length if sliding else None)
    shared = num_tokens * sum(length or 0 for length in kinds)
    if scores_length is not None:
        # A causal mask of what is added to the scores, also where nothing is padded.
        num_pairs = num_tokens * scores_length
        shared = products.stream_bytes * num_pairs * sum((sliding < model.num_layers, sliding > 0))
        scores = scores_of(model.model_type, e, wide=products.wide)
        mlps = mlps.beside_scores(scores, model.num_heads * num_pairs, recomputes=gradient_checkpointing)
    working = stream + mlps.working + 4 * e * model.num_kv_heads * model.head_dim * num_gathered
    less = mlps.one + mlps.working - mlps.first
    if gradient_checkpointing:
        # The copy that a layer was recomputed from is kept already. Autocast remembers its casts until the pass ends.
        again = layer_bytes - (stream if e == 4 or products.wide else 0)
        first, kept_bytes = stream + again, model.num_layers * stream + mlps.logits
        return Layers(stream, kept_bytes, casts, first, first + working - less, again, mlps.passing, working, shared)
    # Nothing before the first adapter needs a gradient, so its norm keeps nothing, and dropout no mask.
    num_readers = len(products.attention - {_FROM_ATTENTION})
    nothing = ((e if products.fused else 4) + products.mask * num_readers) * model.hidden_size * num_tokens
    first = layer_bytes - (0 if products.tables.embedding or products.has_virtual_tokens else nothing)
    return Layers(stream, first + other_layers, 0, first, first + working - less, 0, mlps.passing, working, shared)


@dataclass(frozen=True)
class _Mlps:
    """Bytes of the MLPs of all layers, or of their experts."""

    one: int
    """Kept of the one that keeps the most."""
    others: int
    """Kept of all others."""
    first: int
    """Of the first layer, with what its backward pass needs."""
    passing: int
    working: int
    logits: int = 0
    """Of all routers, kept also where layers are computed again."""

    def beside_scores(self, scores: Scores, num_scores: int, *, recomputes: bool) -> "_Mlps":
        """The same where attention needs more: before the MLP is computed, and when its own backward pass is over."""
        kept_scores = 0 if recomputes else scores.kept
        passing = max(self.passing, (scores.forward - kept_scores) * num_scores - (0 if recomputes else self.one))
        working = max(self.working, scores.backward * num_scores - self.one)
        return replace(self, passing=passing, working=working, first=self.first + working - self.working)


def _mlps(products: Products, num_tokens: int, *, recomputes: bool, accumulates: bool) -> _Mlps:
    model, e = products.model, products.e
    h, i = model.hidden_size, model.intermediate_size

    def dense_working(width: int) -> int:
        working = _working_bytes(products, width, recomputes=recomputes) * num_tokens
        return working + _weight_gradient_bytes(products, width, accumulates=accumulates)

    mixture = model.mixture
    if mixture is None:
        layer_bytes = _mlp_bytes(products, i) * num_tokens
        working = dense_working(i)
        passing = 0 if products.full or recomputes else _adapter_copy_bytes(products, i) * num_tokens
        if products.widens is not None:
            working += (_WIDE_BYTES_AGAIN if recomputes else _WIDE_BYTES)[products.widens] * i * num_tokens
            passing += 0 if recomputes else _WIDE_PASSING * i * num_tokens
        if products.dora is not None:
            end = _dora_end_bytes(products, products.dora, num_tokens)
            # A layer is computed again when the gradient of its output has been scaled; under autocast, and cast.
            gradients = (2 * 4 if products.casted else e) * h * num_tokens
            working = max(working, end + gradients if recomputes else 0)
            passing = 0 if recomputes else end
        return _Mlps(layer_bytes, (model.num_layers - 1) * layer_bytes, layer_bytes + working, passing, working)
    beside = _beside_experts_bytes(products, mixture.shared)
    # The forward pass goes through that MLP last, and the backward pass first: it leaves the gradient of what it read.
    freed = 0
    if mixture.shared:
        freed = (beside - _beside_experts_bytes(products, 0) - e * h) * num_tokens
        freed -= 3 * _weight_gradient_bytes(products, mixture.shared, accumulates=accumulates)
    kept_bytes, logits, passing, working = _sparse_mlp(
        products, mixture, num_tokens, recomputes=recomputes, accumulates=accumulates, beside=freed
    )
    layer_bytes = kept_bytes + beside * num_tokens
    dense = _mlp_bytes(products, mixture.dense) * num_tokens
    remaining = (mixture.num_layers - 1) * layer_bytes + (model.num_layers - mixture.num_layers) * dense
    working = max(working, 2 * e * mixture.shared * num_tokens)
    first = dense + dense_working(mixture.dense) if mixture.dense else layer_bytes + working
    return _Mlps(layer_bytes, remaining, first, passing, working, mixture.num_layers * logits)


def _tiled_mlps(products: Products, num_tokens: int, tile_tokens: int, *, accumulates: bool) -> _Mlps:
    """Bytes of dense MLPs that compute a tile of the tokens at a time, and again in the backward pass.

    Kept is what the norm before an MLP keeps, and what it gives, of which the tiles are parts.
    """
    model, e, h, i = products.model, products.e, products.model.hidden_size, products.model.intermediate_size
    layer_bytes = (_input_bytes(products, 0) + e * h) * num_tokens
    of_tile = (_mlp_bytes(products, i) - _input_bytes(products, 0)) * tile_tokens
    of_tile += _working_bytes(products, i, recomputes=True) * tile_tokens
    # Gradients of what the tiles read, and all of them in one.
    working = of_tile + _weight_gradient_bytes(products, i, accumulates=accumulates) + 2 * e * h * num_tokens
    return _Mlps(layer_bytes, (model.num_layers - 1) * layer_bytes, layer_bytes + working, 0, working)


_CASTED = frozenset({"flex_olmo", "gpt_oss", "mellum", "olmoe", "qwen3_moe", "qwen3_next"})
_SIGMOID = frozenset({"deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "solar_open"})

ROUTED_IN_COMPUTE_TYPE = _CASTED | _SIGMOID
"""Types whose routers cast the weights of the experts to the type of their logits, or take a sigmoid, which keeps it.
In others they are float32 by a softmax, and so is the product with what the experts give."""


def _sparse_mlp(
    products: Products, mixture: Mixture, num_tokens: int, *, recomputes: bool, accumulates: bool, beside: int
) -> tuple[int, int, int, int]:
    """Return the bytes of one layer's experts in a step, without the MLP beside them.

    Returns:
        What is kept for the backward pass; of it the router's logits where the loss that balances experts reads them,
        so that they stay in any case; beyond what is kept, that of the forward pass; and that of the backward pass:
        the most of its moments.

    Args:
        products: The products of the step.
        mixture: Sizes of the experts.
        num_tokens: Tokens of a micro-batch.
        recomputes: Whether the layer is computed again in the backward pass.
        accumulates: Whether gradients of an earlier micro-batch are there, which new ones are added to.
        beside: Bytes of the layer that are not there while its experts are computed again, nor in their backward pass.
    """
    model, h, e, model_type = products.model, products.model.hidden_size, products.e, products.model.model_type
    trained = trained_experts(None if products.full else products.adapted)
    x = 4 if trained.whole and products.casted else e
    w = e if model_type in ROUTED_IN_COMPUTE_TYPE and not (trained.whole and products.casted) else 4
    rows, inner = mixture.per_token * num_tokens, mixture.per_token * num_tokens * mixture.inner
    gate_up, down = mixture.expert_params(h)
    # What the rows are, where a gradient of the weight needs them; gate and up, the activation; what the experts give.
    # GPT-OSS bounds gate and up, and takes its activation apart, so that it keeps twice as many.
    selected, product = x * h * rows, x * inner
    gates = (6 if model_type == "gpt_oss" else 3) * product
    kept_bytes = (trained.gate_up * selected) + gates + trained.down * product + x * h * rows
    # The router's logits, softmax and choice, and the loss that balances experts.
    kept_bytes += num_tokens * ((4 + e) * mixture.num_experts + 56 * mixture.per_token)
    logits = 0 if model_type in _SIGMOID else e * mixture.num_experts * num_tokens
    kept_bytes += (e * h * num_tokens) if trained.router and not trained.whole else 0
    merged_gate_up = 0 if trained.whole or not trained.gate_up else x * gate_up
    merged_down = 0 if trained.whole or not trained.down else x * down
    kept_bytes += merged_gate_up + merged_down
    # Experts in 4 bits, made dense for one product; PEFT's sum is made of them, and then they are not there any more.
    dense_gate_up, dense_down = (x * gate_up, x * down) if products.quantised and model.expert_stacks else (0, 0)
    # What the rows are, and that they are weighted, and put back into the order of the tokens.
    unkept_rows = 0 if trained.gate_up else selected
    passing = max(2 * w * h * rows + unkept_rows, dense_gate_up - gates, dense_down - x * h * rows)
    if recomputes:
        last = merged_down + x * h * rows + max(product, 2 * w * h * rows, dense_down)
        # Besides, the stream and its norm.
        first = max(4 * product, 2 * product + dense_gate_up, last)
        passing = merged_gate_up + selected + first + 2 * x * h * num_tokens
    # In the layer's code are the stream, and the norm that the router reads, where nothing keeps them.
    normed = e == 2 or not trained.router if trained.whole else not trained.router
    named = (x * h * num_tokens if normed else 0) + (e * h * num_tokens if e == 2 and not trained.whole else 0)
    stays = trained.whole and not accumulates
    gone_down = trained.down * product + x * h * rows
    moments = (
        # Weighting: the gradient of each pair, and of both that were multiplied.
        3 * w * h * rows,
        # The end of computing again, whose results wait beside the gradient that asked for them.
        2 * w * h * rows + unkept_rows + named if recomputes else 0,
        # The last product: gradients of its rows and its weight.
        product + (x * down if trained.down else dense_down),
        # Where gate and up are taken apart: gradients of both and of their product.
        (3 * product if trained.whole else gates) - gone_down - merged_down + (x * down if stays else 0),
        # The first product: the gradient of both, of the rows and of its weight.
        2 * product + selected - gates - gone_down - merged_down
        + (x * gate_up if trained.gate_up else dense_gate_up) + (x * down if stays else 0),
    )  # fmt: skip
    return kept_bytes, logits, passing, max(moments) - beside


def _weight_gradient_bytes(products: Products, width: int, *, accumulates: bool) -> int:
    """Bytes of the gradient of an MLP's weight, less those of its cast copy, which is not there any more."""
    if not products.full:
        return 0
    each = 0 if accumulates else 4 if products.casted else products.e
    return (each - (2 if products.casted else 0)) * products.model.hidden_size * width


def _beside_experts_bytes(products: Products, shared: int) -> int:
    """Bytes per token of the norm before the experts, and of the MLP that every token goes through."""
    # The router reads the norm, and so do gate and up of the MLP; where adapters are, only they read anything again.
    if products.full:
        readers = 1 + (2 if shared else 0)
    else:
        readers = len(products.mlp - {_FROM_MLP}) if shared else 0
    last = products.full or _FROM_MLP in products.mlp
    return _input_bytes(products, readers) + 3 * products.e * shared + (products.read_bytes(shared, 1) if last else 0)


def _working_bytes(products: Products, i: int, *, recomputes: bool) -> int:
    """Bytes per token that a layer's backward pass needs beyond what was kept for it: the most of its moments."""
    h, full, sandwich = products.model.hidden_size, products.full, products.model.num_stream_norms > 2
    # Where the MLP's product is taken apart: gradients of both factors and of the product, whose own copy is gone where
    # there was one. So is what DoRA and the norm behind it kept.
    behind = 0 if not sandwich else 8 * h if full else 4 * h
    adapted = _FROM_MLP in products.mlp
    if adapted and products.dora is not None:
        behind += 2 * products.e * h
    moments = [(2 if adapted else 3) * products.e * i - behind]
    if products.mask and products.casts_inputs and adapted:
        # The gradients of dropout's input and output, in float32; what it let through is gone.
        moments.append((8 - products.e) * i - behind)
    if sandwich:
        # That norm itself, in float32: its gradient, product, quotient and power.
        moments.append(4 * 4 * h if full else 5 * 4 * h)
    if products.dora is not None and products.casted and adapted:
        # Gradients of what DoRA scales and adds, in float32; what the last product kept is gone.
        moments.append(14 * i - behind)
    if recomputes and not full:
        moments.append(_adapter_copy_bytes(products, i))
    return max(moments)


def _adapter_copy_bytes(products: Products, i: int) -> int:
    """Bytes per token at the end of a layer's forward pass, beyond what it keeps, where that is much.

    The MLP's product, float32 copies of it for the last adapter and of what its dropout lets through, and what the
    layer's code still has names for.
    """
    adapted = _FROM_MLP in products.mlp
    if products.fused or (not products.casted and not (products.mask and adapted)):
        return 0
    e, copies = products.e, (8 if products.mask else 4) * (products.casts_inputs and adapted)
    return (e + copies) * i + (5 if products.model.num_stream_norms > 2 else 4) * e * products.model.hidden_size


def _dora_end_bytes(products: Products, dora: Dora, num_tokens: int) -> int:
    """Bytes at the end of a layer's forward pass with DoRA, beyond what it keeps: the most of its moments."""
    h, i, e = products.model.hidden_size, products.model.intermediate_size, products.e
    if _FROM_MLP not in products.mlp:
        # Nothing of the MLP is there yet.
        return dora.norming - _mlp_bytes(products, i) * num_tokens
    there = _adapter_copy_bytes(products, i) if products.casted else (e * i + 2 * e * h) * (products.mask > 0)
    # Neither the adapter's input nor its output is there when the norm is computed.
    before = there - e * i - e * h
    # The scaled result; or the input of the base layer in the compute type, which dropout makes another.
    after = there + (max(4 * h, e * i if products.mask else 0) if products.casted else e * h)
    return max(before * num_tokens + dora.norming, after * num_tokens + dora.applying)


@dataclass(frozen=True)
class Head:
    """Bytes of the final norm and of the head in a step."""

    kept: int
    """Bytes that the norm and the head keep."""
    forward: int
    """Besides, in the forward pass."""
    backward: int
    """Besides, in the backward pass, without the weight's gradient."""


def head_of(
    products: Products, num_tokens: int, *, scored_share: float = 1.0, kind: HeadKind = "tiles", widens: bool = True
) -> Head:
    """Return the bytes of a head.

    Args:
        products: The products of the step.
        num_tokens: Tokens of a micro-batch, with its padding.
        scored_share: Share of them that count.
        kind: Kind of the head.
        widens: Whether Accelerate makes float32 of what the model's own head returns.
    """
    scored = int(scored_share * num_tokens)
    match kind:
        case "score":
            return _score_of(products, num_tokens)
        case "whole":
            return _whole_head_of(products, num_tokens, widens=widens)
        case "tiles":
            return _tiled_head_of(products, num_tokens, scored)
        case "sums" | "chunks":
            return _chunked_head_of(products, num_tokens, scored, sums=kind == "sums")
        case _:
            assert_never(kind)


def _norm_bytes(products: Products, num_tokens: int) -> int:
    """Return the bytes that the final norm keeps: its float32 input, and the values that its trained weight was
    multiplied with.
    """
    if products.fused:
        return products.stream_bytes * products.model.hidden_size * num_tokens
    return (4 + products.stream_bytes * products.full) * products.model.hidden_size * num_tokens


def _tiled_head_of(products: Products, num_tokens: int, scored: int) -> Head:
    """TRL's head, which never makes all logits: it goes through them in tiles (trl/kernels/chunked_logprob.py).

    On CUDA the tile's buffer has all its columns also where the vocabulary is smaller; on a CPU what is not touched is
    not resident, but the statistics are torch operations on float32 copies of the tile. Only there the head also goes
    through tokens that do not count: on CUDA those that do are a copy.
    """
    h, e, vocabulary, wide = products.model.hidden_size, products.e, products.model.vocab_size, products.stream_bytes
    on_cuda = products.device == "cuda"
    scored = scored if on_cuda else num_tokens
    rows, columns = min(scored, HEAD_TOKENS), min(vocabulary, HEAD_COLUMNS)
    tile = rows * (e * HEAD_COLUMNS if on_cuda else (e + 12) * columns)
    # What the norm keeps, and what the head reads.
    kept_bytes = _norm_bytes(products, num_tokens) + wide * h * scored
    # Autocast casts a tile of a float32 weight, and of what the head reads, while the last ones are there still.
    more_rows = scored > HEAD_TOKENS
    casts = e * h * rows * (1 + more_rows) if products.wide else 0
    live = 0
    if products.casted and products.tables.head:
        casts += e * h * columns
        live = min(vocabulary - columns, HEAD_COLUMNS) if vocabulary > columns else columns * more_rows
    # The gradient in float32, and in the type of what the head reads.
    gradient = (4 + (wide if wide == 2 else 0)) * h * scored
    return Head(kept_bytes, tile + casts + wide * h * num_tokens, tile + casts + e * h * live + gradient)


def _chunked_head_of(products: Products, num_tokens: int, scored: int, *, sums: bool) -> Head:
    """The head of tunekit, whose logits are those of a chunk of the tokens that count (tunekit/kernels/linear_ce.py).

    It keeps the gradient of what it reads, of these tokens, in the compute type. Where it is trained, it makes its own
    with the logits if sums are learned from: then that is there, in float32, from the forward pass on. Otherwise it
    keeps all that it reads, and computes its logits again.
    """
    h, e, vocabulary, wide = products.model.hidden_size, products.e, products.model.vocab_size, products.stream_bytes
    rows = chunk_rows(scored, vocabulary, e)
    # On a CPU besides: probabilities in float32, and the logits where they are not.
    beside = 0 if products.device == "cuda" else (4 if e == 4 else 8) * vocabulary
    # What a chunk reads, as it is and in the compute type, and what the one before has read; and a cast of the weight.
    reads = h * rows * (e * (1 + (scored > rows)) + (wide if wide != e else 0))
    casts = e * vocabulary * h if products.casted and products.tables.head else 0
    chunk = rows * (e * row_columns(vocabulary) + beside) + reads + casts
    # Labels, places and weights of tokens that count; and what is said of them, there and among all tokens.
    columns = 28 * scored + 12 * num_tokens
    # The gradient of what was read, for each token that counts and then among all; of 16 bits by way of float32.
    gradients = max(wide * h * (num_tokens + scored), (4 + wide) * h * scored if e == 2 else 0)
    norm = _norm_bytes(products, num_tokens)
    if products.tables.head and not sums:
        return Head(norm + wide * h * num_tokens + columns, chunk, max(chunk + e * h * scored, gradients))
    of_weight = 4 * vocabulary * h if products.tables.head else 0
    return Head(norm + e * h * scored + columns, chunk + of_weight + wide * h * num_tokens, gradients)


def _score_of(products: Products, num_tokens: int) -> Head:
    """A score of each token, of which one of each text is read."""
    h, e = products.model.hidden_size, products.e
    # The score is trained, so that what it reads is kept, in the type of its product, until the norm's own backward
    # pass: in float32 its gradient, product, quotient and power, and of a frozen weight one more.
    kept_bytes = _norm_bytes(products, num_tokens) + e * h * num_tokens
    norm = (16 if products.full else 20) - e
    return Head(kept_bytes, products.stream_bytes * h * num_tokens, norm * h * num_tokens)


def _whole_head_of(products: Products, num_tokens: int, *, widens: bool) -> Head:
    """The model's own head, all logits at once, as TRL's experimental trainers of pairs read them.

    Accelerate makes float32 of them (`widens`), and DeepSpeed does not. The likelihood takes a copy of those of the
    better answers, and their softmax. In the backward pass there are they, that softmax, and its gradient in two
    shapes; without Triton also those of the words' own logits and of their sums.
    """
    h, e, vocabulary = products.model.hidden_size, products.e, products.model.vocab_size
    is_trained = products.tables.head
    logits = (4 if widens else e) * vocabulary * num_tokens
    cast = e * vocabulary * h if products.casted and is_trained else 0
    # Its weight has no gradient yet, which is counted beside.
    gradient = products.trained_bytes * vocabulary * h if is_trained else 0
    kept_bytes = _norm_bytes(products, num_tokens) + e * h * num_tokens * is_trained
    times = 3 if products.device == "cuda" else 4.5
    return Head(kept_bytes, 2 * logits + cast, int(max(times * logits + cast - gradient, 2 * logits)))
