"""Linear layers with low-rank updates (LoRA), for one layer or several that read the same input.

    h_i = d_i(x) A_i^T                              (tokens, rank), d_i the layer's own dropout
    y_i = x W_i^T + bias_i + scale_i h_i B_i^T

The A of a group are multiplied in one product, and h B^T is added to the base product where it lies. For the backward
pass x, the h and references to the weights are saved, nothing of the width of an output. From dY_i come, in one
reading of it,

    P_i  = scale_i dY_i B_i                         (tokens, rank), the gradient of h_i
    dB_i = scale_i dY_i^T h_i

and from these dA_i = P_i^T d_i(x) and dx = sum of dY_i W_i and d_i(P_i A_i), summed in one buffer. The base weights are
frozen: floats of x's type or another one, float8 with a scale, or NF4. The last two are made dense for the forward pass
and again for the backward pass; nothing of a weight's size is saved.

Precision: under autocast every product is computed in autocast's type. Without it the base product has x's type and
the low-rank products have the type of A and B, as in PEFT, which casts x to it. NF4 is multiplied in the type that it
states, with and without autocast, and the output has x's type, as by bitsandbytes. Gradients of A and B have the types
of A and B.

Dropout: whether an element of x is dropped for a layer is a function of a seed, the layer's place in the group, the row
and the column (Philox 4x32-10). The seed is drawn from torch's generator of x's device, one a call, and the mask is
computed again in the backward pass. All devices drop the same elements for the same seed.

Source: LoRA, https://arxiv.org/abs/2106.09685; peft/tuners/lora/layer.py; Philox, https://doi.org/10.1145/2063384.2063405.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tunekit.kernels import nf4
from tunekit.kernels.backend import without_autocast
from tunekit.kernels.dropout import dropout
from tunekit.kernels.skinny import dual_skinny

__all__ = ["Linear", "Low", "lora_linears", "lora_parts"]


@dataclass(frozen=True)
class Low:
    """A low-rank update of a linear layer.

    Attributes:
        a: (rank, in).
        b: (out, rank).
        scale: Factor of the update.
        dropout: Share of the elements of x that are dropped before A, at least 0 and below 1; 0 when not training.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0


@dataclass(frozen=True)
class Linear:
    """A frozen linear layer and what is trained beside it.

    Attributes:
        weight: (out, in).
        bias: (out,) or None. It may be trained.
        weight_scale: Of a float8 weight, which it is multiplied by: one element, (out, 1), or one for each of equal
            blocks of the weight, in two dimensions. None for other weights.
        low: The update. None where there is none, or it is switched off.
    """

    weight: Tensor | nf4.Quantized
    bias: Tensor | None = None
    weight_scale: Tensor | None = None
    low: Low | None = None


