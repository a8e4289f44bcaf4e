"""Bytes that a training step needs on one device, by phase and by part.

A step goes through phases, and what it needs is the most that any of them needs: at the end of the forward pass all
that is kept for the backward pass is there but few gradients, at its end the gradients but few activations. Closed
forms for Llama-like decoders. The activation counts are exact for Hugging Face's modules with SDPA: they equal the
bytes that autograd saves, which the tests measure. Where an architecture differs they are an estimate.
`benchmarks/planner.py` compares the phases with a trace of the real modules.

Symbols: h hidden size, i intermediate size, q = heads x head size, kv = key-value heads x head size, e bytes of the
compute type, T tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tunekit.planner.facts import Facts, ModelFacts
from tunekit.recipe.schema import FullAdapter, LoraAdapter, Optim, QloraAdapter

Dtype = Literal["float32", "bfloat16", "float16"]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

OPTIMIZER_BYTES: dict[Optim, float] = {
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "adafactor": 0.1,
    "sgd": 0,
    "adagrad": 4,
    "rmsprop": 4,
    "ademamix": 12,
    "ademamix_8bit": 3.05,
    "adamw_8bit": 2.03,
    "adamw_bnb_8bit": 2.03,
    "lion_32bit": 4,
    "lion_8bit": 1.02,
    "paged_adamw_32bit": 8,
    "paged_adamw_8bit": 2.03,
    "paged_ademamix_32bit": 12,
    "paged_ademamix_8bit": 3.05,
    "paged_lion_32bit": 4,
    "paged_lion_8bit": 1.02,
    "rmsprop_bnb": 4,
    "rmsprop_bnb_32bit": 4,
    "rmsprop_bnb_8bit": 1.02,
}
"""Optimizer state bytes per trained parameter. 8-bit states carry one float32 constant per 256 values
(arXiv 2110.02861); Adafactor keeps a row and a column per matrix (arXiv 1804.04235), stated here as an upper bound."""

FIXED_BYTES = {"cpu": 900 * 2**20, "cuda": 1400 * 2**20}
"""What a process holds besides these parts. On a CPU: the libraries, the tokenised rows and what the allocator keeps,
0.5 GiB resident after the imports and 0.8 GiB at the end of a small run (torch 2.13, transformers 5.23). On CUDA: the
context with its libraries, an upper bound of published figures (0.5 to 1.4 GB)."""

FOREACH: frozenset[Optim] = frozenset({"adamw_torch"})
"""Optimizers that take all parameters at once on CUDA, with a temporary value for each (torch.optim, `foreach`)."""

HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""Largest tile in which TRL's fused head computes logits: tokens x vocabulary entries."""


Phase = Literal["forward", "head", "last layer", "first layer", "embedding", "optimizer"]
"""Where in a step the memory is: at the end of the forward pass, in the backward pass of the head, of the last layer,
of the first and of the embedding, or in the optimizer's step. From layer to layer memory falls or rises evenly, so the
layers between are never the peak."""

PHASE_WORDS: dict[Phase, str] = {
    "forward": "at the end of the forward pass",
    "head": "in the backward of the head",
    "last layer": "in the backward of the last layer",
    "first layer": "in the backward of the first layer",
    "embedding": "in the backward of the embedding",
    "optimizer": "in the optimizer's step",
}


class MemoryEstimate(Facts):
    """Bytes on one device at the peak of a step, by part."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    fixed_bytes: int
    """What the process holds besides tensors: libraries, or the CUDA context."""
    phase: Phase
    """Where the peak is."""
    phases: Mapping[Phase, int]
    """Bytes at the peak of each phase."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes at the peak by part."""
        return {
            "weights": self.weights_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activations_bytes,
            "logits": self.logits_bytes,
            "fixed": self.fixed_bytes,
        }

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def peak_words(self) -> str:
        """Where the peak is, in words."""
        return f"peak {PHASE_WORDS[self.phase]}"


