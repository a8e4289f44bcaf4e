"""Weights in 4 bits: linear layers as bitsandbytes has them, and the experts of a layer as one stack of matrices. In 8
bits, linear layers with a scale for each output.

In transformers 5 the experts of a layer are parameters of three dimensions and no linear layers, so that bitsandbytes
leaves them as they are, and they are nine tenths of such a model. Here they are quantized as they are read, expert
after expert along the stack, in blocks of 64 values as every other weight (arXiv 2305.14314).

A stack is a tensor of the shape and type that it had. Whatever is computed with it sees its values; what autograd keeps
of it is the tensor itself, and so nothing of the size of the values lasts beyond the product that needs them.
"""

from copy import copy
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from bitsandbytes import matmul_4bit
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from peft.tuners.lora import dora
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.utils._pytree import tree_map
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.integrations.mxfp4 import FP4_VALUES, Mxfp4Dequantize
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import Mxfp4Config, QuantizationConfigMixin, QuantizationMethod

from tunekit.estimates.models.model_config import read_past_of
from tunekit.models.packed import Packed, Rows
from tunekit.recipe.sections.adapters import QloraAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_SIZE = 64
"""Values of a weight in 4 bits that share a scale, as transformers has bitsandbytes quantize it."""

SHARDED = "sharded_stacks"
"""Name of the attribute by which a module of experts has the stacks whose bytes are parameters that FSDP2 shards."""

METHOD, KEPT, INT8 = "tunekit_4bit", "tunekit_mxfp4", "tunekit_int8"
"""Quantization methods under which transformers knows `ExpertsQuantizer`, `KeptQuantizer` and `Int8Quantizer`."""


