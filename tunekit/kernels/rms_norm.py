"""RMSNorm, with the residual stream added to its input where there is one.

    s = x + residual, rounded to its type
    n = s * rstd,  rstd = 1 / sqrt(mean(s²) + eps)
    y = n * (offset + weight)

Its derivative, with g = dy * (offset + weight), and ds what the sum's other readers give:

    dx = dresidual = rstd * (g - n * mean(g * n)) + ds
    dweight = sum over rows of dy * n

Root mean square layer normalization: https://arxiv.org/abs/1910.07467.

Kept for the backward pass: s (which is x where there is no residual), one float32 per row, and the weight. The modules
of transformers keep float32 copies besides, and n where the weight is trained.

Precision: all is computed in float32. What models differ in is where they round, and that is what a `Casting` names.
Gradients are rounded once, at the end; the weight's are sums in float32, always in the same order. Autocast changes
nothing: there is no product of matrices, and the types are those of the tensors given.

One program normalises a row, or a few where they are short. In the backward pass a few programs per multiprocessor go
through all rows, and load the next ones while they work on some; each sums what its rows add to the weight's gradient,
unless the weight is frozen. On a CPU the operations are those of transformers' modules and of their derivatives, one by
one, so that results in float32 are the same bit for bit; `_backward_in_torch` says when gradients are.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from tunekit.kernels.backend import dense_rows, jit, num_multiprocessors, tl, triton, uses_triton

Casting = Literal["llama", "gemma", "float32"]
"""Point at which a model rounds.

- `llama`: n to the type of x, then its product with the weight to the type that both promote to. So do Llama, Mistral,
  Qwen, Phi 3, Granite, SmolLM 3, and most others.
- `float32`: only the product, to the type of x. So do OLMo 2 and 3, GPT-OSS, Nemotron and Gemma 4.
- `gemma`: the same, by the name of those that give it an offset of 1: Gemma to Gemma 3.
"""

MAX_COLUMNS = 16384
"""The widest row that a program can have in its registers. Norms of wider ones are computed by torch."""


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None, *, eps: float, offset: float = ..., casting: Casting = ..., residual: None = None
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None, *, eps: float, offset: float = ..., casting: Casting = ..., residual: Tensor
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    casting: Casting = "llama",
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The normalised rows of x; or those of x + residual, and that sum.

    Args:
        x: (..., columns).
        weight: (columns); None where the norm has no scale.
        eps: Added to the mean of squares.
        offset: Added to the weight.
        casting: Where results are rounded.
        residual: (..., columns), as x.
    """
    settings = (float(eps), float(offset), casting == "llama")
    y, total = _RmsNorm.apply(x, residual, weight, *settings)  # type: ignore[no-untyped-call]
    return y if residual is None else (y, total)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, rounds: bool
    ) -> tuple[Tensor, Tensor]:
        y, total, rstd = _rms_norm(x, residual, weight, eps, offset, rounds)
        ctx.save_for_backward(x if residual is None else total, weight, rstd)
        ctx.offset, ctx.types = offset, (x.dtype, None if residual is None else residual.dtype)
        return y, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy, dtotal), (total, weight, rstd), (x_type, residual_type) = gradients, ctx.saved_tensors, ctx.types
        learns = weight is not None and ctx.needs_input_grad[2]
        other = None if residual_type is None else dtotal
        dx, dweight = _rms_norm_backward(dy, other, total, weight, rstd, ctx.offset, learns)
        dresidual = None if residual_type is None else dx.to(residual_type)
        return dx.to(x_type), dresidual, dweight if learns else None, None, None, None


@torch.library.custom_op("tunekit::rms_norm", mutates_args=())
def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, rounds: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, the sum (empty without residual), and rstd of each row. `rounds`: before the weight is multiplied."""
    if uses_triton(x) and x.shape[-1] <= MAX_COLUMNS:
        return _launch_forward(x, residual, weight, eps, offset, rounds)
    total = x if residual is None else x + residual
    wide = total.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = wide * rstd
    y = y.to(total.dtype) if rounds else y
    y = y if weight is None else y * (weight.float() + offset)
    y = y.to(_type_of_norm(total.dtype, weight, rounds))
    return y.contiguous(), x.new_empty(0) if residual is None else total.contiguous(), rstd.flatten()


@_rms_norm.register_fake
def _outputs(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, rounds: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the outputs: norm, sum and rstd."""
    of_rows = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = x.new_empty(x.shape, dtype=_type_of_norm(of_rows, weight, rounds))
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape, dtype=of_rows)
    return y, total, x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


def _type_of_norm(of_rows: torch.dtype, weight: Tensor | None, rounds: bool) -> torch.dtype:
    return of_rows if weight is None or not rounds else torch.promote_types(of_rows, weight.dtype)


