"""Linear layers as the kernels take them, read from PEFT's and bitsandbytes' modules at each call.

At each call, since what a layer computes changes: an adapter is switched off for DPO's reference, dropout for
evaluation, FSDP puts whole weights in the place of parts for the time of a layer. What cannot be read is called as it
was before, that module alone: merged adapters, several active ones, variants such as DoRA, biases of adapters that are
trained, 8-bit weights, and modules that hooks watch (with ZeRO-3 hooks gather a module's weights).

A plain layer whose weight is trained is torch's business, and is called as well.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from peft.tuners.lora.bnb import Linear4bit as LoraLinear4bit
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tunekit.kernels.lora import Linear, Low, lora_linears, lora_parts
from tunekit.kernels.nf4 import Quantized
from tunekit.models.fusion.proof import Fusion, Kept, Trial, before_fusion, is_fused, stand_in
from tunekit.models.quantization import Stack, state_of

Part = tuple[Tensor, tuple[Tensor, Tensor, float] | None]
"""Output of a linear layer before its update, and the update as the kernel of gated blocks takes it: h of shape
(tokens, rank), b of shape (out, rank) and the scale; None where it is added already, or there is none."""


def project(x: Tensor, modules: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Apply linear layers to the same input; those that can be read are computed together.

    Args:
        x: Their input, (..., in).
        modules: The layers, in the order of the outputs.
    """
    linears, readable = _read_together(x, modules)
    outputs = iter(lora_linears(x, readable) if readable else ())
    return tuple(
        module(x) if linear is None else next(outputs) for module, linear in zip(modules, linears, strict=True)
    )


def project_parts(x: Tensor, modules: Sequence[nn.Module]) -> tuple[Part, ...]:
    """Like `project`, for a consumer that adds the low-rank updates itself.

    Args:
        x: Their input, (..., in).
        modules: The layers, in the order of the outputs.
    """
    linears, readable = _read_together(x, modules)
    outputs = iter(lora_parts(x, readable) if readable else ())
    parts: list[Part] = []
    for module, linear in zip(modules, linears, strict=True):
        if linear is None:
            parts.append((module(x), None))
            continue
        product, h = next(outputs)
        low = linear.low
        parts.append((product, None if low is None or h is None else (h.flatten(0, -2), low.b, low.scale)))
    return tuple(parts)


def _read_together(x: Tensor, modules: Sequence[nn.Module]) -> tuple[list[Linear | None], list[Linear]]:
    """The layers, None for those that are called, and those that are computed in one go.

    All are called where their updates have different types, which cannot be computed in one go.
    """
    linears = [read_linear(module, x) for module in modules]
    readable = [linear for linear in linears if linear is not None]
    if len({linear.low.a.dtype for linear in readable if linear.low is not None}) > 1:
        return [None] * len(linears), []
    return linears, readable


def read_linear(module: nn.Module, x: Tensor) -> Linear | None:
    """Return the current weights of a linear layer; None where the layer itself has to be called.

    A layer with an update is read only where it is fused itself: then it was proved that it is read rightly.

    Args:
        module: The layer.
        x: Its input.
    """
    if type(module) is nn.Linear:
        return None if "forward" in vars(module) else _read_base(module, x)
    return _read(module, x) if is_fused(module) else None


def _read(module: nn.Module, x: Tensor) -> Linear | None:
    if type(module) is Linear4bit:
        return _read_base(module, x)
    if is_watched(module):
        return None
    layer = cast(Any, module)
    base = None if layer.merged else _read_base(layer.base_layer, x)
    if base is None or layer.disable_adapters:
        return base
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if not active:
        return base
    low = _read_low(layer, active[0]) if len(active) == 1 else None
    return None if low is None else Linear(base.weight, base.bias, base.weight_scale, low)


def _read_base(module: nn.Module, x: Tensor) -> Linear | None:
    """A layer without an update."""
    if is_watched(module):
        return None
    if type(module) is nn.Linear:
        weight, bias = module.weight, module.bias
        return None if weight.requires_grad or isinstance(weight, DTensor | Stack) else Linear(weight, bias)
    if type(module) is Linear4bit:
        quantised = _read_quantised(module, x)
        return None if quantised is None else Linear(quantised, cast("Tensor | None", module.bias))
    return None


def _read_quantised(layer: Any, x: Tensor) -> Quantized | None:
    state = state_of(layer)
    if state is None or state.quant_type != "nf4" or vars(state).get("packing_format_for_cpu"):
        return None
    computes = layer.compute_dtype
    if computes is None or (not layer.compute_type_is_set and x.dtype in (torch.float32, torch.bfloat16)):
        # As bitsandbytes does with its first input.
        computes = x.dtype
    nested = state.state2
    return Quantized(
        packed=layer.weight,
        absmax=state.absmax,
        code=state.code,
        block_size=state.blocksize,
        shape=tuple(state.shape),
        dtype=computes,
        nested_absmax=None if nested is None else nested.absmax,
        nested_code=None if nested is None else nested.code,
        nested_offset=None if nested is None else state.offset,
        nested_block_size=256 if nested is None else nested.blocksize,
    )


def _read_low(layer: Any, name: str) -> Low | None:
    """The update that an adapter makes, None where it is more than a product of two matrices."""
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    supported = type(down) is nn.Linear and type(up) is nn.Linear and type(dropout) in (nn.Identity, nn.Dropout)
    if not supported or down.bias is not None or up.bias is not None or any(map(is_watched, (down, up, dropout))):
        return None
    if name in layer.lora_variant or layer.fan_in_fan_out or not layer.cast_input_dtype_enabled:
        return None
    share = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    if share >= 1 or isinstance(down.weight, DTensor) or isinstance(up.weight, DTensor):
        return None
    return Low(down.weight, up.weight, layer.scaling[name], share)


