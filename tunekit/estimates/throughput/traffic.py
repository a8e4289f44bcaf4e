"""Memory that a device moves while it computes a micro-batch.

Products of matrices run on tensor cores; what lies between them, such as norms, activations and residual sums, only
goes through memory, and so do weights. On a device with many operations for each byte of its memory this is much of the
time, on small models more than on large ones, and with few tokens more than with many.

Each product reads its inputs and writes its outputs, and operations between products read and write them again: bytes
here are those of inputs and outputs, once. How often they are moved stands in `tunekit.estimates.throughput.step`. A
backward pass moves as many for the gradients of inputs, and as many again for those of weights.
"""

from dataclasses import dataclass

from tunekit.estimates.facts import ModelFacts
from tunekit.estimates.memory.states import BYTES, Dtype, num_quantised, num_trainable_params
from tunekit.recipe.sections.adapters import Adapter, FullAdapter, QloraAdapter

DEQUANTISED_BYTES = 0.5 + 2
"""Read in 4 bits and written in 16."""


LAYER_KERNELS = 30
"""Kernels of a layer's forward pass in transformers, in eager code: Llama's two norms of seven, rotary embeddings of
ten, and the rest. Kernels that fuse some of them take as long to launch, from Python."""

ADAPTER_KERNELS = 8
"""Those of an adapter: a dropout, casts, two products, a scale and a sum."""

DEQUANTISING_KERNELS = 4
"""Those that make a weight of a 4-bit one, whose scales are quantised too."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that go through memory, in all passes of a micro-batch.

    Attributes:
        layers: For each token, of products of the model: inputs and outputs, once.
        weights: Weights and gradients that products read and write, once a micro-batch.
        dequantised: Of weights that are made of 4-bit ones, once a micro-batch.
    """

    layers: float = 0.0
    weights: float = 0.0
    dequantised: float = 0.0


def traffic_of(
    model: ModelFacts, adapter: Adapter, dtype: Dtype, trained_dtype: Dtype, *, gradient_checkpointing: bool
) -> Traffic:
    """Return the bytes that go through memory in a micro-batch of training.

    Args:
        model: A model whose operations are counted.
        adapter: What is trained.
        dtype: Type of the products.
        trained_dtype: Type in which gradients are summed.
        gradient_checkpointing: Whether layers are computed again.
    """
    e, h = BYTES[dtype], model.hidden_size
    forwards = 2 if gradient_checkpointing else 1
    sizes = float(sum(outputs + inputs for outputs, inputs in model.linears.values()))
    num_params = float(model.num_linear_params)
    if model.mixture is not None:
        mixture = model.mixture
        sizes += mixture.num_layers * mixture.per_token * 3 * (h + mixture.inner)
        num_params += mixture.num_layers * sum(mixture.expert_params(h))
    head = model.vocab_size * h
    if isinstance(adapter, FullAdapter):
        # Each gradient is written, and added to what is summed.
        gradients, backwards = (2.0 * e + 2 * BYTES[trained_dtype]) * num_trainable_params(model, adapter), 2
    else:
        gradients, backwards = 0.0, 1
    return Traffic(
        layers=e * ((forwards + backwards) * sizes + (1 + backwards) * (model.vocab_size + h)),
        weights=e * ((forwards + 1) * num_params + 2 * head) + gradients,
        dequantised=DEQUANTISED_BYTES * (forwards + 1) * num_quantised(model)
        if isinstance(adapter, QloraAdapter)
        else 0.0,
    )


def launched_passes(model: ModelFacts, adapter: Adapter, *, gradient_checkpointing: bool) -> float:
    """Return the kernels that a micro-batch launches for a layer, in forward passes of one without adapters.

    A backward pass launches half as many again as a forward pass.
    """
    per_layer = 1 / model.num_layers
    kernels = float(LAYER_KERNELS)
    if not isinstance(adapter, FullAdapter):
        kernels += ADAPTER_KERNELS * len(model.adapter_linears(adapter)) * per_layer
    if isinstance(adapter, QloraAdapter):
        kernels += DEQUANTISING_KERNELS * len(model.linears) * per_layer
    return ((2 if gradient_checkpointing else 1) + 1.5) * kernels / LAYER_KERNELS
