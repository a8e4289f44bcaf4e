"""Bytes that a training step needs on one device, by part.

Closed forms for Llama-like decoders. The activation counts are exact for Hugging Face's modules with SDPA: they equal
the bytes that autograd saves, which the tests measure. Where an architecture differs they are an estimate.

Symbols: h hidden size, i intermediate size, q = heads x head size, kv = key-value heads x head size, e bytes of the
compute type, T tokens of a micro-batch.
"""

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

HEAD_TOKENS, HEAD_COLUMNS = 4096, 32768
"""Largest tile in which TRL's fused head computes logits: tokens x vocabulary entries."""


class MemoryEstimate(Facts):
    """Bytes on one device at the peak of a step, by part."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    fixed_bytes: int
    """What the process holds besides tensors: libraries, or the CUDA context."""

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.fixed_bytes
        )


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
    attention = 2 * e * q + 2 * e * kv + 4 * n
    mlp = 4 * e * i
    mask = 0 if mask_length is None else e * (2 * (q - kv) + mask_length)
    if isinstance(adapter, FullAdapter):
        # Under autocast the residual stream is float32 and each norm keeps a cast copy besides.
        norms = 24 * h if e == 4 else 26 * h
        return norms + attention + mlp + mask + 8
    norms = 16 * h if e == 4 else 12 * h
    lora = 7 * e * adapter.rank
    # Float32 adapters under autocast read float32 copies of their inputs.
    casts = 0 if e == 4 else 6 * h + 2 * q
    return norms + attention + mlp + lora + casts + mask + 8


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
    gradient_checkpointing: bool,
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
        gradient_checkpointing: Whether only layer inputs are kept, and one layer is recomputed at a time.
    """
    trained = num_trainable_params(model, adapter)
    layer = activation_bytes_per_layer(model, adapter, dtype, mask_length=mask_length) * num_tokens
    casts = cast_weights_bytes(model, adapter, dtype)
    full = isinstance(adapter, FullAdapter)
    residual = 4 if full else BYTES[dtype]
    if gradient_checkpointing:
        kept = model.num_layers * residual * model.hidden_size * num_tokens
        activations = kept + layer + casts // model.num_layers
    else:
        activations = model.num_layers * layer + casts
    # Gradients of the layer that the backward pass is in: of the MLP's intermediates and the residual stream.
    activations += num_tokens * BYTES[dtype] * (3 * model.intermediate_size + 2 * model.hidden_size)
    tile = min(num_tokens, HEAD_TOKENS) * min(model.vocab_size, HEAD_COLUMNS)
    # One tile in the compute type; off CUDA its statistics are torch operations on float32 copies of it.
    logits = tile * (BYTES[dtype] + (0 if device == "cuda" else 12)) + 4 * model.hidden_size * num_tokens
    if full:
        logits += 4 * model.vocab_size * model.hidden_size
    return MemoryEstimate(
        weights_bytes=weights_bytes(model, adapter, dtype),
        gradients_bytes=4 * trained,
        optimizer_bytes=int(OPTIMIZER_BYTES[optim] * trained),
        activations_bytes=activations,
        logits_bytes=logits,
        fixed_bytes=FIXED_BYTES[device],
    )
