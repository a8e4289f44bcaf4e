"""Quantization-aware training by torchao: linear layers that round in training, and the quantized model they are for.

A layer rounds its weight, and its input where that is asked for, to the values that a type of few bits has, and
computes with these in the type of the products. The gradient of a rounded value is that of the value (straight-through
estimator, arXiv 1308.3432). What is trained and saved are the unrounded weights; quantized by the same rule they give
the logits of training. A LoRA adapter is trained on rounded layers and is not rounded itself, as in QAT with LoRA of
torchtune: it belongs on the base model quantized by the same rule.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)
from torchao.quantization.qat import FakeQuantizedLinear, QATConfig
from transformers import TorchAoConfig

from tunekit.recipe.sections.section import QatSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def torchao_config(qat: QatSection) -> Any:
    """Return torchao's configuration of a quantized model."""
    dtype = getattr(torch, qat.weight_dtype)
    granularity = PerAxis(0) if qat.group_size is None else PerGroup(qat.group_size)
    if qat.activation_dtype is None:
        return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)
    return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)


def to_fake_quantized(model: "PreTrainedModel", qat: QatSection) -> int:
    """Have linear layers round what they compute with, but for the head, and return how many do.

    It is to be done before the model is divided, and before adapters are attached, which stay unrounded.
    """
    head = model.get_output_embeddings()
    quantize_(
        model,
        QATConfig(torchao_config(qat), step="prepare"),
        filter_fn=lambda module, _: isinstance(module, nn.Linear) and module is not head,
    )
    return sum(isinstance(module, FakeQuantizedLinear) for module in model.modules())


def export_config(qat: QatSection) -> TorchAoConfig:
    """Return how transformers quantizes the trained weights as it reads them; it leaves the head alone, too."""
    return TorchAoConfig(torchao_config(qat))
