"""Rotary positions of queries and keys, with the norm over each head before them where a model has one.

Of each head the first `rotary_dim` values are turned in pairs (x1 of the first half, x2 of the second) by an angle that
grows with the position, and the others stay as they are:

    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin

Its derivative is the same with -sin. The norm before it is that of `rms_norm`, over one head's values x with a weight
that all heads share, and its derivative:

    h = n * (offset + weight),  n = x * rstd,  rstd = 1 / sqrt(mean(x²) + eps)
    dx = rstd * (g - n * mean(g * n)),  g = dh * (offset + weight)
    dweight = sum over tokens and heads of dh * n

RoFormer: https://arxiv.org/abs/2104.09864. Norm of queries and keys: https://arxiv.org/abs/2010.04245.

Kept for the backward pass: cos and sin, which all layers share; with norms also q and k from before them, a float32 for
each head of each token, and the weights. Without norms nothing of q and k is kept.

Precision: results are rounded where those of transformers' modules are. The norm as its casting says; of the rotation
both products, to the type that x and cos promote to, and then the sum. What differs: the result has the type of q and k
always, where that of transformers is float32 if a weight or cos is; where cos is float32, gradients are rounded once;
sums for the gradients of weights are in float32 throughout, in a fixed order. Autocast changes nothing here.

One program turns some heads of a few tokens, of q or of k, so that each block's loads are wide; both are in one launch.
In the backward pass each sums its share of a weight's gradient, and the shares are added up after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tunekit.kernels.backend import tl, triton, uses_triton
from tunekit.kernels.rms_norm import Casting
from tunekit.kernels.rope_kernels import backward_kernel, forward_kernel


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    casting: Casting = "llama",
) -> tuple[Tensor, Tensor]:
    """Queries and keys at their positions, normalised before where weights are given.

    Args:
        q: (batch, seq, heads, head_dim), of any strides; views of a fused projection are read in place.
        k: (batch, seq, kv_heads, head_dim), of the type of q.
        cos: (batch or 1, seq, rotary_dim) as transformers makes it, where the second half repeats the first. Positions
            of packed rows come through it. It gets no gradient.
        sin: Like cos.
        q_weight: (head_dim); the norm's weight, or None where there is no norm.
        k_weight: The same of the keys. Both are given, or neither.
        eps: Added to the mean of squares.
        offset: Added to the weights.
        casting: Where the norms round.

    Returns:
        New tensors of the shapes and types of q and k.
    """
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight are given both, or neither")
    q, k, cos, sin = (_with_dense_rows(tensor) for tensor in (q, k, cos, sin))
    turned: tuple[Tensor, Tensor]
    if q_weight is None or k_weight is None:
        turned = _Rope.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
    else:
        norm = q_weight, k_weight, float(eps), float(offset), casting == "llama"
        turned = _QkNormRope.apply(q, k, cos, sin, *norm)  # type: ignore[no-untyped-call]
    return turned


def reference_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    casting: Casting = "llama",
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` in plain torch."""
    if q_weight is not None and k_weight is not None:
        q_normed, _ = _normed(q, q_weight, eps, offset, casting == "llama")
        k_normed, _ = _normed(k, k_weight, eps, offset, casting == "llama")
        return _turned(q_normed, cos, sin).to(q.dtype), _turned(k_normed, cos, sin).to(k.dtype)
    return _turned(q, cos, sin).to(q.dtype), _turned(k, cos, sin).to(k.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return torch.ops.tunekit.rope(q, k, cos, sin, False)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *torch.ops.tunekit.rope(_with_dense_rows(dq), _with_dense_rows(dk), cos, sin, True), None, None


class _QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        offset: float,
        llama: bool,
    ) -> tuple[Tensor, Tensor]:
        turned_q, turned_k, q_rstd, k_rstd = torch.ops.tunekit.qk_norm_rope(
            q, k, cos, sin, q_weight, k_weight, eps, offset, llama
        )
        ctx.save_for_backward(q, k, cos, sin, q_weight, k_weight, q_rstd, k_rstd)
        ctx.offset, ctx.llama = offset, llama
        return turned_q, turned_k

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        learns = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
        q, k, cos, sin, q_weight, k_weight, *rstd = ctx.saved_tensors
        dq, dk, dq_weight, dk_weight = torch.ops.tunekit.qk_norm_rope_backward(
            *(_with_dense_rows(dq), _with_dense_rows(dk), q, k, cos, sin, q_weight, k_weight, *rstd),
            *(ctx.offset, ctx.llama, learns),
        )
        return (
            *(dq, dk, None, None),
            dq_weight.to(q_weight.dtype) if ctx.needs_input_grad[4] else None,
            dk_weight.to(k_weight.dtype) if ctx.needs_input_grad[5] else None,
            *(None, None, None),
        )


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# The operations, each in plain torch where Triton does not run.