def lora_linears(x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    """The outputs of layers that share an input, each of shape (..., out).

    Args:
        x: (..., in).
        layers: The layers, in the order of the outputs.

    Raises:
        ValueError: A base weight requires a gradient, or the updates of the layers differ in their types.
    """
    return _lora(x, layers, apart=False)


def lora_parts(x: Tensor, layers: Sequence[Linear]) -> tuple[tuple[Tensor, Tensor | None], ...]:
    """The base product of each layer, and its h, for a consumer that adds scale h B^T itself.

    B is not read here and gets its gradient, like h, from the consumer.

    Args:
        x: (..., in).
        layers: The layers, in the order of the results.

    Returns:
        For each layer x W^T + bias, of shape (..., out), and h, of shape (..., rank), None without an update. The h may
        be columns of one tensor.

    Raises:
        ValueError: As for `lora_linears`.
    """
    results = _lora(x, layers, apart=True)
    lows = iter(results[len(layers) :])
    return tuple((y, None if layer.low is None else next(lows)) for y, layer in zip(results, layers, strict=False))


class _Constants(NamedTuple):
    """Settings of a layer besides its tensors."""

    nf4: tuple[int, tuple[int, int], torch.dtype, int, str] | None
    scale: float
    dropout: float


_NUM_TENSORS = 9
"""Tensors that a layer is flattened to: bias, A, B and up to six of the weight."""


def _flatten(layer: Linear) -> tuple[_Constants, tuple[Tensor | None, ...]]:
    """A layer as constants and tensors, which an autograd function takes one by one."""
    weight, low = layer.weight, layer.low
    matrix: tuple[Tensor | None, ...]
    if isinstance(weight, nf4.Quantized):
        format = (weight.block_size, weight.shape, weight.dtype, weight.nested_block_size, weight.quant_type)
        nested = weight.nested_absmax, weight.nested_code, weight.nested_offset
        matrix = (weight.packed, weight.absmax, weight.code, *nested)
    else:
        format, matrix = None, (weight, layer.weight_scale, None, None, None, None)
    if low is None:
        return _Constants(format, 1.0, 0.0), (layer.bias, None, None, *matrix)
    return _Constants(format, low.scale, low.dropout), (layer.bias, low.a, low.b, *matrix)


def _unflatten(constants: Sequence[_Constants], tensors: Sequence[Any]) -> list[Linear]:
    """The layers that were flattened."""
    layers = []
    for place, constant in enumerate(constants):
        bias, a, b, *matrix = tensors[place * _NUM_TENSORS : (place + 1) * _NUM_TENSORS]
        low = None if a is None else Low(a, b, constant.scale, constant.dropout)
        if constant.nf4 is None:
            layers.append(Linear(matrix[0], bias, matrix[1], low))
        else:
            block_size, shape, dtype, nested_block_size, quant_type = constant.nf4
            packed, absmax, code, nested_absmax, nested_code, nested_offset = matrix
            quantized = nf4.Quantized(
                *(packed, absmax, code, block_size, shape, dtype),
                *(nested_absmax, nested_code, nested_offset, nested_block_size, quant_type),
            )
            layers.append(Linear(quantized, bias, None, low))
    return layers


def _lora(x: Tensor, layers: Sequence[Linear], *, apart: bool) -> tuple[Tensor, ...]:
    """The outputs of the layers, or with `apart` their base products followed by the h of those with an update."""
    updates = [layer.low for layer in layers if layer.low is not None]
    if len({low.a.dtype for low in updates} | {low.b.dtype for low in updates}) > 1:
        raise ValueError("the updates of layers that share an input must have one dtype")
    if any(isinstance(layer.weight, Tensor) and layer.weight.requires_grad for layer in layers):
        raise ValueError("a base weight requires a gradient; here base weights are frozen")
    device = x.device.type
    autocasts = device != "meta" and torch.is_autocast_enabled(device)
    product_dtype = torch.get_autocast_dtype(device) if autocasts else x.dtype
    low_dtype = updates[0].a.dtype if updates and not autocasts else product_dtype
    flattened = [_flatten(layer) for layer in layers]
    constants = tuple(constant for constant, _ in flattened)
    tensors = [tensor for _, of_layer in flattened for tensor in of_layer]
    seed = _draw_seed(x, layers)
    with without_autocast(device):
        results: tuple[Tensor, ...] = _LoraLinears.apply(  # type: ignore[no-untyped-call]
            x.to(product_dtype), seed, constants, low_dtype, apart, *tensors
        )
    # Made views here: of a view that an autograd function returns, nothing may be changed in place, as OLMo does.
    results = tuple(rows.view(*x.shape[:-1], rows.shape[-1]) for rows in results)
    if not autocasts:
        return results
    # bitsandbytes gives its results the type of x, autocast or not.
    quantized = [isinstance(layer.weight, nf4.Quantized) for layer in layers]
    outputs = [y.to(x.dtype) if is_quantized else y for y, is_quantized in zip(results, quantized, strict=False)]
    return (*outputs, *results[len(layers) :])


def _draw_seed(x: Tensor, layers: Sequence[Linear]) -> Tensor | None:
    """A seed for the dropout of a call, on x's device; None where nothing is dropped."""
    if not any(layer.low is not None and layer.low.dropout for layer in layers):
        return None
    return torch.randint(2**63 - 1, (1,), device=x.device)


class _LoraLinears(torch.autograd.Function):
    """Layers that share an input, the sums of whose gradients are formed in one buffer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        seed: Tensor | None,
        constants: tuple[_Constants, ...],
        low_dtype: torch.dtype,
        apart: bool,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        layers = _unflatten(constants, tensors)
        rows = x.reshape(-1, x.shape[-1])
        hidden = _times_a(rows.to(low_dtype), layers, seed)
        outputs = []
        for layer, h in zip(layers, hidden, strict=True):
            y = _base_product(rows, layer)
            if h is not None and layer.low is not None and not apart:
                y = _add_product(y, h, layer.low.b.to(low_dtype).T, layer.low.scale)
            outputs.append(y)
        parts = [h for h in hidden if h is not None] if apart else []
        ctx.save_for_backward(x if any(layer.low is not None for layer in layers) else None, seed, *hidden, *tensors)
        ctx.constants, ctx.low_dtype, ctx.apart = constants, low_dtype, apart
        ctx.x_shape, ctx.x_dtype, ctx.device = x.shape, x.dtype, x.device.type
        ctx.set_materialize_grads(False)
        return (*outputs, *parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        num_layers = len(ctx.constants)
        x, seed, *saved = ctx.saved_tensors
        hidden, tensors = saved[:num_layers], saved[num_layers:]
        layers = _unflatten(ctx.constants, tensors)
        needs_x, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        parts = iter(gradients[num_layers:])
        dx: Tensor | None = None
        dhs: list[Tensor | None] = []
        results: list[Tensor | None] = [None] * len(tensors)
        with without_autocast(ctx.device):
            for place, (layer, h) in enumerate(zip(layers, hidden, strict=True)):
                dy, dh = gradients[place], next(parts) if ctx.apart and h is not None else None
                if dy is not None:
                    dy = dy.reshape(-1, dy.shape[-1])
                    if layer.bias is not None and needed[place * _NUM_TENSORS]:
                        results[place * _NUM_TENSORS] = dy.sum(0).to(layer.bias.dtype)
                    if needs_x:
                        dx = _add_base_gradient(dx, dy, layer)
                    if layer.low is not None and not ctx.apart:
                        b = layer.low.b
                        dh, db = dual_skinny(dy.to(h.dtype), b.to(h.dtype), h, layer.low.scale)
                        results[place * _NUM_TENSORS + 2] = db.to(b.dtype)
                dhs.append(None if dh is None else dh.reshape(-1, dh.shape[-1]))
            if x is not None:
                rows = x.reshape(-1, x.shape[-1]).to(ctx.low_dtype)
                dx, das = _low_gradients(rows, layers, dhs, seed, dx, needs_x)
                for place, da in das.items():
                    results[place * _NUM_TENSORS + 1] = da
        if dx is not None:
            dx = dx.to(ctx.x_dtype).view(ctx.x_shape)
        return (dx, None, None, None, None, *results)


def _dense(layer: Linear, dtype: torch.dtype) -> Tensor:
    """The base weight in a type, (out, in)."""
    weight, scale = layer.weight, layer.weight_scale
    if isinstance(weight, nf4.Quantized):
        return nf4.dequantize(weight, dtype)
    if scale is None:
        return weight.to(dtype)
    dense = weight.to(torch.float32)
    num_rows, num_columns = dense.shape
    if scale.numel() == 1:
        return (dense * scale.view(())).to(dtype)
    if scale.dim() != 2 or num_rows % scale.shape[0] or num_columns % scale.shape[1]:
        raise ValueError(f"scales of shape {tuple(scale.shape)} do not divide a weight of {num_rows} x {num_columns}")
    # A factor for each of equal blocks.
    blocks = dense.view(scale.shape[0], num_rows // scale.shape[0], scale.shape[1], num_columns // scale.shape[1])
    return (blocks * scale[:, None, :, None]).view(num_rows, num_columns).to(dtype)


def _product_dtype(layer: Linear, dtype: torch.dtype) -> torch.dtype:
    """Type of the product of the base weight with an input of a type."""
    return layer.weight.dtype if isinstance(layer.weight, nf4.Quantized) else dtype


def _base_product(rows: Tensor, layer: Linear) -> Tensor:
    """The outputs of the base layer, rows W^T + bias, in the type of the rows."""
    dtype = _product_dtype(layer, rows.dtype)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    product = torch.nn.functional.linear(rows.to(dtype), _dense(layer, dtype), bias)
    # Not cast to the type that it has: compiled, torch 2.11 loses the gradient of a result that has two names.
    return product if product.dtype == rows.dtype else product.to(rows.dtype)


def _add_base_gradient(total: Tensor | None, dy: Tensor, layer: Linear) -> Tensor:
    """Add dy W to a sum."""
    dtype = _product_dtype(layer, dy.dtype)
    return _add_product(total, dy.to(dtype), _dense(layer, dtype)).to(dy.dtype)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """Add scale left right to a sum where it lies, or begin a sum."""
    if torch.compiler.is_compiling():
        # Torch 2.11 loses the gradient of a result that a compiled autograd function wrote in place.
        product = (left @ right) * scale
        return product if total is None else total + (product if product.dtype == total.dtype else product.to(total))
    if total is None:
        return left @ right if scale == 1.0 else (left @ right).mul_(scale)
    if total.dtype == left.dtype:
        return total.addmm_(left, right, alpha=scale)
    return total.add_(left @ right, alpha=scale)


def _concatenated(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Matrices one below the other, in a type."""
    return (matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))).to(dtype)