@dataclass(frozen=True)
class Nf4:
    """Tensor that bitsandbytes has quantized to 4 bits, NF4 or FP4.

    Attributes:
        packed: Indices, two a byte.
        state: Scales, shape and type of the values.
    """

    packed: Tensor
    state: QuantState

    @classmethod
    def of(cls, values: Tensor, *, double_quant: bool, quant_type: str) -> "Nf4":
        """Quantize values."""
        how = {"compress_statistics": double_quant, "quant_type": quant_type}
        return cls(*quantize_4bit(values.contiguous(), blocksize=BLOCK_SIZE, **how))

    @property
    def like(self) -> Tensor:
        """A tensor without storage of the values' shape and type."""
        return torch.empty(self.state.shape, dtype=self.state.dtype, device="meta")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored."""
        return self.packed, *scales_of(self.state)

    def dense(self) -> Tensor:
        """Return the values."""
        return dequantized(self.packed, self.state)

    def with_bytes(self, packed: Tensor) -> "Nf4":
        """Return matrices with these scales."""
        return Nf4(packed, self.state)

    def to(self, device: torch.device) -> "Nf4":
        """Return a copy on a device."""
        state = copy(self.state)
        if state.nested:
            state.state2 = copy(state.state2)
        state.to(device)
        return Nf4(self.packed.to(device), state)

    def requantized(self, values: Tensor) -> "Nf4":
        """Return other values, quantized as these are."""
        return self.of(values, double_quant=self.state.nested, quant_type=self.state.quant_type)


@dataclass(frozen=True)
class Mxfp4:
    """Matrices in MXFP4, as gpt-oss is published: values of 4 bits with a power of two for each 32 of a row.

    Attributes:
        blocks: Two values a byte, (experts, rows, columns / 32, 16).
        scales: Exponents with a bias of 127, (experts, rows, columns / 32).
        dtype: Type of the values.

    Source: OCP Microscaling Formats (MX) 1.0; transformers 5.24, integrations/mxfp4.py.
    """

    blocks: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def like(self) -> Tensor:
        """A tensor without storage of the values' shape and type."""
        *sizes, groups, width = self.blocks.shape
        return torch.empty(*sizes, 2 * groups * width, dtype=self.dtype, device="meta")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored."""
        return self.blocks, self.scales

    def dense(self) -> Tensor:
        """Return the values. They are exact in any type that has four bits for them and eight for the exponent."""
        values = torch.empty(self.like.shape, dtype=self.dtype, device=self.blocks.device)
        low = torch.tensor(FP4_VALUES, dtype=self.dtype, device=self.blocks.device)
        # Both values of each byte, the lower half first.
        pairs = torch.stack((low.repeat(16), low.repeat_interleave(16)), dim=-1)
        for out, blocks, scales in zip(values, self.blocks, self.scales, strict=True):
            exponents = scales.int().unsqueeze(-1) - 127
            torch.ldexp(pairs[blocks.int()].flatten(-2), exponents, out=out.view(*scales.shape, -1))
        return values

    def with_bytes(self, packed: Tensor) -> "Mxfp4":
        """Return matrices with these scales."""
        return Mxfp4(packed.view(self.blocks.shape), self.scales, self.dtype)

    def to(self, device: torch.device) -> "Mxfp4":
        """Return a copy on a device."""
        return Mxfp4(self.blocks.to(device), self.scales.to(device), self.dtype)

    def requantized(self, values: Tensor) -> "Mxfp4":
        """Refuse other values.

        Raises:
            TypeError: Always: nothing is written in this type.
        """
        raise TypeError("weights in MXFP4 cannot be changed")


class Stack(Tensor):
    """Frozen matrices in few bits, of shape (experts, rows, columns), or one of a linear layer, (rows, columns).

    Operations that only look at it from another side (`detach`, `transpose`) give a stack, all others compute with its
    values, which are made for that operation alone.

    Attributes:
        matrices: How the matrices are stored.
        is_transposed: True if rows and columns are exchanged.
    """

    matrices: Nf4 | Mxfp4 | Packed
    is_transposed: bool

    @staticmethod
    def __new__(cls: type[Self], matrices: Nf4 | Mxfp4 | Packed, *, is_transposed: bool = False) -> "Stack":
        """Make a stack of what is stored."""
        like = matrices.like.transpose(-2, -1) if is_transposed else matrices.like
        device = matrices.tensors[0].device
        stack: Stack = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )
        stack.matrices, stack.is_transposed = matrices, is_transposed
        return stack

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Describe it without its values."""
        kind = type(self.matrices).__name__
        return f"Stack({kind}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def dense(self) -> Tensor:
        """Return the matrices with their values written out."""
        return self.matrices.dense().transpose(-2, -1) if self.is_transposed else self.matrices.dense()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch."""
        aten = torch.ops.aten
        first, kwargs = args[0], kwargs or {}
        if func is aten.detach.default:
            return first.seen()
        if func is aten.t.default and isinstance(first, Stack):
            return first.seen(turned=True)
        if func is aten.transpose.int and {first.dim() - 1 - dim % first.dim() for dim in args[1:]} == {0, 1}:
            return first.seen(turned=True)
        if func is aten._to_copy.default and kwargs.get("dtype", first.dtype) == first.dtype:
            matrices = first.matrices.to(kwargs.get("device") or first.device)
            return Stack(matrices, is_transposed=first.is_transposed)
        if func is aten.set_.source_Tensor and isinstance(args[1], Stack):
            # PEFT puts the tensor that a module had back into its place.
            first.matrices, first.is_transposed = args[1].matrices, args[1].is_transposed
            return first
        if func._schema.is_mutable and isinstance(first, Stack):
            if func is not aten.add_.Tensor:
                raise TypeError(f"{func} would change quantized weights in place")
            values = first.dense().add_(*map(_values, args[1:]), **kwargs)
            first.matrices = first.matrices.requantized(values.transpose(-2, -1) if first.is_transposed else values)
            return first
        args, kwargs = tree_map(_values, (args, kwargs))
        return func(*args, **kwargs)

    def with_bytes(self, packed: Tensor) -> "Stack":
        """Return a stack of other bytes with the scales of this one."""
        return Stack(self.matrices.with_bytes(packed), is_transposed=self.is_transposed)

    def seen(self, *, turned: bool = False) -> "Stack":
        """Return the same stack as another tensor, its rows and columns exchanged if `turned`."""
        return Stack(self.matrices, is_transposed=self.is_transposed != turned)


def _values(value: Any) -> Any:
    return value.dense() if isinstance(value, Stack) else value


def expert_stacks(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's parameters that are matrices of all experts of a layer; none for other modules.

    They are known by what `transformers.integrations.moe.use_experts_implementation` gives a module of experts.
    """
    if "is_transposed" not in vars(module) or "has_gate" not in vars(module):
        return ()
    sharded = vars(module).get(SHARDED, {})
    named = module.named_parameters(recurse=False)
    return tuple(name for name, parameter in named if parameter.dim() == 3 or name in sharded)


def stored_tensors(parameter: Tensor) -> tuple[Tensor, ...]:
    """Return what a parameter is stored as: itself, or the values and scales of one in 4 bits."""
    if isinstance(parameter, Stack):
        return parameter.matrices.tensors
    state = vars(parameter).get("quant_state")
    return (parameter,) if state is None else (parameter, *scales_of(state))


