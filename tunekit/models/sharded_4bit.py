"""Weights in 4 bits that FSDP2 shards: their bytes are parameters of torch's own type, and modules keep the scales.

bitsandbytes' parameters lose their scales as DTensors, so that Accelerate leaves them whole on each device (1.15,
`fsdp2_prepare_model`), and every process reads the model. Plain parameters of bytes are sharded, gathered and handed
out as all others are: FSDP2 casts no integers. Their scales, at most an eighth as large, stay whole on each device.

A module of experts finds its matrices under their names as before, made anew of the bytes that are there each time.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod
from types import MethodType
from typing import Any, cast

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from torch.distributed import broadcast, broadcast_object_list, get_rank
from torch.distributed.tensor import DTensor

from tunekit.models.quantization import SHARDED, Mxfp4, Nf4, Stack, forward_4bit, scales_of, stored_tensors


def unwritten_4bit(layer: Any) -> Params4bit:
    """Return a weight for a layer, packed, in memory that nobody has written."""
    return Params4bit(
        torch.empty((layer.in_features * layer.out_features + 1) // 2, 1, dtype=torch.uint8),
        requires_grad=False,
        compress_statistics=layer.weight.compress_statistics,
        quant_type=layer.weight.quant_type,
        bnb_quantized=True,
        module=layer,
    )


def make_shardable(model: nn.Module) -> None:
    """Make the weights in 4 bits plain parameters, and give all processes the first one's scales.

    Called by all processes together, once an adapter is attached and before kernels are.
    """
    # Only the first process has something stored.
    stored = dict(_stored(model)) if get_rank() == 0 else {}
    scales = {name: _scales_by_name(cast(Nf4 | Mxfp4, stack.matrices)) for name, stack in stored.items()}
    told: list[Any] = [{name: _described(stack, scales[name]) for name, stack in stored.items()}]
    broadcast_object_list(told, src=0)
    for name, (kind, shapes) in told[0].items():
        if name in stored:
            tensors, packed = scales[name], stored.pop(name).matrices.tensors[0]
        else:
            tensors, packed = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in shapes.items()}, None
        for tensor in tensors.values():
            broadcast(tensor, src=0)
        owner, _, leaf = name.rpartition(".")
        divide_bytes(model.get_submodule(owner), leaf, _without_bytes(kind, tensors), packed)


def _stored(model: nn.Module) -> Iterator[tuple[str, Stack]]:
    """Yield the parameters of a model that are in 4 bits, with their names."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, Stack):
            yield name, parameter
        elif "quant_state" in vars(parameter):
            yield name, Stack(Nf4(parameter.detach().as_subclass(Tensor), vars(parameter)["quant_state"]))


def _described(stack: Stack, scales: dict[str, Tensor]) -> tuple[Any, dict[str, tuple[torch.Size, torch.dtype]]]:
    """Return what a process that has read nothing must know to receive the scales of a stack."""
    matrices = stack.matrices
    blocks = (matrices.blocks.shape, matrices.dtype) if isinstance(matrices, Mxfp4) else None
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in scales.items()}
    return (stack.is_transposed, blocks), shapes


def _scales_by_name(matrices: Nf4 | Mxfp4) -> dict[str, Tensor]:
    """Return what belongs to the bytes; bitsandbytes' as it saves them."""
    tensors = {"scales": matrices.scales} if isinstance(matrices, Mxfp4) else matrices.state.as_dict(packed=True)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _without_bytes(kind: Any, tensors: dict[str, Tensor]) -> Stack:
    """Return a stack that has its scales, and nothing in the place of its bytes."""
    is_transposed, blocks = kind
    if blocks is not None:
        shape, dtype = blocks
        matrices = Mxfp4(torch.empty(shape, dtype=torch.uint8, device="meta"), tensors["scales"], dtype)
        return Stack(matrices, is_transposed=is_transposed)
    state = QuantState.from_dict(tensors, device=torch.device("cpu"))
    packed = torch.empty((prod(state.shape) + 1) // 2, 1, dtype=torch.uint8, device="meta")
    return Stack(Nf4(packed, state), is_transposed=is_transposed)


def divide_bytes(module: nn.Module, name: str, stack: Stack, packed: Tensor | None) -> None:
    """Give a module a parameter of bytes, which FSDP2 divides, in the place of one in 4 bits.

    Args:
        module: A linear layer, or the experts of a layer.
        name: Name of the parameter.
        stack: It, with its scales and nothing in the place of its bytes.
        packed: The bytes, in any shape and type; None for memory that nobody has written.
    """
    if packed is None:
        packed = torch.empty(stack.matrices.tensors[0].numel(), dtype=torch.uint8)
    if isinstance(module, Linear4bit):
        module.quant_state = cast(Nf4, stack.matrices).state
        vars(module)["forward"] = MethodType(forward_4bit, module)
    else:
        vars(module).setdefault(SHARDED, {})[name] = stack
        cast(Any, module).__class__ = _with_stack(cast(Any, type(module)), name)
    column = packed.view(torch.uint8).view(-1, 1)
    module.register_parameter(name, nn.Parameter(column, requires_grad=False))


@cache
def _with_stack(kind: Any, name: str) -> type[nn.Module]:
    """Return a class of modules that have the matrices of all experts where they have a parameter of bytes."""

    def read(module: nn.Module) -> Tensor:
        parameter = cast(Tensor, module._parameters[name])
        # FSDP2 asks for the shard under this name, and a stand-in of the module has dense matrices.
        if isinstance(parameter, DTensor) or parameter.dtype != torch.uint8:
            return parameter
        stack: Stack = vars(module)[SHARDED][name]
        return stack.with_bytes(parameter)

    return type(kind.__name__, (kind,), {name: property(read), "__module__": kind.__module__})


def scales_of_sharded(model: nn.Module) -> Iterator[Tensor]:
    """Yield the scales of weights whose bytes are sharded."""
    for module in model.modules():
        for stack in vars(module).get(SHARDED, {}).values():
            yield from stored_tensors(stack)[1:]
        if isinstance(module, Linear4bit) and "quant_state" not in vars(module.weight):
            yield from scales_of(cast(QuantState, module.quant_state))


def move_scales(model: nn.Module, device: torch.device) -> None:
    """Move the scales of sharded weights to the device that computes."""
    for module in model.modules():
        for stack in vars(module).get(SHARDED, {}).values():
            if isinstance(stack.matrices, Nf4):
                stack.matrices.state.to(device)
            else:
                stack.matrices = replace(stack.matrices, scales=stack.matrices.scales.to(device))
        if isinstance(module, Linear4bit):
            cast(QuantState, module.quant_state).to(device)
