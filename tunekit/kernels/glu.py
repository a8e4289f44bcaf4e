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

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.kernels.backend import jit, tl, triton, uses_triton
from tunekit.kernels.skinny import MAX_RANK, dual_skinny

Activation = Literal["silu", "gelu_tanh", "gelu"]

Low = tuple[Tensor, Tensor, float]
"""A low-rank term: h (..., rank), b (columns, rank), and what their product is scaled with."""


def glu(gate: Tensor, up: Tensor, *, activation: Activation) -> Tensor:
    """activation(gate) * up, of tensors of the same shape and type, (..., columns). They may be strided views."""
    return _Glu.apply(gate, up, activation)  # type: ignore[no-any-return, no-untyped-call]


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
    factors = (gate_h, gate_b, up_h, up_b, float(gate_scale), float(up_scale))
    return _GluLora.apply(gate, up, *factors, activation)  # type: ignore[no-any-return, no-untyped-call]


def reference_glu(gate: Tensor, up: Tensor, *, activation: Activation) -> Tensor:
    """`glu` as one reads it."""
    return (_activated(gate.float(), activation) * up.float()).to(gate.dtype)


def reference_glu_lora(
    gate: Tensor, up: Tensor, gate_low: Low | None, up_low: Low | None, *, activation: Activation
) -> Tensor:
    """`glu_lora` as one reads it."""
    g, u = _added(gate.float(), gate_low), _added(up.float(), up_low)
    return reference_glu(g, u, activation=activation).to(gate.dtype)


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
    with _without_autocast(x):
        return x + (scale * (h.to(x.dtype) @ b.to(x.dtype).T)).view(x.shape)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Products in the types that are given, also in a backward pass that is called under autocast."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return cast(Tensor, _glu(gate, up, None, None, None, None, 0.0, 0.0, activation))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = _glu_backward(gradients[0], gate, up, None, None, None, None, 0.0, 0.0, ctx.activation)
        return dgate, dup, None


class _PackedGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        gate, up = gate_up.chunk(2, -1)
        return cast(Tensor, _glu(gate, up, None, None, None, None, 0.0, 0.0, activation))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        return _glu_packed_backward(gradients[0], gate_up, ctx.activation), None


class _GluLora(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        gate_h: Tensor | None,
        gate_b: Tensor | None,
        up_h: Tensor | None,
        up_b: Tensor | None,
        gate_scale: float,
        up_scale: float,
        activation: str,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, gate_h, gate_b, up_h, up_b)
        ctx.gate_scale, ctx.up_scale, ctx.activation = gate_scale, up_scale, activation
        factors = [None if x is None else x.to(gate.dtype) for x in (gate_h, gate_b, up_h, up_b)]
        return cast(Tensor, _glu(gate, up, *factors, gate_scale, up_scale, activation))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, *factors = ctx.saved_tensors
        gate_h, gate_b, up_h, up_b = [None if x is None else x.to(gate.dtype) for x in factors]
        dgate, dup = _glu_backward(
            gradients[0], gate, up, gate_h, gate_b, up_h, up_b, ctx.gate_scale, ctx.up_scale, ctx.activation
        )
        needs_grad = ctx.needs_input_grad
        of_gate = _low_rank_gradients(dgate, gate_h, gate_b, ctx.gate_scale) if any(needs_grad[2:4]) else (None, None)
        of_up = _low_rank_gradients(dup, up_h, up_b, ctx.up_scale) if any(needs_grad[4:6]) else (None, None)
        of_factors = [
            gradient.to(factor.dtype).view(factor.shape) if needs and gradient is not None else None
            for gradient, factor, needs in zip((*of_gate, *of_up), factors, needs_grad[2:6], strict=True)
        ]
        return dgate, dup, *of_factors, None, None, None


