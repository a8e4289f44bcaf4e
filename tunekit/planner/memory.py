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

from tunekit.planner.activations import Head, Layers, head_of, layers_of
from tunekit.planner.facts import Facts, ModelFacts
from tunekit.planner.layout import Layout
from tunekit.planner.states import (
    Dtype,
    adapters_bytes,
    dequantised_bytes,
    gradients_bytes,
    states_bytes,
    trained_tensors,
    weights_bytes,
)
from tunekit.recipe.schema import FullAdapter, LoraAdapter, Optim

CONTEXT_BYTES = {"cpu": 900 * 2**20, "cuda": 1400 * 2**20}
"""What a process holds besides these parts. On a CPU: the libraries, the tokenised rows and what the allocator keeps,
0.5 GiB resident after the imports and 0.8 GiB at the end of a small run (torch 2.13, transformers 5.23). On CUDA: the
context with its libraries, an upper bound of published figures (0.5 to 1.4 GB)."""

FOREACH: frozenset[Optim] = frozenset({"adamw_torch"})
"""Optimizers that take all parameters at once on CUDA, with a temporary value for each (torch.optim, `foreach`)."""

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


Part = Literal[
    "weights",
    "adapters",
    "masters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "reference",
    "kv cache",
    "context",
    "reserve",
]
"""What memory is for. `masters`: float32 copies of weights that are computed with in 16 bits; `gathered`: weights and
gradients of layers that are there whole, or out of their 4 bits, for a moment, and buffers for it; `context`: what the
process holds besides tensors, libraries or the CUDA context; `reserve`: what the allocator takes and no tensor uses."""

Confidence = Literal["traced", "closed form", "outside the model"]
"""How far an estimate can be trusted: formulas compared with a trace of the real modules, formulas that were not, or
formulas of another kind of model for want of its own."""

RESERVE_SHARE = {"cpu": 0.0, "cuda": 0.03}
"""What the allocator holds beyond the tensors, as a share of them, where no recorded run says better: the lower end of
the published 3 to 8 % with expandable segments; the rest is left by `MEMORY_SHARE`."""


class MemoryEstimate(Facts):
    """Bytes on each device at the peak of a step, by part."""

    parts: Mapping[Part, int]
    """Bytes at the peak by part, those that there are."""
    phase: Phase
    """Where the peak is."""
    phases: Mapping[Phase, int]
    """Bytes of tensors at the peak of each phase."""
    host_bytes: int = 0
    """Main memory of each node that is needed for what the devices do not hold."""
    nvme_bytes: int = 0
    """Disk of each node that is needed for it."""
    confidence: Confidence = "traced"

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors at the peak: what torch calls allocated."""
        return self.phases[self.phase]

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def peak_words(self) -> str:
        """Where the peak is, in words."""
        return f"peak {PHASE_WORDS[self.phase]}"


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
    layout: Layout,
    reserve_share: float,
) -> MemoryEstimate:
    """Memory of one training step on each device.

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
        layout: How the run is spread over devices.
        reserve_share: What the allocator holds beyond the tensors, as a share of them.
    """
    trained = trained_tensors(model, adapter)
    gradients, states = gradients_bytes(trained), states_bytes(trained, optim)
    weights, adapters = weights_bytes(model, adapter, dtype), adapters_bytes(trained, adapter)
    layers = layers_of(
        model,
        adapter,
        dtype,
        num_tokens,
        mask_length,
        sliding_mask_length,
        gradient_checkpointing=gradient_checkpointing,
        accumulates=accumulates,
    )
    head = head_of(model, adapter, device, dtype, num_tokens)
    needs = _needs(model, adapter, gradients, layers, head, accumulates=accumulates)
    copied = gradients if optim in FOREACH and device == "cuda" else 0
    needs["optimizer"] = _Need(gradients=gradients + copied)
    shards = layout.num_shards
    weights, adapters, states = weights // shards, adapters // shards, states // shards
    gathered = 0 if shards == 1 else 8 * model.num_params // model.num_layers + 4 * model.vocab_size * model.hidden_size
    gathered += dequantised_bytes(model, adapter, dtype)
    phases = {
        phase: weights + adapters + states + gathered + need.gradients // shards + need.activations + need.logits
        for phase, need in needs.items()
    }
    phase = max(phases, key=phases.__getitem__)
    peak = needs[phase]
    parts: dict[Part, int] = {
        "weights": weights,
        "adapters": adapters,
        "gradients": peak.gradients // shards,
        "optimizer": states,
        "activations": peak.activations,
        "logits": peak.logits,
        "gathered": gathered,
        "context": CONTEXT_BYTES[device],
        "reserve": int(reserve_share * phases[phase]),
    }
    return MemoryEstimate(parts={part: size for part, size in parts.items() if size}, phase=phase, phases=phases)


@dataclass(frozen=True)
class _Need:
    """Bytes that a phase needs besides weights and optimizer states."""

    gradients: int = 0
    activations: int = 0
    logits: int = 0


def _needs(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    trained: int,
    layers: Layers,
    head: Head,
    *,
    accumulates: bool,
) -> dict[Phase, _Need]:
    """What each phase up to the optimizer's step needs, where `trained` is the size of all gradients.

    A gradient that is added to another is there beside it.
    """
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