@torch.library.custom_op("tunekit::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, learns: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum, and of the weight, which is empty where it is not wanted."""
    if uses_triton(total) and _fits(total, learns):
        return _launch_backward(dy, dtotal, total, weight, rstd, offset, learns)
    return _backward_in_torch(dy, dtotal, total, weight, rstd, offset, learns)


@_rms_norm_backward.register_fake
def _(dy: Tensor, dtotal: object, total: Tensor, weight: Tensor | None, *given: object) -> tuple[Tensor, Tensor]:
    dweight = torch.empty_like(weight) if weight is not None and given[-1] else total.new_empty(0)
    return total.new_empty(total.shape), dweight


def _backward_in_torch(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, learns: bool
) -> tuple[Tensor, Tensor]:
    """The same in torch, by the formulas of its derivatives of `mul`, `rsqrt`, `mean` and `pow`, in their order.

    In float32 so are the gradients of transformers' modules, bit for bit. In 16 bit those are rounded after each
    operation, and these at the end. The terms of the sum's gradient are added in the order in which they come in a
    decoder layer: first those that passed by the norm.
    """
    wide, r = total.float(), rstd.view(*total.shape[:-1], 1)
    g = dy.float() if weight is None else dy.float() * (weight.float() + offset)
    dmean = -0.5 * (g * wide).sum(-1, keepdim=True) * r.pow(3) / total.shape[-1]
    dx = g * r if dtotal is None else dtotal + g * r
    dx = (dx + dmean * (2 * wide)).to(total.dtype).contiguous()
    if weight is None or not learns:
        return dx, total.new_empty(0)
    return dx, (dy.float() * (wide * r)).flatten(0, -2).sum(0).to(weight.dtype)


def _fits(total: Tensor, learns: bool) -> bool:
    """Return whether registers hold the backward pass: of the widest rows only 16-bit values, and no sums."""
    return total.shape[-1] <= (8192 if learns or total.element_size() > 2 else MAX_COLUMNS)


@jit
def _rms_norm_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr,
    x_stride, residual_stride, num_rows, num_columns, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUNDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norms of ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    here = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    written = rows[:, None] * num_columns + columns[None, :]
    s = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=here, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual_ptr + rows[:, None] * residual_stride + columns[None, :], mask=here, other=0.0).to(
            tl.float32
        )
        rounded = s.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + written, rounded, mask=here)
        s = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(s * s, 1) / num_columns + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    n = s * rstd[:, None]
    if ROUNDS:
        n = n.to(total_ptr.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
        n *= (weight + tl.cast(offset, tl.float32))[None, :]
    tl.store(y_ptr + written, n.to(y_ptr.dtype.element_ty), mask=here)


@jit
def _rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, dtotal_ptr, total_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr,
    dy_stride, dtotal_stride, total_stride, num_rows, num_columns, offset,
    HAS_TOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, WANTS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of every num_programs-th group of ROWS rows, and their share of the weight's, one row per program."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    if WANTS_WEIGHT:
        dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(program * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        here = (rows < num_rows)[:, None] & is_column[None, :]
        s = tl.load(total_ptr + rows[:, None] * total_stride + columns[None, :], mask=here, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns[None, :], mask=here, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        n = s * rstd
        if WANTS_WEIGHT:
            dweight += dy * n
        if HAS_WEIGHT:
            dy *= weight[None, :]
        dx = (dy - n * (tl.sum(dy * n, 1) / num_columns)[:, None]) * rstd
        if HAS_TOTAL:
            dx += tl.load(dtotal_ptr + rows[:, None] * dtotal_stride + columns[None, :], mask=here, other=0.0).to(
                tl.float32
            )
        tl.store(dx_ptr + rows[:, None] * num_columns + columns[None, :], dx.to(dx_ptr.dtype.element_ty), mask=here)
    if WANTS_WEIGHT:
        tl.store(dweight_ptr + program.to(tl.int64) * num_columns + columns, tl.sum(dweight, 0), mask=is_column)


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, rounds: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, rstd = _outputs(x, residual, weight, eps, offset, rounds)
    x, other = dense_rows(x), None if residual is None else dense_rows(residual)
    num_rows, num_columns = x.shape
    block = triton.next_power_of_2(num_columns)
    rows = max(1, 1024 // block)
    if num_rows:
        _rms_norm_forward_kernel[(triton.cdiv(num_rows, rows),)](
            *(x, x if other is None else other, x if weight is None else weight, y, total, rstd),
            *(x.stride(0), 0 if other is None else other.stride(0), num_rows, num_columns, eps, offset),
            HAS_RESIDUAL=other is not None,
            HAS_WEIGHT=weight is not None,
            ROUNDS=rounds,
            ROWS=rows,
            BLOCK=block,
            # Each thread has 16 values, or 32 of the widest rows, and loads 8 at once.
            num_warps=min(16, max(1, rows * block // 512)),
        )
    return y, total, rstd


def _launch_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, learns: bool
) -> tuple[Tensor, Tensor]:
    dx = total.new_empty(total.shape)
    dy, total, other = dense_rows(dy), dense_rows(total), None if dtotal is None else dense_rows(dtotal)
    num_rows, num_columns = total.shape
    block = triton.next_power_of_2(num_columns)
    rows = max(1, 4096 // block)
    # 8 warps have 128 registers each where two programs share a multiprocessor.
    per_multiprocessor, num_warps = (2, 8) if block <= 4096 else (1, 16)
    num_programs = min(triton.cdiv(num_rows, rows), per_multiprocessor * num_multiprocessors(total))
    # A program's sums are a row here. The sum of those is taken by torch, so that its order does not depend on timing.
    dweight = total.new_empty((num_programs if learns else 0, num_columns), dtype=torch.float32)
    # So many groups of rows are on their way as 96 KiB of shared memory hold, which is what sm_89 and sm_120 have.
    loaded_bytes = rows * block * sum(x.element_size() for x in (dy, total, other) if x is not None)
    if num_rows:
        _rms_norm_backward_kernel[(num_programs,)](
            *(dy, dy if other is None else other, total, total if weight is None else weight, rstd, dx, dweight),
            *(dy.stride(0), 0 if other is None else other.stride(0), total.stride(0), num_rows, num_columns, offset),
            HAS_TOTAL=other is not None,
            HAS_WEIGHT=weight is not None,
            WANTS_WEIGHT=learns,
            ROWS=rows,
            BLOCK=block,
            # What is prefetched of the widest rows would need registers that they do not leave.
            STAGES=min(3, 1 + 96 * 1024 // loaded_bytes) if block <= 8192 else 1,
            num_warps=num_warps,
        )
    if weight is None or not learns:
        return dx, total.new_empty(0)
    return dx, dweight.sum(0).to(weight.dtype)
