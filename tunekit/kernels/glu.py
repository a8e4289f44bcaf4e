"""The product inside a gated MLP, activation(gate) * up: of two tensors or of one that has both, with low-rank terms.

    g = gate + gate_scale * gate_h @ gate_b^T
    u = up + up_scale * up_h @ up_b^T
    y = f(g) * u

Without low-rank terms g is gate, and u is up. The derivative:

    dgate = dy * u * f'(g)        dgate_h = gate_scale * dgate @ gate_b    dgate_b = gate_scale * dgate^T @ gate_h
    dup = dy * f(g)               and so on for up

f is SiLU, x sigmoid(x); or GELU, x Phi(x), by erf (`gelu`) or by the approximation with tanh (`gelu_tanh`). That is
computed without tanh: (1 + tanh(z)) / 2 = sigmoid(2z).

GLU variants: https://arxiv.org/abs/2002.05202. GELU: https://arxiv.org/abs/1606.08415. LoRA:
https://arxiv.org/abs/2106.09685.

Kept for the backward pass: gate and up as they come from their products, and the low-rank factors; neither f(g) nor the
sums, which are computed again. Gradients go to new tensors.

Precision: all is computed in float32 and rounded once, to the type of gate. Low-rank factors are cast to that type;
their products are summed in float32 and added unrounded, so is the gradient of b. Autocast changes nothing.
On a CPU the operations are those of torch's activations and of their derivatives, so that float32 results without
low-rank terms are those of transformers' modules, bit for bit.

A program computes a tile: some columns of one row, or, where low-rank terms are to be multiplied, of several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.backend import dense_rows, jit, tl, triton, uses_triton, without_autocast
from tunekit.kernels.skinny import MAX_RANK, dual_skinny

Activation = Literal["silu", "gelu_tanh", "gelu"]

Low = tuple[Tensor, Tensor, float]
"""A low-rank term: h (..., rank), b (columns, rank), and what their product is scaled with."""


def glu(gate: Tensor, up: Tensor, *, activation: Activation) -> Tensor:
    """activation(gate) * up, of tensors of the same shape and type, (..., columns). They may be strided views."""
    return _Glu.apply(gate, up, activation, ())  # type: ignore[no-any-return, no-untyped-call]


def glu_packed(gate_up: Tensor, *, activation: Activation) -> Tensor:
    """The same of one tensor (..., 2 * columns) that has gate and then up, as Phi 3 makes it: so is its gradient."""
    return _PackedGlu.apply(gate_up, activation)  # type: ignore[no-any-return, no-untyped-call]


def glu_lora(gate: Tensor, up: Tensor, gate_low: Low | None, up_low: Low | None, *, activation: Activation) -> Tensor:
    """activation(gate + its low-rank term) * (up + its own).

    Args:
        gate: (..., columns).
        up: (..., columns), of the same type.
        gate_low: h and b are cast to the type of gate.
        up_low: The same.
        activation: What is applied to the gate.
    """
    gate, gate_low = _without_high_rank(gate, gate_low)
    up, up_low = _without_high_rank(up, up_low)
    if gate_low is None and up_low is None:
        return glu(gate, up, activation=activation)
    gate_h, gate_b, gate_scale = gate_low or (None, None, 0.0)
    up_h, up_b, up_scale = up_low or (None, None, 0.0)
    scales = float(gate_scale), float(up_scale)
    lows = gate_h, gate_b, up_h, up_b
    return _Glu.apply(gate, up, activation, scales, *lows)  # type: ignore[no-any-return, no-untyped-call]


def _without_high_rank(x: Tensor, low: Low | None) -> tuple[Tensor, Low | None]:
    """A tensor and its low-rank term as the kernel takes them; a term of a rank above MAX_RANK is added by torch."""
    if low is None or low[0].shape[-1] <= MAX_RANK:
        return x, low
    h, b, scale = low
    return _added(x, (h.to(x.dtype), b.to(x.dtype), scale)), None


def _added(x: Tensor, low: Low | None) -> Tensor:
    if low is None:
        return x
    h, b, scale = low
    with without_autocast(x.device.type):
        hidden = h.to(x.dtype).flatten(0, -2)
        return torch.addmm(x.flatten(0, -2), hidden, b.to(x.dtype).T, alpha=scale).view(x.shape)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, activation: str, scales: tuple[float, ...], *lows: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(gate, up, *lows)
        ctx.activation, ctx.scales = activation, scales
        return cast(Tensor, _glu(gate, up, _cast(lows, gate.dtype), scales, activation))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, *lows = ctx.saved_tensors
        factors, needed = _cast(lows, gate.dtype), ctx.needs_input_grad[4:]
        both = _glu_backward(gradients[0], gate, up, factors, ctx.scales, ctx.activation)
        of_lows: list[Tensor | None] = [None] * len(lows)
        for first, dx, scale in zip(range(0, len(lows), 2), both, ctx.scales, strict=False):
            h, b = factors[first : first + 2]
            if h is None or b is None or not any(needed[first : first + 2]):
                continue
            with without_autocast(dx.device.type):
                products = dual_skinny(dx.flatten(0, -2), b, h.flatten(0, -2), scale)
            for place, gradient in enumerate(products, first):
                if needed[place]:
                    of_lows[place] = gradient.to(lows[place].dtype).view(lows[place].shape)
        return (*both, None, None, *of_lows)


def _cast(lows: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    return [None if x is None else x.to(dtype) for x in lows]


class _PackedGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, -1)
        return cast(Tensor, _glu(gate, up, (), (), activation))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        return _glu_packed_backward(gradients[0], gate_up, ctx.activation), None


# Operations take the low-rank factors of gate and up as a list, h and b of each, or nothing where neither has any.


@torch.library.custom_op("tunekit::glu", mutates_args=())
def _glu(gate: Tensor, up: Tensor, lows: Sequence[Tensor | None], scales: Sequence[float], activation: str) -> Tensor:
    gate_low, up_low = _terms(lows, scales)
    if uses_triton(gate):
        y = gate.new_empty(gate.shape)
        _launch(None, gate, up, (gate_low, up_low), activation, y, y)
        return y
    g, u = _added(gate.float(), gate_low), _added(up.float(), up_low)
    return (_activated(g, activation) * u).to(gate.dtype).contiguous()


@_glu.register_fake
def _(gate: Tensor, *_: object) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("tunekit::glu_backward", mutates_args=())
def _glu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, lows: Sequence[Tensor | None], scales: Sequence[float], activation: str
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    _write_gradients(dy, gate, up, _terms(lows, scales), activation, dgate, dup)
    return dgate, dup


@_glu_backward.register_fake
def _(dy: Tensor, gate: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@torch.library.custom_op("tunekit::glu_packed_backward", mutates_args=())
def _glu_packed_backward(dy: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """The gradient of both in one tensor."""
    gradient = gate_up.new_empty(gate_up.shape)
    (gate, up), (dgate, dup) = gate_up.chunk(2, -1), gradient.chunk(2, -1)
    _write_gradients(dy, gate, up, (None, None), activation, dgate, dup)
    return gradient


@_glu_packed_backward.register_fake
def _(dy: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _terms(lows: Sequence[Tensor | None], scales: Sequence[float]) -> tuple[Low | None, ...]:
    """The low-rank terms of gate and up that an operation is given."""
    pairs = zip(lows[::2], lows[1::2], scales, strict=True)
    return tuple(None if h is None or b is None else (h, b, scale) for h, b, scale in pairs) or (None, None)


def _write_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, lows: Sequence[Low | None], activation: str, dgate: Tensor, dup: Tensor
) -> None:
    if uses_triton(gate):
        _launch(dy, gate, up, lows, activation, dgate, dup)
        return
    g, u = _added(gate.float(), lows[0]), _added(up.float(), lows[1])
    dgate.copy_(_derivative(dy.float() * u, g, activation))
    dup.copy_(dy.float() * _activated(g, activation))


def _derivative(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    """The gradient of x, of which dy is the activation's."""
    if activation == "silu":
        return torch.ops.aten.silu_backward.default(dy, x)  # type: ignore[no-any-return]
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward.default(dy, x, approximate=approximate)  # type: ignore[no-any-return]