@torch.library.custom_op("tunekit::rope", mutates_args=())
def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their angles, or back again."""
    if uses_triton(q):
        turned_q, turned_k, _, _ = _launch_forward(q, k, cos, sin, None, None, 0.0, 0.0, False, inverse)
        return turned_q, turned_k
    sin = -sin if inverse else sin
    return _like(q, _turned(q, cos, sin)), _like(k, _turned(k, cos, sin))


@_rope.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


@torch.library.custom_op("tunekit::qk_norm_rope", mutates_args=())
def _qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    offset: float,
    llama: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys, normalised and turned, and what each head of theirs was scaled by: (batch, seq, heads)."""
    if uses_triton(q):
        return _launch_forward(q, k, cos, sin, q_weight, k_weight, eps, offset, llama, False)
    q_normed, q_rstd = _normed(q, q_weight, eps, offset, llama)
    k_normed, k_rstd = _normed(k, k_weight, eps, offset, llama)
    return _like(q, _turned(q_normed, cos, sin)), _like(k, _turned(k_normed, cos, sin)), q_rstd, k_rstd


@_qk_norm_rope.register_fake
def _(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    offset: float,
    llama: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), _rstd_of(q), _rstd_of(k)


@torch.library.custom_op("tunekit::qk_norm_rope_backward", mutates_args=())
def _qk_norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    offset: float,
    llama: bool,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries and keys, and where the weights learn, of the weights in float32; else these are empty."""
    if uses_triton(q):
        return _launch_backward(dq, dk, q, k, cos, sin, q_weight, k_weight, q_rstd, k_rstd, offset, llama, learns)
    dq, dq_weight = _normed_backward(_turned(dq, cos, -sin), q, q_weight, q_rstd, offset, llama)
    dk, dk_weight = _normed_backward(_turned(dk, cos, -sin), k, k_weight, k_rstd, offset, llama)
    none = dq_weight.new_empty(0)
    return (
        *(_like(q, dq), _like(k, dk)),
        *((dq_weight, dk_weight) if learns else (none, torch.empty_like(none))),
    )


@_qk_norm_rope_backward.register_fake
def _(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    offset: float,
    llama: bool,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = q.shape[-1] if learns else 0
    weights = (q.new_empty(size, dtype=torch.float32), k.new_empty(size, dtype=torch.float32))
    return torch.empty_like(q), torch.empty_like(k), *weights


def _rstd_of(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def _like(x: Tensor, values: Tensor) -> Tensor:
    """The values in a new tensor of the type and the order of x."""
    return torch.empty_like(x).copy_(values)


# In plain torch, rounded as transformers' modules are.


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = cos.shape[-1]
    pairs, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    x1, x2 = pairs.chunk(2, dim=-1)
    turned = pairs * cos.unsqueeze(2) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(2)
    return torch.cat((turned, tail), dim=-1) if tail.shape[-1] else turned


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float, llama: bool) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * rstd
    if llama:
        normed = normed.to(x.dtype) * (offset + weight if offset else weight)
    else:
        normed = (normed * (offset + weight.float())).to(x.dtype)
    return normed, rstd.squeeze(-1)


def _normed_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, llama: bool
) -> tuple[Tensor, Tensor]:
    rstd = rstd.unsqueeze(-1)
    normed = x.float() * rstd
    scale = offset + weight.float()
    if llama:
        dy = dy.to(torch.promote_types(x.dtype, weight.dtype))
        dweight = (dy.float() * normed.to(x.dtype)).sum((0, 1, 2))
        g = (dy * scale.to(weight.dtype)).to(x.dtype).float()
    else:
        dy = dy.to(x.dtype).float()
        dweight = (dy * normed).sum((0, 1, 2))
        g = dy * scale
    return rstd * (g - normed * (g * normed).mean(-1, keepdim=True)), dweight


# In Triton.

BLOCKS_THAT_LEARN = 8
"""Blocks that a program goes through where it sums shares of a weight's gradient: fewer shares to add up, and still
enough programs for any device. It is the same on all, so that gradients are too."""


NUM_WARPS = 4


class _Blocks(NamedTuple):
    """Partition of heads into blocks, so that each thread has 8 values of a half, or of the rest: loads of 16 bytes."""

    half: int
    half_block: int
    rest_block: int
    rows: int

    @classmethod
    def of(cls, head_dim: int, rotary_dim: int) -> _Blocks:
        half, tail_dim = rotary_dim // 2, head_dim - rotary_dim
        half_block = triton.next_power_of_2(half)
        rest_block = triton.next_power_of_2(tail_dim) if tail_dim else 0
        rows = max(NUM_WARPS * 32 * 8 // max(half_block, rest_block), 1)
        return cls(half, half_block, rest_block, rows)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _angle_strides(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Angles of the same strides, and these of batch and token: 0 where all rows have the same."""
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)