def num_trainable_params(model: ModelFacts, adapter: FullAdapter | LoraAdapter) -> int:
    """Number of parameters that are trained.

    LoRA adds r x (in + out) per linear layer (arXiv 2106.09685, section 4.1), DoRA one magnitude per output besides
    (arXiv 2402.09353). Modules in `modules_to_save` are trained wholly.
    """
    if isinstance(adapter, FullAdapter):
        return model.num_params
    linears = model.adapter_linears(adapter.target_modules).values()
    trained = sum(adapter.rank * (outputs + inputs) for outputs, inputs in linears)
    if adapter.use_dora:
        trained += sum(outputs for outputs, _ in linears)
    return trained + model.num_params_in(adapter.modules_to_save or [])


def weights_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype) -> int:
    """Bytes of all weights on the device: the model as it is kept, and the adapters in float32.

    4-bit weights take half a byte and a float32 constant per 64 of them, or with double quantisation an 8-bit one and
    a float32 per 256 of those (arXiv 2305.14314, section 3); embeddings, norms and head stay in `dtype`.
    """
    if isinstance(adapter, FullAdapter):
        return 4 * model.num_params
    trained = 4 * num_trainable_params(model, adapter)
    if not isinstance(adapter, QloraAdapter):
        return BYTES[dtype] * model.num_params + trained
    quantised = sum(outputs * inputs for outputs, inputs in model.linears.values())
    constants = 1 / 64 + 4 / (64 * 256) if adapter.double_quant else 4 / 64
    largest = max(outputs * inputs for outputs, inputs in model.linears.values())
    dequantised = BYTES[dtype] * largest
    rest = BYTES[dtype] * (model.num_params - quantised)
    return int(quantised * (0.5 + constants)) + rest + dequantised + trained


