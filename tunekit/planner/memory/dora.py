"""Bytes of DoRA (arXiv 2402.09353) as PEFT computes it: beside each product its norm, and so the whole update.

In each forward pass PEFT multiplies an identity matrix by both matrices of the adapter, adds the update to the weight
and takes the norm of each row. Under autocast all of that is float32. The magnitude is learned from the base layer's
output and from the adapter's, so both are kept; with dropout they are computed from what it lets through, by a copy of
the weight.

`e` is the number of bytes of the compute type.
"""

from dataclasses import dataclass

from tunekit.planner.facts import ModelFacts, is_vision
from tunekit.recipe.sections.adapters import LoraAdapter


@dataclass(frozen=True)
class Dora:
    """Bytes of the layers of a model with such adapters, besides those of plain ones."""

    kept: int
    """Bytes per token that a layer keeps."""
    copies: int
    """Bytes of weights that a layer keeps."""
    norming: int
    """Most bytes of weights while the norm of one is computed: of the last in a layer, where it has an adapter."""
    applying: int
    """Bytes of weights that are there still when its result is used."""


def dora_of(model: ModelFacts, adapter: LoraAdapter, e: int, *, casted: bool, last: str) -> Dora:
    """Return these bytes; `last` names the last linear layer of a decoder layer."""
    adapted = model.adapter_linears(adapter.target_modules)
    linears = {name: sizes for name, sizes in adapted.items() if not is_vision(name)}
    outputs = sum(outputs for outputs, _ in linears.values()) // model.num_layers
    params = sum(outputs * inputs for outputs, inputs in linears.values()) // model.num_layers
    lasts = {sizes for name, sizes in linears.items() if name.endswith(last)}
    moments = (_moments(*sizes, e, casted=casted) for sizes in lasts or set(linears.values()))
    norming, applying = max(moments, default=(0, 0))
    copies = e * params if casted and adapter.dropout else 0
    return Dora(2 * e * outputs, copies, norming, applying)


def _moments(outputs: int, inputs: int, e: int, *, casted: bool) -> tuple[int, int]:
    """Bytes around a weight when its norm is computed, and when the result is used.

    The identity matrix in the compute type is kept with the update until its layer has been computed. Under autocast
    weight and update are float32, and the scaled update and the sum too; else the weight is what it was.
    """
    weight, identity = outputs * inputs, e * inputs**2
    if casted:
        # Before: both identity matrices, and the update in the compute type.
        return max(16 * weight + identity, 4 * inputs**2 + identity + e * weight), 8 * weight + identity
    return 3 * e * weight + identity, e * weight + identity
