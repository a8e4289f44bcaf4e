"""Bytes of what a run keeps from step to step: weights, adapters, gradients and the states of the optimizer.

Everything is counted tensor by tensor, as transformers, PEFT, bitsandbytes and the optimizers hold it; the tests build
the real ones and compare to the byte. Left out are buffers, tables of some KiB that a model computes with, and what a
CUDA allocator rounds up each tensor by (512 bytes).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tunekit.planner.facts import SCORE, ModelFacts, is_embedding, is_head, is_vision
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter
from tunekit.recipe.sections.train import Optim

Dtype = Literal["float32", "bfloat16", "float16"]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Shape = tuple[int, ...]

BLOCK_4BIT, BLOCK_8BIT = 64, 256
"""Values that share a constant in bitsandbytes: of 4-bit weights, and of 8-bit states and constants."""

CODE_4BIT_BYTES, CODE_8BIT_BYTES = 4 * 16, 4 * 256
"""Size of the float32 table of a quantised type's values."""

MIN_8BIT_VALUES = 4096
"""Smaller tensors keep float32 states in 8-bit optimizers (`min_8bit_size`)."""


@dataclass(frozen=True)
class _Kept:
    """States that an optimizer keeps of each tensor."""

    values: int
    """Values for each trained one."""
    bits: Literal[8, 32] = 32
    step: bool = False
    """True if the step is counted in a float32 tensor."""


_STATES: Mapping[Optim, _Kept] = {
    "adamw_torch": _Kept(2, step=True),
    "adamw_torch_fused": _Kept(2, step=True),
    "adagrad": _Kept(1, step=True),
    "rmsprop": _Kept(1, step=True),
    "sgd": _Kept(0),
    "ademamix": _Kept(3),
    "ademamix_8bit": _Kept(3, bits=8),
    "adamw_8bit": _Kept(2, bits=8),
    "adamw_bnb_8bit": _Kept(2, bits=8),
    "lion_32bit": _Kept(1),
    "lion_8bit": _Kept(1, bits=8),
    "paged_adamw_32bit": _Kept(2),
    "paged_adamw_8bit": _Kept(2, bits=8),
    "paged_ademamix_32bit": _Kept(3),
    "paged_ademamix_8bit": _Kept(3, bits=8),
    "paged_lion_32bit": _Kept(1),
    "paged_lion_8bit": _Kept(1, bits=8),
    "rmsprop_bnb": _Kept(1),
    "rmsprop_bnb_32bit": _Kept(1),
    "rmsprop_bnb_8bit": _Kept(1, bits=8),
}
"""Those of torch and bitsandbytes, as transformers makes them: SGD without momentum. Adafactor is a case of its own."""


def trained_whole(model: ModelFacts, adapter: LoraAdapter) -> list[str]:
    """Modules that are trained wholly beside an adapter; the score of a model that judges always is, as PEFT has it."""
    return [*(adapter.modules_to_save or []), *([SCORE.removesuffix(".weight")] if model.judges else [])]


def trained_tensors(model: ModelFacts, adapter: FullAdapter | LoraAdapter) -> dict[str, Shape]:
    """Shape of every tensor that is trained, by name.

    LoRA adds two of rank r to each adapted matrix (arXiv 2106.09685, section 4.1), DoRA a magnitude for each output
    besides (arXiv 2402.09353). PEFT adapts all experts of a layer by one pair, its rank r for each of them, or 2r where
    gate and up projection are one. Modules in `modules_to_save` are copied, and trained wholly
    instead.
    """
    tensors = dict(model.tensors)
    if isinstance(adapter, FullAdapter):
        return tensors
    whole = trained_whole(model, adapter)
    trained = model.tensors_in(whole) if whole else {}
    for name in model.adapter_linears(adapter.target_modules):
        if whole and not set(whole).isdisjoint(name.split(".")):
            continue
        *experts, outputs, inputs = tensors.get(name) or tensors[name + ".weight"]
        rank = adapter.rank * math.prod(experts) * (2 if experts and name.endswith("gate_up_proj") else 1)
        trained |= {name + ".lora_A": (rank, inputs), name + ".lora_B": (outputs, rank)}
        if adapter.use_dora:
            trained[name + ".lora_magnitude_vector"] = (outputs,)
    return trained


@dataclass(frozen=True)
class Tables:
    """Trained ones of the two large tables of a vocabulary."""

    embedding: bool
    head: bool
    """Also where it is the embedding."""
    is_one: bool
    """True if they are the same trained tensor. PEFT copies modules that it trains whole, so that nothing is tied to
    them."""

    @property
    def num(self) -> int:
        """Trained tables."""
        return 1 if self.is_one else self.embedding + self.head


def trained_tables(model: ModelFacts, adapter: FullAdapter | LoraAdapter) -> Tables:
    """Return which tables are trained: all, or those that are trained beside an adapter."""
    if isinstance(adapter, FullAdapter):
        return Tables(embedding=True, head=not model.judges, is_one=model.has_tied_head)
    names = model.tensors_in(adapter.modules_to_save) if adapter.modules_to_save else ()
    return Tables(any(map(is_embedding, names)), any(map(is_head, names)), is_one=False)


def unties_head(model: ModelFacts, adapter: FullAdapter | LoraAdapter) -> bool:
    """Return whether an embedding is trained beside an adapter while the head that shares it stays as it was."""
    return not isinstance(adapter, FullAdapter) and model.has_tied_head and trained_tables(model, adapter).embedding


