"""Checkpoints that are published quantized, and how transformers reads each.

Below an adapter on few bits, weights in bitsandbytes' 4 bits, GPTQ, AWQ, LLM.int8() and gpt-oss' MXFP4 stay as they are
published. All else makes them dense as they are read, one after the other: MXFP4, DeepSeek's float8 and
compressed-tensors by transformers itself, the others by `PackedQuantizer`, which no package of their own is needed for.

Kept weights of GPTQ, AWQ and LLM.int8() are tensors of a linear layer that transformers and PEFT know. Their values are
those of the packages that publish them; activations are not quantized.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import (
    FineGrainedFP8Config,
    Mxfp4Config,
    QuantizationConfigMixin,
)

from tunekit.errors import ModelError
from tunekit.estimates.models.published import method_of
from tunekit.models.packed import Awq, Gptq, Packed, Rows
from tunekit.models.quantization import KEPT, Stack, dequantized, quantization_config
from tunekit.recipe.sections.adapters import QloraAdapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PACKED = "tunekit_packed"
"""Quantization method under which transformers knows `PackedQuantizer`."""

_STORED = {
    "bitsandbytes": [
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"),
    ],
    "bitsandbytes_8bit": ["weight", "SCB", "weight_format"],
    "gptq": ["qweight", "qzeros", "scales", "g_idx"],
    "awq": ["qweight", "qzeros", "scales"],
    "fbgemm_fp8": ["weight", "weight_scale", "input_scale_ub"],
}
"""Last names of the tensors that a weight is stored as, by method."""

_OUT_OF_ORDER = "tunekit_out_of_order"
"""Attribute of a model that names a weight while it is read: transformers copies the operations that read it."""


@register_quantization_config(PACKED)
class PackedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Quantization of a checkpoint that `PackedQuantizer` reads.

    Args:
        stated: The `quantization_config` of its config.json.
        dequantize: True to make its weights dense.
    """

    def __init__(self, stated: dict[str, Any], dequantize: bool = False, **_: Any) -> None:
        self.quant_method, self.stated, self.dequantize = PACKED, stated, dequantize


@register_quantizer(PACKED)
class PackedQuantizer(HfQuantizer):  # type: ignore[misc]
    """Quantizer that leaves a model its linear layers, and gives them weights as they are published or dense ones."""

    is_trainable = True

    def __init__(self, quantization_config: PackedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.method = method_of({"quantization_config": quantization_config.stated})
        self.serialized_names = {"weight": _STORED[str(self.method)]}

    def is_serializable(self) -> bool:
        """Return that the model is not saved, only what is trained beside it."""
        return False

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> "PreTrainedModel":
        if (name := vars(model).pop(_OUT_OF_ORDER, None)) is not None:
            problem = f"the groups of {name} are out of order, and its config.json has desc_act: false"
            raise ModelError(f"model.path: {problem}", hint="use another copy of the model")
        return model

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        """Return what makes a weight of the tensors of a file."""
        return {"deserialize": _Read, "dequantize": _Read}


class _Read(ConversionOps):  # type: ignore[misc]
    """Operation that makes the weight of a module of the tensors that a file has of it."""

    def __init__(self, hf_quantizer: PackedQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str | None = None, **_: Any
    ) -> dict[str, Tensor]:
        assert full_layer_name is not None
        parts = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        parameter, config = model.get_parameter(full_layer_name), self.hf_quantizer.quantization_config
        dtype = parameter.dtype
        if set(parts) == {"weight"}:
            return {full_layer_name: parts["weight"].to(dtype)}
        if any(part.is_meta for part in parts.values()):
            # Of a process that is given its part of the weights, which are dense then.
            return {full_layer_name: torch.empty_like(parameter, device="meta")}
        method = str(self.hf_quantizer.method)
        if method == "bitsandbytes":
            return {full_layer_name: _dense_4bit(parts, dtype)}
        packed = _packed(parts, method, config.stated, dtype)
        if isinstance(packed, Gptq) and packed.g_idx is None and not _is_in_order(parts["g_idx"], packed.group_size):
            vars(model)[_OUT_OF_ORDER] = full_layer_name
        if config.dequantize:
            return {full_layer_name: packed.dense()}
        return {full_layer_name: nn.Parameter(Stack(packed), requires_grad=False)}


def _dense_4bit(parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the values of a weight that bitsandbytes has stored in 4 bits."""
    packed = parts["weight"]
    others = {name.removeprefix("weight."): value for name, value in parts.items() if name != "weight"}
    state = QuantState.from_dict(others, device=packed.device)
    state.dtype = dtype
    return dequantized(packed, state)


def _packed(parts: dict[str, Tensor], method: str, stated: dict[str, Any], dtype: torch.dtype) -> Packed:
    """Return a weight as it is stored."""
    if method in ("bitsandbytes_8bit", "fbgemm_fp8"):
        scales = parts["SCB"].float() / 127 if method == "bitsandbytes_8bit" else parts["weight_scale"].float()
        return Rows(dtype, parts["weight"], scales.view(-1))
    words, bits = (parts["qweight"], parts["qzeros"], parts["scales"]), int(stated.get("bits") or 4)
    size = int(stated["group_size"])
    if method == "awq":
        return Awq(dtype, *words, bits, size if size > 0 else len(words[0]))
    inputs = len(words[0]) * (32 // bits)
    size = size if size > 0 else inputs
    order = parts["g_idx"] if stated.get("desc_act") else None
    return Gptq(dtype, *words, bits, size, order, 0 if stated.get("checkpoint_format") == "gptq_v2" else 1)


def _is_in_order(groups: Tensor, size: int) -> bool:
    """Return whether the inputs of a matrix are in the order of their groups."""
    return torch.equal(groups.long(), torch.arange(len(groups), device=groups.device) // size)


def how_to_read(
    config: "PretrainedConfig", adapter: QloraAdapter | None, dtype: torch.dtype
) -> QuantizationConfigMixin | None:
    """Return how transformers reads the weights of a model.

    Args:
        config: The model's configuration, which is changed where it states how its weights are quantized.
        adapter: The section that asks for weights in few bits, or None.
        dtype: Type of the products.
    """
    stated = vars(config).get("quantization_config")
    if stated is None:
        return None if adapter is None else quantization_config(adapter, dtype)
    method = method_of({"quantization_config": stated})
    if method == "bitsandbytes" and adapter is not None:
        # A file states the type of the products too, which is the plan's to decide.
        config.quantization_config = {**stated, "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch.")}
        return None
    if method == "mxfp4" and adapter is not None:
        config.quantization_config = {**stated, "quant_method": KEPT}
        return None
    if method in _STORED:
        config.quantization_config = {"quant_method": PACKED, "stated": stated, "dequantize": adapter is None}
        return None
    if method == "compressed-tensors":
        config.quantization_config = {**stated, "dequantize": True}
        return None
    dense = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}.get(str(method))
    return None if dense is None else cast(QuantizationConfigMixin, dense(dequantize=True))