@jit
def _activate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of x, and its derivative."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(x)
        slope = share * (1 + x * (1 - share))
    elif ACTIVATION == "gelu_tanh":
        # 1.5957691 is 2 sqrt(2 / pi).
        share = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        slope = share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        # 0.70710678 is 1 / sqrt(2), and 0.39894228 is 1 / sqrt(2 pi).
        share = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * share, slope


@jit
def _glu_forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, num_columns, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK columns of a row."""
    blocks = tl.cdiv(num_columns, BLOCK)
    row = tl.program_id(0) // blocks
    columns = (tl.program_id(0) - row * blocks) * BLOCK + tl.arange(0, BLOCK)
    row = row.to(tl.int64)
    here = columns < num_columns
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=here, other=0.0).to(tl.float32)
    activated, _ = _activate(gate, ACTIVATION)
    tl.store(y_ptr + row * num_columns + columns, (activated * up).to(y_ptr.dtype.element_ty), mask=here)


@jit
def _glu_backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,
    dy_stride, gate_stride, up_stride, gradient_stride, num_columns,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row."""
    blocks = tl.cdiv(num_columns, BLOCK)
    row = tl.program_id(0) // blocks
    columns = (tl.program_id(0) - row * blocks) * BLOCK + tl.arange(0, BLOCK)
    row = row.to(tl.int64)
    here = columns < num_columns
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=here, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=here, other=0.0).to(tl.float32)
    activated, slope = _activate(gate, ACTIVATION)
    written = row * gradient_stride + columns
    tl.store(dgate_ptr + written, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=here)
    tl.store(dup_ptr + written, (dy * activated).to(dup_ptr.dtype.element_ty), mask=here)