def is_watched(module: nn.Module) -> bool:
    """Return whether hooks wait for the module to be called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def linear_rule(module: nn.Module) -> Fusion | Kept | None:
    """The rule for linear layers with updates, and for those in NF4."""
    if type(module) in (LoraLinear, LoraLinear4bit):
        layer = cast(Any, module)
        reason = _why_not(layer)
        if reason is not None:
            return Kept(reason)
        base, downs = layer.base_layer, layer.lora_A.values()
        sizes = (
            *(type(base), base.bias is not None, type(base) is Linear4bit and _is_nested(base)),
            tuple((down.out_features, down.weight.dtype) for down in downs),
        )
        return Fusion("linear layer with a low-rank update", forward, None, partial(_trial, layer), sizes)
    if type(module) is Linear4bit:
        reason = _why_not_quantised(module)
        if reason is not None:
            return Kept(reason)
        form = (module.bias is not None, _is_nested(module))
        return Fusion("linear layer in NF4", forward, None, partial(_trial, module), form)
    if isinstance(module, LoraLayer):
        return Kept(f"no kernel for low-rank updates of {type(module.get_base_layer()).__name__}")
    return None


def _why_not(layer: Any) -> str | None:
    """Return why a layer with an update is not computed by the kernels, as far as that is known before it is called."""
    base = layer.base_layer
    if type(base) not in (nn.Linear, Linear4bit):
        return f"no kernel for low-rank updates of {type(base).__name__}"
    if type(base) is Linear4bit and (reason := _why_not_quantised(base)):
        return reason
    if isinstance(base.weight, Stack):
        return f"no kernel for weights in {type(base.weight.matrices).__name__}"
    variants = sorted({type(layer.lora_variant[name]).__name__ for name in layer.lora_variant})
    if variants:
        return f"no kernel for this variant of LoRA: {', '.join(variants)}"
    if any(up.bias is not None for up in layer.lora_B.values()):
        return "no kernel for adapters with bias"
    return "its weight is stored transposed" if layer.fan_in_fan_out else None


def _why_not_quantised(layer: Linear4bit) -> str | None:
    state = state_of(layer)
    if state is None:
        return "its weights are not quantized yet"
    return None if state.quant_type == "nf4" else f"no kernel for weights in {state.quant_type}"


def _is_nested(layer: Linear4bit) -> bool:
    """Return whether the absmax of a layer's blocks are quantized too."""
    return state_of(layer).state2 is not None


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the output of a linear layer.

    Args:
        self: The layer.
        x: Its input, (..., in).
        args: With more than the input it is called as before.
        kwargs: Like `args`.
    """
    linear = None if args or kwargs else _read(self, x)
    if linear is None:
        return cast(Tensor, before_fusion(self)(x, *args, **kwargs))
    (output,) = lora_linears(x, [linear])
    return output


def num_outputs(module: nn.Module) -> int | None:
    """Columns that a linear layer gives, adapted or not; None for another module."""
    base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return base.out_features if isinstance(base, nn.Linear) else None


IN, OUT = 64, 48
"""Features of a stand-in, whatever those of the layer."""


def _trial(layer: Any, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Trial:
    """A small layer of the same kind, with an input."""
    x = torch.randn(2, 5, IN, generator=generator).to(device, dtype).requires_grad_()
    if type(layer) is Linear4bit:
        return Trial(_stand_in_base(layer, generator, device, dtype), (x,), {})
    halves = {down.weight.dtype for down in layer.lora_A.values()} - {torch.float32}
    adapter_dtype = dtype if halves else torch.float32
    downs, ups, dropouts = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
    for name, down in layer.lora_A.items():
        downs[name] = random_linear(IN, down.out_features, generator, device, adapter_dtype)
        ups[name] = random_linear(down.out_features, OUT, generator, device, adapter_dtype)
        dropouts[name] = nn.Identity()
    base = _stand_in_base(layer.base_layer, generator, device, dtype)
    module = stand_in(layer, generator=generator, base_layer=base, lora_A=downs, lora_B=ups, lora_dropout=dropouts)
    return Trial(module, (x,), {})


def _stand_in_base(layer: Any, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> nn.Module:
    linear = random_linear(IN, OUT, generator, device, dtype, bias=layer.bias is not None)
    linear.weight.requires_grad_(False)
    if type(layer) is nn.Linear:
        return linear
    quantised = Linear4bit(IN, OUT, layer.bias is not None, dtype, _is_nested(layer), "nf4")
    quantised.weight = Params4bit(
        linear.weight.data, False, compress_statistics=_is_nested(layer), quant_type="nf4", module=quantised
    )
    quantised.bias = linear.bias
    cast(Any, quantised).support_avx512bf16_for_cpu = False
    return cast(nn.Module, quantised.to(device))


def random_linear(
    in_features: int,
    out_features: int,
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype,
    *,
    bias: bool = False,
) -> nn.Linear:
    """A linear layer whose outputs are of the size of its inputs."""
    linear = nn.Linear(in_features, out_features, bias=bias, device="meta").to_empty(device="cpu")
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * in_features**-0.5
    return linear.to(device, dtype)