def activation_bytes_per_layer(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype, *, mask_length: int | None
) -> int:
    """Bytes that autograd keeps per token for one decoder layer without checkpointing.

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
    mask = 0 if mask_length is None else e * (2 * (q - kv) + mask_length)
    # Norms behind attention and MLP, where there are any, keep their input in float32.
    behind = max(0, _num_norms(model) - 2) * (4 + (8 if full else 4) * h)
    if isinstance(adapter, FullAdapter):
        # Under autocast the residual stream is float32 and each norm keeps a cast copy besides.
        norms = 24 * h if e == 4 else 26 * h
        return norms + behind + attention + mlp + mask + 8
    norms = 16 * h if e == 4 else 12 * h
    lora = 7 * e * adapter.rank
    # Float32 adapters under autocast read float32 copies of their inputs.
    casts = 0 if e == 4 else 6 * h + 2 * q
    return norms + behind + attention + mlp + lora + casts + mask + 8


def _num_norms(model: ModelFacts) -> int:
    """Norms of the residual stream in a layer: two, or four where they stand before and behind (Gemma)."""
    sized = [name for name, shape in model.tensors.items() if shape == (model.hidden_size,) and "norm" in name]
    return (len(sized) - 1) // model.num_layers


def _query_norm_bytes(model: ModelFacts, *, full: bool, e: int) -> int:
    """Bytes per token that norms of queries and keys keep, where a model has them (Qwen 3, Gemma 3)."""
    if not any(name.endswith("q_norm.weight") for name in model.tensors):
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
        return 2 * sum(outputs * inputs for outputs, inputs in model.linears.values())
    return 2 * num_trainable_params(model, adapter)


def estimate(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    *,
    device: Literal["cpu", "cuda"],
    dtype: Dtype,
    optim: Optim,
    num_tokens: int,
    mask_length: int | None,
    sliding_mask_length: int | None,
    gradient_checkpointing: bool,
    accumulates: bool,
) -> MemoryEstimate:
    """Memory of one training step on one device.

    Args:
        model: The model.
        adapter: What is trained.
        device: Where.
        dtype: Type of the products, and of frozen weights.
        optim: Optimizer.
        num_tokens: Tokens of a micro-batch with its padding.
        mask_length: Length of a row of the attention mask: to which sequences are padded, or of all that lie one behind
            the other; None without a mask.
        sliding_mask_length: The same for layers of sliding attention, which need a mask also where others do not.
        gradient_checkpointing: Whether only layer inputs are kept, and one layer is recomputed at a time.
        accumulates: Whether a step has several micro-batches, so that gradients lie there from the first one on.
    """
    trained = num_trainable_params(model, adapter)
    weights, states = weights_bytes(model, adapter, dtype), int(OPTIMIZER_BYTES[optim] * trained)
    layers = _layers(
        model,
        adapter,
        dtype,
        num_tokens,
        mask_length,
        sliding_mask_length,
        gradient_checkpointing=gradient_checkpointing,
        accumulates=accumulates,
    )
    head = _head(model, adapter, device, dtype, num_tokens)
    needs = _needs(model, adapter, layers, head, accumulates=accumulates)
    copied = 4 * trained if optim in FOREACH and device == "cuda" else 0
    needs["optimizer"] = _Need(gradients=4 * trained + copied)
    fixed = FIXED_BYTES[device]
    phases = {phase: weights + states + fixed + need.total for phase, need in needs.items()}
    phase = max(phases, key=phases.__getitem__)
    peak = needs[phase]
    return MemoryEstimate(
        weights_bytes=weights,
        gradients_bytes=peak.gradients,
        optimizer_bytes=states,
        activations_bytes=peak.activations,
        logits_bytes=peak.logits,
        fixed_bytes=fixed,
        phase=phase,
        phases=phases,
    )


@dataclass(frozen=True)
class _Need:
    """Bytes that a phase needs besides weights and optimizer states."""

    gradients: int = 0
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.logits


@dataclass(frozen=True)
class _Layers:
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


def _layers(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    dtype: Dtype,
    num_tokens: int,
    mask_length: int | None,
    sliding_mask_length: int | None,
    *,
    gradient_checkpointing: bool,
    accumulates: bool,
) -> _Layers:
    h, i, e = model.hidden_size, model.intermediate_size, BYTES[dtype]
    full = isinstance(adapter, FullAdapter)
    stream = (4 if full else e) * h * num_tokens
    casts = cast_weights_bytes(model, adapter, dtype)

    def kept(length: int | None) -> int:
        saved = activation_bytes_per_layer(model, adapter, dtype, mask_length=length) * num_tokens
        return saved + casts // model.num_layers

    sliding = model.num_sliding_layers
    # Of the first and the last layer, the one that keeps more is what decides.
    one = max(kept(mask_length), kept(sliding_mask_length) if sliding else 0)
    others = sliding * kept(sliding_mask_length) + (model.num_layers - sliding) * kept(mask_length) - one
    working = stream + _working_bytes(model, adapter, e, recomputes=gradient_checkpointing) * num_tokens
    if full:
        # The gradient of the MLP's last weight is there; its cast copy is not any more.
        working += (0 if accumulates else 4 * h * i) - (0 if e == 4 else 2 * h * i)
    # The masks themselves, one for each kind of layer: a byte for each pair of tokens.
    kinds = (mask_length if sliding < model.num_layers else None, sliding_mask_length if sliding else None)
    shared = num_tokens * sum(length or 0 for length in kinds)
    if gradient_checkpointing:
        # The copy that a layer was recomputed from is kept already. Autocast remembers its casts until the pass ends.
        again = one - (stream if full or e == 4 else 0)
        return _Layers(stream, model.num_layers * stream, casts, stream + again, again, 0, working, shared)
    # Nothing before the first adapter needs a gradient, so its norm keeps nothing.
    first = one if full else one - 4 * h * num_tokens
    passing = 0 if full else _adapter_copy_bytes(model, e) * num_tokens
    return _Layers(stream, first + others, 0, first, 0, passing, working, shared)


def _working_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter, e: int, *, recomputes: bool) -> int:
    """Bytes per token that a layer's backward pass needs beyond what was kept for it: the most of its moments."""
    h, i = model.hidden_size, model.intermediate_size
    full = isinstance(adapter, FullAdapter)
    sandwich = _num_norms(model) > 2
    # Where the MLP's product is taken apart: gradients of both factors and of the product, whose own copy is gone.
    # So is what the norm behind it kept.
    moments = [2 * e * i - (0 if not sandwich else 8 * h if full else 4 * h)]
    if sandwich:
        # That norm itself, in float32: its gradient, product, quotient and power.
        moments.append(4 * 4 * h if full else 5 * 4 * h)
    if recomputes and not full and e == 2:
        moments.append(_adapter_copy_bytes(model, e))
    return max(moments)


