"""Bytes of what a run keeps from step to step: weights, adapters and the states of the optimizer."""

from typing import Literal

from tunekit.planner.facts import ModelFacts
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


def num_trainable_params(model: ModelFacts, adapter: FullAdapter | LoraAdapter) -> int:
    """Number of parameters that are trained.

    LoRA adds r x (in + out) per linear layer (arXiv 2106.09685, section 4.1), DoRA one magnitude per output besides
    (arXiv 2402.09353). Modules in `modules_to_save` are trained wholly.
    """
    if isinstance(adapter, FullAdapter):
        return model.num_params
    linears = model.adapter_shapes(adapter.target_modules).items()
    trained = sum(adapter.rank * (outputs + inputs) * times for (outputs, inputs), times in linears)
    if adapter.use_dora:
        trained += sum(outputs * times for (outputs, _), times in linears)
    return trained + (model.num_params_in(adapter.modules_to_save) if adapter.modules_to_save else 0)


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
    rest = BYTES[dtype] * (model.num_params - model.num_linear_params)
    return quantised_bytes(model, adapter, dtype) + rest + trained


def quantised_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype) -> int:
    """Bytes of the weights that are 4-bit: as they are stored, and of the largest as it is computed with."""
    if not isinstance(adapter, QloraAdapter):
        return 0
    constants = 1 / 64 + 4 / (64 * 256) if adapter.double_quant else 4 / 64
    largest = max(outputs * inputs for outputs, inputs in model.linears.values())
    return int(model.num_linear_params * (0.5 + constants)) + BYTES[dtype] * largest