def num_trainable_params(model: ModelFacts, adapter: FullAdapter | LoraAdapter) -> int:
    """Number of parameters that are trained."""
    if isinstance(adapter, FullAdapter):
        return model.num_params
    if not trained_whole(model, adapter):
        shapes = model.adapted(adapter.target_modules).shapes.items()
        magnitudes = sum(outputs * times for (outputs, _), times in shapes) if adapter.use_dora else 0
        return magnitudes + sum(adapter.rank * (outputs + inputs) * times for (outputs, inputs), times in shapes)
    return sum(math.prod(shape) for shape in trained_tensors(model, adapter).values())


def weights_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype) -> int:
    """Bytes of the model's own weights: in float32 where they are trained, else in `dtype`, or in 4 bits.

    Embeddings, norms, experts and head are not quantised.
    """
    if isinstance(adapter, FullAdapter):
        return 4 * model.num_params
    if not isinstance(adapter, QloraAdapter):
        return BYTES[dtype] * model.num_params
    return quantised_bytes(model, adapter) + BYTES[dtype] * (model.num_params - model.num_linear_params)


def quantised_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter) -> int:
    """Bytes of the weights that are kept in 4 bits."""
    if not isinstance(adapter, QloraAdapter):
        return 0
    return sum(
        times * _quantised_bytes(outputs * inputs, double=adapter.double_quant)
        for (outputs, inputs), times in model.all_linears.shapes.items()
    )


def _quantised_bytes(size: int, *, double: bool) -> int:
    """Bytes of a weight in 4 bits: half a byte a value, a constant for every 64 of them, and the table of the type.

    The constants are float32, or with double quantisation 8-bit values, which have a float32 constant for every 256 of
    them, their mean and a table of their own (arXiv 2305.14314, section 3).
    """
    constants = math.ceil(size / BLOCK_4BIT)
    packed = math.ceil(size / 2) + CODE_4BIT_BYTES
    if not double:
        return packed + 4 * constants
    return packed + constants + 4 * math.ceil(constants / BLOCK_8BIT) + 4 + CODE_8BIT_BYTES


def dequantised_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype) -> int:
    """Bytes of the largest 4-bit weight in the compute type, in which each one is for as long as it is used."""
    if not isinstance(adapter, QloraAdapter):
        return 0
    return BYTES[dtype] * max(outputs * inputs for outputs, inputs in model.all_linears.shapes)


def trained_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter, optim: Optim) -> tuple[int, int]:
    """Bytes of what is trained besides the model's own weights, and of the optimizer's states; counted once of each."""
    key = (repr(adapter), optim)
    if key not in model.trained_bytes:
        tensors = trained_tensors(model, adapter)
        model.trained_bytes[key] = adapters_bytes(tensors, adapter), states_bytes(tensors, optim)
    return model.trained_bytes[key]


def adapters_bytes(trained: Mapping[str, Shape], adapter: FullAdapter | LoraAdapter) -> int:
    """Bytes of what is trained besides the model's own weights, in float32."""
    return 0 if isinstance(adapter, FullAdapter) else sum(4 * math.prod(shape) for shape in trained.values())


def gradients_bytes(trained: Mapping[str, Shape]) -> int:
    """Bytes of all gradients, in float32."""
    return sum(4 * math.prod(shape) for name, shape in trained.items() if gets_gradient(name))


def gets_gradient(name: str) -> bool:
    """Return whether a trained tensor is updated: text gives a vision tower no gradients."""
    return not is_vision(name)


def states_bytes(trained: Mapping[str, Shape], optim: Optim) -> int:
    """Bytes of an optimizer's states for what is trained, after its first step.

    8-bit states carry a float32 constant for every 256 values (arXiv 2110.02861), and share a table for signed and one
    for unsigned values. Embeddings keep float32 states (transformers asks bitsandbytes for it), and so does what is
    small.
    """
    tensors = {name: shape for name, shape in trained.items() if gets_gradient(name)}
    if optim == "adafactor":
        return sum(_factored_bytes(shape) for shape in tensors.values())
    states = _STATES[optim]
    total, quantised = 0, False
    for name, shape in tensors.items():
        size = math.prod(shape)
        if states.bits == 8 and size >= MIN_8BIT_VALUES and not is_embedding(name):
            total += states.values * (size + 4 * math.ceil(size / BLOCK_8BIT))
            quantised = True
        else:
            total += 4 * states.values * size + (4 if states.step else 0)
    return total + (min(states.values, 2) * CODE_8BIT_BYTES if quantised else 0)


def _factored_bytes(shape: Shape) -> int:
    """Bytes that Adafactor keeps: of a matrix its rows and columns (arXiv 1804.04235), and the weight's size."""
    if len(shape) < 2:
        return 4 * math.prod(shape) + 4
    *leading, rows, columns = shape
    return 4 * math.prod(leading) * (rows + columns) + 4


_LARGE = {"": (4096, 4096)}

OPTIMIZER_BYTES: Mapping[Optim, float] = {
    optim: round(states_bytes(_LARGE, optim) / 4096**2, 3) for optim in (*_STATES, "adafactor")
}
"""Optimizer state bytes per trained parameter of a large matrix, rounded: for how much an update moves."""
