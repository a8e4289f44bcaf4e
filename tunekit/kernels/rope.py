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
        raise ValueError("pass both q_weight and k_weight, or neither")
    q, k, cos, sin = (_with_dense_rows(tensor) for tensor in (q, k, cos, sin))
    turned: tuple[Tensor, Tensor]
    if q_weight is None or k_weight is None:
        turned = _Rope.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
    else:
        norm = q_weight, k_weight, float(eps), float(offset), casting == "llama"
        turned = _QkNormRope.apply(q, k, cos, sin, *norm)  # type: ignore[no-untyped-call]
    return turned


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
        turned_q, turned_k, _, _ = _launch_forward(q, k, cos, sin, None, inverse)
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
        return _launch_forward(q, k, cos, sin, _Norms(q_weight, k_weight, eps, offset, llama), False)
    q_normed, q_rstd = _normed(q, q_weight, eps, offset, llama)
    k_normed, k_rstd = _normed(k, k_weight, eps, offset, llama)
    return _like(q, _turned(q_normed, cos, sin)), _like(k, _turned(k_normed, cos, sin)), q_rstd, k_rstd


@_qk_norm_rope.register_fake
def _(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
        norms = _Norms(q_weight, k_weight, 0.0, offset, llama)
        return _launch_backward((dq, dk), q, k, cos, sin, norms, (q_rstd, k_rstd), learns)
    dq, dq_weight = _normed_backward(_turned(dq, cos, -sin), q, q_weight, q_rstd, offset, llama)
    dk, dk_weight = _normed_backward(_turned(dk, cos, -sin), k, k_weight, k_rstd, offset, llama)
    none = dq_weight.new_empty(0)
    return _like(q, dq), _like(k, dk), *((dq_weight, dk_weight) if learns else (none, torch.empty_like(none)))


@_qk_norm_rope_backward.register_fake
def _(dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    learns = given[-1]
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
_Pair = tuple[Tensor, Tensor]


class _Norms(NamedTuple):
    """Norms of queries and keys."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float
    llama: bool


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _angle_strides(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Angles of the same strides, and these of batch and token: 0 where all rows have the same."""
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)


def _triton_type(dtype: torch.dtype) -> Any:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _constants(q: Tensor, k: Tensor, cos: Tensor, norms: _Norms | None) -> dict[str, Any]:
    """Constants of both kernels: sizes, blocks of rows, and the types that values are rounded to.

    Each thread has 8 values of a half, or of the rest: loads of 16 bytes.
    """
    half, tail_dim = cos.shape[-1] // 2, q.shape[-1] - cos.shape[-1]
    half_block = triton.next_power_of_2(half)
    rest_block = triton.next_power_of_2(tail_dim) if tail_dim else 0
    constants = {
        "HEAD_DIM": q.shape[3],
        "HALF": half,
        "ROWS": max(NUM_WARPS * 32 * 8 // max(half_block, rest_block), 1),
        "HALF_BLOCK": half_block,
        "REST_BLOCK": rest_block,
        "LLAMA": norms is not None and norms.llama,
    }
    for name, x, weight in (("Q", q, norms and norms.q_weight), ("K", k, norms and norms.k_weight)):
        normed = x.dtype
        if weight is not None and constants["LLAMA"]:
            normed = torch.promote_types(x.dtype, weight.dtype)
        constants[f"{name}_HEADS"] = x.shape[2]
        constants[f"{name}_NORMED"] = _triton_type(normed)
        constants[f"{name}_PRODUCT"] = _triton_type(torch.promote_types(normed, cos.dtype))
    return constants


def _launch_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: _Norms | None, inverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    turned_q, turned_k = torch.empty_like(q), torch.empty_like(k)
    q_rstd, k_rstd = (cos, cos) if norms is None else (_rstd_of(q), _rstd_of(k))
    constants = _constants(q, k, cos, norms)
    num_q_rows, num_k_rows = q.shape[:3].numel(), k.shape[:3].numel()
    num_q_blocks, num_k_blocks = (triton.cdiv(num_rows, constants["ROWS"]) for num_rows in (num_q_rows, num_k_rows))
    if num_q_blocks + num_k_blocks:
        cos, sin, *angle_strides = _angle_strides(cos, sin)
        q_weight, k_weight, eps, offset, _ = norms or (None, None, 0.0, 0.0, False)
        forward_kernel[(num_q_blocks + num_k_blocks,)](
            *(q, k, turned_q, turned_k, cos, sin, q_weight, k_weight, q_rstd, k_rstd),
            *_strides(q, k, turned_q, turned_k),
            *angle_strides,
            *(num_q_blocks, num_q_rows, num_k_rows, q.shape[1], eps, offset),
            NORMS=norms is not None,
            INVERSE=inverse,
            **constants,
            num_warps=NUM_WARPS,
        )
    return turned_q, turned_k, q_rstd, k_rstd


def _launch_backward(
    dturned: _Pair, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: _Norms, rstd: _Pair, learns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    constants = _constants(q, k, cos, norms)
    num_blocks = BLOCKS_THAT_LEARN if learns else 1
    num_q_rows, num_k_rows = q.shape[:3].numel(), k.shape[:3].numel()
    num_q_programs = triton.cdiv(num_q_rows, constants["ROWS"] * num_blocks)
    num_k_programs = triton.cdiv(num_k_rows, constants["ROWS"] * num_blocks)
    size = q.shape[-1] if learns else 0
    q_shares = q.new_empty((num_q_programs, size), dtype=torch.float32)
    k_shares = k.new_empty((num_k_programs, size), dtype=torch.float32)
    if num_q_programs + num_k_programs:
        cos, sin, *angle_strides = _angle_strides(cos, sin)
        tensors = *dturned, q, k, dq, dk
        backward_kernel[(num_q_programs + num_k_programs,)](
            *tensors,
            *(cos, sin, norms.q_weight, norms.k_weight, *rstd, q_shares, k_shares),
            *_strides(*tensors),
            *angle_strides,
            *(num_q_programs, num_q_rows, num_k_rows, q.shape[1], norms.offset),
            BLOCKS=num_blocks,
            LEARNS=learns,
            **constants,
            num_warps=NUM_WARPS,
        )
    return dq, dk, q_shares.sum(0), k_shares.sum(0)
