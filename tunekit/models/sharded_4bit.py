"""Weights in 4 bits that FSDP2 shards: their bytes are parameters of torch's own type, and layers keep the scales.

bitsandbytes' parameters lose their scales as DTensors, so that Accelerate leaves them whole on each device (1.15,
`fsdp2_prepare_model`), and every process reads the model. Plain parameters of bytes are sharded, gathered and handed
out as all others are: FSDP2 casts no integers. Their scales, at most an eighth as large, stay whole on each device.
"""

from types import MethodType
from typing import Any, cast

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from torch.distributed import broadcast, broadcast_object_list, get_rank

from tunekit.models.quantization import forward_4bit


def linears_4bit(model: nn.Module) -> list[Linear4bit]:
    """Return the linear layers of a model whose weights are in 4 bits."""
    return [module for module in model.modules() if isinstance(module, Linear4bit)]


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
    layers = linears_4bit(model)
    is_reader = get_rank() == 0
    stored = [_stored(layer) for layer in layers] if is_reader else []
    shapes: list[Any] = [[{name: (each.shape, each.dtype) for name, each in one.items()} for one in stored]]
    broadcast_object_list(shapes, src=0)
    for at, layer in enumerate(layers):
        empty = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in shapes[0][at].items()}
        state = stored[at] if is_reader else empty
        for tensor in state.values():
            broadcast(tensor, src=0)
        layer.quant_state = QuantState.from_dict(state, device=torch.device("cpu"))
        divide_bytes(layer)


def divide_bytes(layer: Linear4bit) -> None:
    """Give a layer the bytes of its packed weight as a parameter that FSDP2 divides."""
    packed = layer.weight.detach().as_subclass(Tensor).view(torch.uint8).view(-1, 1)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    vars(layer)["forward"] = MethodType(forward_4bit, layer)


def _stored(layer: Linear4bit) -> dict[str, Tensor]:
    """Return the scales of a layer as bitsandbytes saves them."""
    return {name: tensor.contiguous() for name, tensor in layer.weight.quant_state.as_dict(packed=True).items()}


def move_scales(model: nn.Module, device: torch.device) -> None:
    """Move the scales of weights in 4 bits to the device that computes."""
    for layer in linears_4bit(model):
        cast(QuantState, layer.quant_state).to(device)