def _triton_type(*dtypes: torch.dtype) -> Any:
    """Return the promoted type of the inputs, as Triton names it."""
    promoted = dtypes[0]
    for dtype in dtypes[1:]:
        promoted = torch.promote_types(promoted, dtype)
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[promoted]


def _launch_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    offset: float,
    llama: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    norms = q_weight is not None
    turned_q, turned_k = torch.empty_like(q), torch.empty_like(k)
    q_rstd, k_rstd = (_rstd_of(q), _rstd_of(k)) if norms else (cos, cos)
    blocks = _Blocks.of(q.shape[-1], cos.shape[-1])
    num_q_rows, num_k_rows = q.shape[:3].numel(), k.shape[:3].numel()
    num_q_blocks, num_k_blocks = triton.cdiv(num_q_rows, blocks.rows), triton.cdiv(num_k_rows, blocks.rows)
    if num_q_blocks + num_k_blocks == 0:
        return turned_q, turned_k, q_rstd, k_rstd
    cos, sin, *angle_strides = _angle_strides(cos, sin)
    q_normed, k_normed = _normed_types(q, k, q_weight, k_weight, llama)
    forward_kernel[(num_q_blocks + num_k_blocks,)](
        *(q, k, turned_q, turned_k, cos, sin, q_weight, k_weight, q_rstd, k_rstd),
        *_strides(q, k, turned_q, turned_k),
        *angle_strides,
        *(num_q_blocks, num_q_rows, num_k_rows, q.shape[1], eps, offset),
        Q_HEADS=q.shape[2],
        K_HEADS=k.shape[2],
        HEAD_DIM=q.shape[3],
        HALF=blocks.half,
        ROWS=blocks.rows,
        HALF_BLOCK=blocks.half_block,
        REST_BLOCK=blocks.rest_block,
        NORMS=norms,
        LLAMA=llama,
        Q_NORMED=_triton_type(q_normed),
        K_NORMED=_triton_type(k_normed),
        Q_PRODUCT=_triton_type(q_normed, cos.dtype),
        K_PRODUCT=_triton_type(k_normed, cos.dtype),
        INVERSE=inverse,
        num_warps=NUM_WARPS,
    )
    return turned_q, turned_k, q_rstd, k_rstd


def _normed_types(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, llama: bool
) -> tuple[torch.dtype, torch.dtype]:
    """Return the types that the normalized values are rounded to."""
    if q_weight is None or k_weight is None or not llama:
        return q.dtype, k.dtype
    return torch.promote_types(q.dtype, q_weight.dtype), torch.promote_types(k.dtype, k_weight.dtype)


def _launch_backward(
    dturned_q: Tensor,
    dturned_k: Tensor,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    offset: float,
    llama: bool,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    blocks = _Blocks.of(q.shape[-1], cos.shape[-1])
    num_blocks = BLOCKS_THAT_LEARN if learns else 1
    num_q_rows, num_k_rows = q.shape[:3].numel(), k.shape[:3].numel()
    num_q_programs = triton.cdiv(num_q_rows, blocks.rows * num_blocks)
    num_k_programs = triton.cdiv(num_k_rows, blocks.rows * num_blocks)
    size = q.shape[-1] if learns else 0
    q_shares = q.new_empty((num_q_programs, size), dtype=torch.float32)
    k_shares = k.new_empty((num_k_programs, size), dtype=torch.float32)
    if num_q_programs + num_k_programs:
        cos, sin, *angle_strides = _angle_strides(cos, sin)
        q_normed, k_normed = _normed_types(q, k, q_weight, k_weight, llama)
        backward_kernel[(num_q_programs + num_k_programs,)](
            *(dturned_q, dturned_k, q, k, dq, dk, cos, sin, q_weight, k_weight, q_rstd, k_rstd, q_shares, k_shares),
            *_strides(dturned_q, dturned_k, q, k, dq, dk),
            *angle_strides,
            *(num_q_programs, num_q_rows, num_k_rows, q.shape[1], offset),
            Q_HEADS=q.shape[2],
            K_HEADS=k.shape[2],
            HEAD_DIM=q.shape[3],
            HALF=blocks.half,
            ROWS=blocks.rows,
            HALF_BLOCK=blocks.half_block,
            REST_BLOCK=blocks.rest_block,
            BLOCKS=num_blocks,
            LLAMA=llama,
            Q_NORMED=_triton_type(q_normed),
            K_NORMED=_triton_type(k_normed),
            Q_PRODUCT=_triton_type(q_normed, cos.dtype),
            K_PRODUCT=_triton_type(k_normed, cos.dtype),
            LEARNS=learns,
            num_warps=NUM_WARPS,
        )
    return dq, dk, q_shares.sum(0), k_shares.sum(0)