@jit
def _low_rank(  # type: ignore[no-untyped-def]
    h_ptr, b_ptr, rows, columns, num_rows, num_columns, scale, RANK: tl.constexpr, PADDED: tl.constexpr
):
    """A tile of a low-rank term."""
    k = tl.arange(0, PADDED)
    is_row, is_column = (rows < num_rows)[:, None], (columns < num_columns)[None, :]
    h = tl.load(h_ptr + rows[:, None] * RANK + k[None, :], mask=is_row & (k < RANK)[None, :], other=0.0)
    b = tl.load(b_ptr + columns[None, :] * RANK + k[:, None], mask=is_column & (k < RANK)[:, None], other=0.0)
    return tl.dot(h, b, input_precision="ieee") * tl.cast(scale, tl.float32)


@jit
def _glu_lora_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, gate_ptr, up_ptr, gate_h_ptr, gate_b_ptr, up_h_ptr, up_b_ptr, y_ptr, dup_ptr,
    dy_stride, gate_stride, up_stride, num_rows, num_columns,
    gate_scale, up_scale,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, GATE_PADDED: tl.constexpr, UP_PADDED: tl.constexpr,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of y; or of the gradients of gate, in its place, and up. A rank is 0 where there is no low-rank term."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    gate = tl.load(gate_ptr + rows[:, None] * gate_stride + columns[None, :], mask=here, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows[:, None] * up_stride + columns[None, :], mask=here, other=0.0).to(tl.float32)
    if GATE_RANK > 0:
        gate += _low_rank(
            gate_h_ptr, gate_b_ptr, rows, columns, num_rows, num_columns, gate_scale, GATE_RANK, GATE_PADDED
        )
    if UP_RANK > 0:
        up += _low_rank(up_h_ptr, up_b_ptr, rows, columns, num_rows, num_columns, up_scale, UP_RANK, UP_PADDED)
    activated, slope = _activate(gate, ACTIVATION)
    written = rows[:, None] * num_columns + columns[None, :]
    if BACKWARD:
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns[None, :], mask=here, other=0.0).to(tl.float32)
        tl.store(y_ptr + written, (dy * up * slope).to(y_ptr.dtype.element_ty), mask=here)
        tl.store(dup_ptr + written, (dy * activated).to(dup_ptr.dtype.element_ty), mask=here)
    else:
        tl.store(y_ptr + written, (activated * up).to(y_ptr.dtype.element_ty), mask=here)


def _launch(
    dy: Tensor | None, gate: Tensor, up: Tensor, lows: Sequence[Low | None], activation: str, y: Tensor, dup: Tensor
) -> None:
    """Write the product to y; or with dy, gradients of gate and up to y and dup, which have the same strides."""
    if not gate.numel():
        return
    gradient_stride = y.stride(-2) if y.dim() > 1 else y.shape[-1]
    gate, up, dy = dense_rows(gate), dense_rows(up), None if dy is None else dense_rows(dy)
    num_rows, num_columns = gate.shape
    if any(low is not None for low in lows):
        (gate_h, gate_b, gate_rank), (up_h, up_b, up_rank) = (_factors(low, gate) for low in lows)
        # Small tiles, of which several are on a multiprocessor; of high ranks squarer ones, which read factors less.
        rows, columns = (32, 128) if max(gate_rank, up_rank) <= 16 else (64, 64)
        _glu_lora_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns))](
            *(gate if dy is None else dy, gate, up, gate_h, gate_b, up_h, up_b, y, dup),
            *(0 if dy is None else dy.stride(0), gate.stride(0), up.stride(0), num_rows, num_columns),
            *(0.0 if low is None else low[2] for low in lows),
            GATE_RANK=gate_rank,
            UP_RANK=up_rank,
            GATE_PADDED=max(16, triton.next_power_of_2(gate_rank)),
            UP_PADDED=max(16, triton.next_power_of_2(up_rank)),
            ACTIVATION=activation,
            BACKWARD=dy is not None,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=8,
        )
        return
    # Each thread has 16 columns, two loads of 16 bytes.
    block = min(2048, triton.next_power_of_2(num_columns))
    num_warps = max(1, block // 512)
    grid = (num_rows * triton.cdiv(num_columns, block),)
    strides = gate.stride(0), up.stride(0)
    if dy is None:
        _glu_forward_kernel[grid](gate, up, y, *strides, num_columns, activation, block, num_warps=num_warps)
    else:
        tensors, dy_stride = (dy, gate, up, y, dup), dy.stride(0)
        _glu_backward_kernel[grid](
            *tensors, dy_stride, *strides, gradient_stride, num_columns, activation, block, num_warps=num_warps
        )


def _factors(low: Low | None, none: Tensor) -> tuple[Tensor, Tensor, int]:
    """A low-rank term's factors and its rank, which is 0 where there is none."""
    return (none, none, 0) if low is None else (low[0].contiguous(), low[1].contiguous(), low[0].shape[-1])