def scales_of(state: QuantState) -> tuple[Tensor, ...]:
    """Return what belongs to a tensor in 4 bits besides its values."""
    nested = (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()
    return state.absmax, state.code, *nested


def _biased_score(model: "PreTrainedModel") -> list[str]:
    """Return the name of a score with biases, which transformers would leave out by the last weight of a model."""
    last = list(model.named_parameters())[-1][0]
    has_one = model.get_output_embeddings() is None and last.endswith(".bias")
    return [last.removesuffix(".bias")] if has_one else []


@register_quantizer(METHOD)
class ExpertsQuantizer(Bnb4BitHfQuantizer):  # type: ignore[misc]
    """bitsandbytes' quantizer, which quantizes experts too."""

    def get_modules_to_not_convert(self, model: "PreTrainedModel", *args: Any, **kwargs: Any) -> list[str]:
        """Return the names of modules that stay dense: also of those whose weights the model's code reads past them."""
        names: list[str] = super().get_modules_to_not_convert(model, *args, **kwargs)
        past = read_past_of(model.config.model_type) if not self.pre_quantized else frozenset()
        read_past = (name for name, _ in model.named_modules() if name.rpartition(".")[2] in past)
        return [*names, *read_past, *_biased_score(model)]

    def param_needs_quantization(self, model: "PreTrainedModel", param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is kept in 4 bits."""
        name, _, leaf = param_name.rpartition(".")
        return leaf in expert_stacks(model.get_submodule(name)) or bool(
            super().param_needs_quantization(model, param_name, **kwargs)
        )

    def get_quantize_ops(self) -> Bnb4bitQuantize:
        """Return what quantizes a parameter that is read."""
        return _Quantize(self)


class _Quantize(Bnb4bitQuantize):  # type: ignore[misc]
    def convert(
        self,
        input_dict: dict[str, Any],
        full_layer_name: str | None = None,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        assert model is not None
        converted: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            owner, _, leaf = name.rpartition(".")
            if leaf not in expert_stacks(model.get_submodule(owner)):
                converted |= super().convert({name: value}, full_layer_name=full_layer_name, model=model, **kwargs)
                continue
            settings = self.hf_quantizer.quantization_config
            storage = Nf4.of(
                value[0] if isinstance(value, list) else value,
                double_quant=settings.bnb_4bit_use_double_quant,
                quant_type=settings.bnb_4bit_quant_type,
            )
            converted[name] = nn.Parameter(Stack(storage), requires_grad=False)
        return converted


@register_quantization_config(KEPT)
class _KeptConfig(Mxfp4Config):  # type: ignore[misc]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.quant_method = KEPT


@register_quantizer(KEPT)
class KeptQuantizer(Mxfp4HfQuantizer):  # type: ignore[misc]
    """transformers' quantizer for MXFP4, which leaves a model its modules and the experts their published values."""

    is_trainable = True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Accept any device: no kernels are needed."""

    def param_needs_quantization(self, model: "PreTrainedModel", param_name: str, **kwargs: Any) -> bool:
        """Return that nothing is quantized: it is already."""
        return False

    def _process_model_before_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> None:
        pass

    def get_load_operations(self) -> dict[str, type[Mxfp4Dequantize]]:
        """Return what makes a stack of the tensors of a file."""
        return {"deserialize": _Keep}


class _Keep(Mxfp4Dequantize):  # type: ignore[misc]
    def convert(
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str | None = None, **kwargs: Any
    ) -> dict[str, Tensor]:
        assert full_layer_name is not None
        name = full_layer_name.rpartition(".")[2]
        blocks, scales = (input_dict[f"{name}_{part}"] for part in ("blocks", "scales"))
        blocks, scales = (part[0] if isinstance(part, list) else part for part in (blocks, scales))
        storage = Mxfp4(blocks, scales, model.get_parameter(full_layer_name).dtype)
        return {full_layer_name: nn.Parameter(Stack(storage, is_transposed=True), requires_grad=False)}


@register_quantization_config(INT8)
class Int8Config(QuantizationConfigMixin):  # type: ignore[misc]
    """Quantization of a model by `Int8Quantizer`."""

    def __init__(self, **_: Any) -> None:
        self.quant_method = INT8


@register_quantizer(INT8)
class Int8Quantizer(HfQuantizer):  # type: ignore[misc]
    """Quantizer that leaves a model its linear layers, and gives them weights of 8 bits as they are read."""

    is_trainable = True
    _stored: dict[str, bool]
    """True for each quantized weight that its module has transposed, (inputs, outputs)."""

    def is_serializable(self) -> bool:
        """Return that the model is not saved, only what is trained beside it."""
        return False

    def _process_model_before_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> None:
        left_out = self.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        left_out += _biased_score(model)
        past = read_past_of(model.config.model_type)
        self._stored = {
            f"{name}.weight": isinstance(module, Conv1D)
            for name, module in model.named_modules()
            if (type(module) is nn.Linear or isinstance(module, Conv1D))
            and name.rpartition(".")[2] not in past
            and should_convert_module(name, left_out)
        }

    def param_needs_quantization(self, model: "PreTrainedModel", param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is kept in 8 bits."""
        return param_name in self._stored

    def is_transposed(self, name: str) -> bool:
        """Return whether a module has its weight as (inputs, outputs)."""
        return self._stored[name]

    def get_quantize_ops(self) -> "_QuantizeInt8":
        """Return what quantizes a parameter that is read."""
        return _QuantizeInt8(self)


class _QuantizeInt8(ConversionOps):  # type: ignore[misc]
    def __init__(self, hf_quantizer: Int8Quantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Tensor]:
        converted: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            values, is_transposed = (
                value[0] if isinstance(value, list) else value,
                self.hf_quantizer.is_transposed(name),
            )
            rows = Rows.of(values.T if is_transposed else values)
            converted[name] = nn.Parameter(Stack(rows, is_transposed=is_transposed), requires_grad=False)
        return converted


def quantization_config(adapter: QloraAdapter, dtype: torch.dtype) -> QuantizationConfigMixin:
    """Return how transformers quantizes a model that it reads.

    Args:
        adapter: The section that asks for it.
        dtype: Type of the products.
    """
    if adapter.bits == 8:
        return Int8Config()
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=adapter.quant_type,
        bnb_4bit_use_double_quant=adapter.double_quant,
        bnb_4bit_compute_dtype=dtype,
    )
    config.quant_method = METHOD
    return config


def finish_quantization(model: "PreTrainedModel") -> None:
    """Give a model that was quantized as it was read its usual name of that, and layouts that training needs.

    Everything that asks how a model is quantized knows bitsandbytes alone.
    """
    quantizer = cast(Any, model).hf_quantizer
    if isinstance(quantizer, ExpertsQuantizer):
        for config in (quantizer.quantization_config, cast(Any, model.config).quantization_config):
            config.quant_method = QuantizationMethod.BITS_AND_BYTES
        cast(Any, model).quantization_method = QuantizationMethod.BITS_AND_BYTES
    keep_quantised_layout(model)


def keep_quantised_layout(model: "PreTrainedModel") -> None:
    """Keep bitsandbytes from reading 4-bit weights on a CPU in ways that are wrong in training.

    In evaluation mode it repacks them for inference: the backward pass of that layout gives wrong gradients (cosine
    0.72 with the right ones on bitsandbytes 0.50.2), and weights merged from it are wrong. With AVX-512 it misreads
    rows that end within a block: nine of ten values of a matrix of 48 columns, also where PEFT reads them for DoRA. All
    of that goes without a message.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
            if module.weight.device.type == "cpu" and module.in_features % BLOCK_SIZE:
                dora.dequantize_module_weight = _dequantized_weight
                vars(module)["forward"] = MethodType(forward_4bit, module)


def state_of(layer: Any) -> Any:
    """Return the quantization state of a 4-bit layer.

    FSDP gives a weight another type, which has lost its state; the layer keeps it.
    """
    return vars(layer.weight).get("quant_state") or layer.quant_state


def forward_4bit(layer: Any, x: Tensor) -> Tensor:
    """Return the product of a 4-bit layer, as `Linear4bit.forward` does.

    On a CPU weights whose rows end within a block are read as rows of a block each. A weight that has lost its state is
    read with the layer's, and stays the parameter that it is, where `Linear4bit.forward` puts another in its place.
    """
    state, dtype = state_of(layer), layer.compute_dtype or x.dtype
    bias = None if layer.bias is None else layer.bias.to(dtype)
    if x.device.type == "cpu" and layer.in_features % BLOCK_SIZE:
        product = linear(x.to(dtype), dequantized(layer.weight.data, state).to(dtype), bias)
    else:
        product = matmul_4bit(x.to(dtype), layer.weight, quant_state=state, bias=bias)
    return product.to(x.dtype)


def _dequantized_weight(layer: Any) -> Any:
    """Return the values of a layer's weight for DoRA, as PEFT's `dequantize_module_weight` does."""
    weight = layer.weight
    if not isinstance(weight, Params4bit) or weight.device.type != "cpu":
        return dequantize_module_weight(layer)
    return dequantized(weight.data, state_of(layer))


def dequantized(packed: Tensor, state: QuantState) -> Tensor:
    """Return the values of a quantized tensor, read as rows of a block each where its own rows end within one."""
    values: Tensor
    if state.shape[-1] % state.blocksize == 0:
        values = dequantize_4bit(packed, state)
        return values
    size, blocks = state.shape.numel(), copy(state)
    blocks.shape = torch.Size((-(-size // state.blocksize), state.blocksize))
    indices = packed.view(torch.uint8).view(-1)
    if size % state.blocksize:
        indices = pad(indices, (0, blocks.shape.numel() // 2 - len(indices)))
    values = dequantize_4bit(indices, blocks).view(-1)[:size]
    return values.view(state.shape)