def _low_rank_gradients(
    dx: Tensor, h: Tensor | None, b: Tensor | None, scale: float
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of h and b, where there are such."""
    if h is None or b is None:
        return None, None
    with _without_autocast(dx):
        dh, db = dual_skinny(dx.flatten(0, -2), b, h.flatten(0, -2), scale)
        return dh, db


@torch.library.custom_op("tunekit::glu", mutates_args=())
def _glu(
    gate: Tensor,
    up: Tensor,
    gate_h: Tensor | None,
    gate_b: Tensor | None,
    up_h: Tensor | None,
    up_b: Tensor | None,
    gate_scale: float,
    up_scale: float,
    activation: str,
) -> Tensor:
    if uses_triton(gate):
        return _launch_forward(gate, up, gate_h, gate_b, up_h, up_b, gate_scale, up_scale, activation)
    g, u = _sums(gate, up, gate_h, gate_b, up_h, up_b, gate_scale, up_scale)
    return (_activated(g, activation) * u).to(gate.dtype).contiguous()


@_glu.register_fake
def _(
    gate: Tensor,
    up: Tensor,
    gate_h: Tensor | None,
    gate_b: Tensor | None,
    up_h: Tensor | None,
    up_b: Tensor | None,
    gate_scale: float,
    up_scale: float,
    activation: str,
) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("tunekit::glu_backward", mutates_args=())
def _glu_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_h: Tensor | None,
    gate_b: Tensor | None,
    up_h: Tensor | None,
    up_b: Tensor | None,
    gate_scale: float,
    up_scale: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    if uses_triton(gate):
        lows = (gate_h, gate_b, up_h, up_b, gate_scale, up_scale)
        _launch_backward(dy, gate, up, *lows, activation, dgate, dup)
        return dgate, dup
    g, u = _sums(gate, up, gate_h, gate_b, up_h, up_b, gate_scale, up_scale)
    return dgate.copy_(_derivative(dy.float() * u, g, activation)), dup.copy_(dy.float() * _activated(g, activation))


@_glu_backward.register_fake
def _(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_h: Tensor | None,
    gate_b: Tensor | None,
    up_h: Tensor | None,
    up_b: Tensor | None,
    gate_scale: float,
    up_scale: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


@torch.library.custom_op("tunekit::glu_packed_backward", mutates_args=())
def _glu_packed_backward(dy: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """The gradient of both in one tensor."""
    gradient = gate_up.new_empty(gate_up.shape)
    (gate, up), (dgate, dup) = gate_up.chunk(2, -1), gradient.chunk(2, -1)
    if uses_triton(gate_up):
        _launch_backward(dy, gate, up, None, None, None, None, 0.0, 0.0, activation, dgate, dup)
    else:
        dgate.copy_(_derivative(dy.float() * up.float(), gate.float(), activation))
        dup.copy_(dy.float() * _activated(gate.float(), activation))
    return gradient


@_glu_packed_backward.register_fake
def _(dy: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _sums(
    gate: Tensor,
    up: Tensor,
    gate_h: Tensor | None,
    gate_b: Tensor | None,
    up_h: Tensor | None,
    up_b: Tensor | None,
    gate_scale: float,
    up_scale: float,
) -> tuple[Tensor, Tensor]:
    """Gate and up with their low-rank terms, in float32."""
    g = _added(gate.float(), None if gate_h is None or gate_b is None else (gate_h, gate_b, gate_scale))
    return g, _added(up.float(), None if up_h is None or up_b is None else (up_h, up_b, up_scale))


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
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    num_columns,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
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
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    gradient_stride,
    num_columns,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    dy_ptr,
    gate_ptr,
    up_ptr,
    gate_h_ptr,
    gate_b_ptr,
    up_h_ptr,
    up_b_ptr,
    y_ptr,
    dup_ptr,
    dy_stride,
    gate_stride,
    up_stride,
    num_rows,
    num_columns,
    gate_scale,
    up_scale,
    GATE_RANK: tl.constexpr,
    UP_RANK: tl.constexpr,
    GATE_PADDED: tl.constexpr,
    UP_PADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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


def _rows(x: Tensor) -> Tensor:
    """As (rows, columns) with neighbouring columns side by side; a copy only where there is no such view."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _block(num_columns: int) -> tuple[int, int]:
    """Columns of a program without low-rank terms, and its warps: each thread has 16 of them, two loads of 16 bytes."""
    block = min(2048, triton.next_power_of_2(num_columns))
    return block, max(1, block // 512)


def _launch_forward(
    gate: Tensor,
    up: Tensor,
    gate_h: Tensor | None,
    gate_b: Tensor | None,
    up_h: Tensor | None,
    up_b: Tensor | None,
    gate_scale: float,
    up_scale: float,
    activation: str,
) -> Tensor:
    y = gate.new_empty(gate.shape)
    if not y.numel():
        return y
    if gate_h is not None or up_h is not None:
        _launch_lora(None, gate, up, gate_h, gate_b, up_h, up_b, gate_scale, up_scale, activation, y, y)
        return y
    gate, up = _rows(gate), _rows(up)
    num_rows, num_columns = gate.shape
    block, num_warps = _block(num_columns)
    _glu_forward_kernel[(num_rows * triton.cdiv(num_columns, block),)](
        gate, up, y, gate.stride(0), up.stride(0), num_columns, activation, block, num_warps=num_warps
    )
    return y


def _launch_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_h: Tensor | None,
    gate_b: Tensor | None,
    up_h: Tensor | None,
    up_b: Tensor | None,
    gate_scale: float,
    up_scale: float,
    activation: str,
    dgate: Tensor,
    dup: Tensor,
) -> None:
    """Write gradients of gate and up to tensors, which have the same strides."""
    if not dy.numel():
        return
    if gate_h is not None or up_h is not None:
        _launch_lora(dy, gate, up, gate_h, gate_b, up_h, up_b, gate_scale, up_scale, activation, dgate, dup)
        return
    dy, gate, up = _rows(dy), _rows(gate), _rows(up)
    num_rows, num_columns = gate.shape
    block, num_warps = _block(num_columns)
    _glu_backward_kernel[(num_rows * triton.cdiv(num_columns, block),)](
        dy,
        gate,
        up,
        dgate,
        dup,
        dy.stride(0),
        gate.stride(0),
        up.stride(0),
        dgate.stride(-2) if dgate.dim() > 1 else num_columns,
        num_columns,
        activation,
        block,
        num_warps=num_warps,
    )


def _launch_lora(
    dy: Tensor | None,
    gate: Tensor,
    up: Tensor,
    gate_h: Tensor | None,
    gate_b: Tensor | None,
    up_h: Tensor | None,
    up_b: Tensor | None,
    gate_scale: float,
    up_scale: float,
    activation: str,
    y: Tensor,
    dup: Tensor,
) -> None:
    gate, up, dy = _rows(gate), _rows(up), None if dy is None else _rows(dy)
    num_rows, num_columns = gate.shape
    of_gate, of_up = (_factors(gate, gate_h, gate_b), _factors(gate, up_h, up_b))
    # Small tiles, of which several are on a multiprocessor; of higher ranks squarer ones, which read the factors less.
    rows, columns = (32, 128) if max(of_gate[2], of_up[2]) <= 16 else (64, 64)
    _glu_lora_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns))](
        gate if dy is None else dy,
        gate,
        up,
        of_gate[0],
        of_gate[1],
        of_up[0],
        of_up[1],
        y,
        dup,
        0 if dy is None else dy.stride(0),
        gate.stride(0),
        up.stride(0),
        num_rows,
        num_columns,
        gate_scale,
        up_scale,
        GATE_RANK=of_gate[2],
        UP_RANK=of_up[2],
        GATE_PADDED=max(16, triton.next_power_of_2(of_gate[2])),
        UP_PADDED=max(16, triton.next_power_of_2(of_up[2])),
        ACTIVATION=activation,
        BACKWARD=dy is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=8,
    )


def _factors(none: Tensor, h: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """A low-rank term's factors and its rank, which is 0 where there is none."""
    if h is None or b is None:
        return none, none, 0
    return h.contiguous(), b.contiguous(), h.shape[-1]