def _times_a(rows: Tensor, layers: Sequence[Linear], seed: Tensor | None) -> list[Tensor | None]:
    """The h of each layer, (tokens, rank); None without an update."""
    hidden: list[Tensor | None] = [None] * len(layers)
    together: list[tuple[int, Tensor]] = []
    for place, layer in enumerate(layers):
        if layer.low is None:
            continue
        if seed is not None and layer.low.dropout:
            hidden[place] = dropout(rows, seed, place, layer.low.dropout) @ layer.low.a.to(rows.dtype).T
        else:
            together.append((place, layer.low.a))
    if together:
        product = rows @ _concatenated([a for _, a in together], rows.dtype).T
        parts = torch.split(product, [a.shape[0] for _, a in together], dim=1)
        for (place, _), h in zip(together, parts, strict=True):
            hidden[place] = h
    return hidden


def _low_gradients(
    rows: Tensor,
    layers: Sequence[Linear],
    dhs: Sequence[Tensor | None],
    seed: Tensor | None,
    dx: Tensor | None,
    needs_x: bool,
) -> tuple[Tensor | None, dict[int, Tensor]]:
    """The sum dx with what the updates give to it, and the gradients of the A by the places of their layers."""
    das: dict[int, Tensor] = {}
    together: list[tuple[int, Tensor, Tensor]] = []
    for place, (layer, dh) in enumerate(zip(layers, dhs, strict=True)):
        if layer.low is None or dh is None:
            continue
        a = layer.low.a
        if seed is not None and layer.low.dropout:
            das[place] = (dh.T @ dropout(rows, seed, place, layer.low.dropout)).to(a.dtype)
            if needs_x:
                # The gradient goes through where x did.
                low = dropout(dh @ a.to(rows.dtype), seed, place, layer.low.dropout)
                dx = low if dx is None else dx.add_(low)
        else:
            together.append((place, a, dh))
    if together:
        dh = torch.cat([dh for _, _, dh in together], dim=1)
        a = _concatenated([a for _, a, _ in together], rows.dtype)
        parts = torch.split(dh.T @ rows, [a.shape[0] for _, a, _ in together])
        for (place, a_own, _), da in zip(together, parts, strict=True):
            das[place] = da.to(a_own.dtype)
        if needs_x:
            dx = _add_product(dx, dh, a)
    return dx, das