def _adapter_copy_bytes(model: ModelFacts, e: int) -> int:
    """Bytes per token at the end of a layer's forward pass under autocast, beyond what it keeps.

    The MLP's product, a float32 copy of it for the last adapter, and what the layer's code still has names for.
    """
    if e == 4:
        return 0
    return (e + 4) * model.intermediate_size + (5 if _num_norms(model) > 2 else 4) * e * model.hidden_size


@dataclass(frozen=True)
class _Head:
    """Bytes of the final norm and of TRL's fused head in a step."""

    kept: int
    """What the norm and the head keep."""
    forward: int
    """Besides, in the forward pass."""
    backward: int
    """Besides, in the backward pass, without the weight's gradient."""


def _head(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, device: Literal["cpu", "cuda"], dtype: Dtype, num_tokens: int
) -> _Head:
    """TRL's head, which never makes all logits: it goes through them in tiles (trl/kernels/chunked_logprob.py).

    On CUDA the tile's buffer has all its columns also where the vocabulary is smaller; on a CPU what is not touched is
    not resident, but the statistics are torch operations on float32 copies of the tile.
    """
    h, e = model.hidden_size, BYTES[dtype]
    rows, columns = min(num_tokens, HEAD_TOKENS), min(model.vocab_size, HEAD_COLUMNS)
    tile = rows * (e * HEAD_COLUMNS if device == "cuda" else (e + 12) * columns)
    if not isinstance(adapter, FullAdapter):
        # A float32 input of the norm; what the head reads, in the compute type; the gradient in float32 and cast.
        out = e * h * num_tokens
        return _Head(4 * h * num_tokens + out, tile + out, tile + 4 * h * num_tokens + (out if e == 2 else 0))
    stream = 4 * h * num_tokens
    if e == 4:
        return _Head(3 * stream, tile + stream, tile + stream)
    # The backward pass casts a tile of the weight, and of what the head reads, while it still holds the last ones.
    more_rows = num_tokens > HEAD_TOKENS
    held = min(model.vocab_size - columns, HEAD_COLUMNS) if model.vocab_size > columns else columns * more_rows
    casts = e * h * (rows * (1 + more_rows) + columns)
    return _Head(3 * stream, tile + casts + stream, tile + casts + e * h * held + stream)


def _needs(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, layers: _Layers, head: _Head, *, accumulates: bool
) -> dict[Phase, _Need]:
    """What each phase up to the optimizer's step needs. A gradient that is added to another is there beside it."""
    trained = 4 * num_trainable_params(model, adapter)
    vocabulary = 4 * model.vocab_size * model.hidden_size if isinstance(adapter, FullAdapter) else 0
    tied = "lm_head.weight" not in model.tensors
    in_layers = trained - vocabulary * (1 if tied else 2)
    per_layer = in_layers // model.num_layers
    before = trained if accumulates else 0
    first = before or vocabulary + in_layers - per_layer
    # Gradients of a weight with two uses wait for each other and are summed into a third tensor.
    waiting = vocabulary if tied and accumulates else 0
    forward = _Need(before, layers.kept + layers.forward_only + layers.shared + head.kept, head.forward)
    if layers.passing > head.kept + head.forward:
        forward = _Need(before, layers.kept + layers.shared + layers.passing)
    needs: dict[Phase, _Need] = {
        "forward": forward,
        "head": _Need(before + vocabulary, layers.kept + layers.shared + head.kept, head.backward),
        "last layer": _Need(
            waiting + (before or vocabulary), layers.kept + layers.recomputed + layers.working + layers.shared
        ),
        "first layer": _Need(waiting + first, layers.first + layers.working + layers.shared),
    }
    if isinstance(adapter, FullAdapter):
        fresh = (2 if tied else 0) + (1 if accumulates else 0)
        needs["embedding"] = _Need(trained + fresh * vocabulary, 0 if tied else layers.stream)
    return needs
