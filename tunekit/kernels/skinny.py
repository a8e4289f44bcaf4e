"""The two products of a gradient with narrow matrices that the backward pass of LoRA needs, in one reading of it.

    p  = scale dy b                 (tokens, rank)
    db = scale dy^T h               (out, rank)

dy, (tokens, out), is large, and what is made of it is small: a matrix product for each would read it twice. A
program takes some columns of dy and many rows. It keeps its part of db in registers, and writes a part of p for each
block of rows. Another launch sums the parts, in the order of the programs: results do not depend on when programs run.

Precision: 16-bit operands, sums in float32; p is rounded once, db stays in float32. Operands of 32 bits, and ranks
above MAX_RANK, whose parts of p would be as large as dy, are left to torch's matrix products.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import torch
from torch import Tensor

from tunekit.kernels.backend import jit, num_multiprocessors, tl, triton, uses_triton

__all__ = ["MAX_RANK", "dual_skinny"]

MAX_RANK = 64
"""The largest rank that the kernel takes."""


@torch.library.custom_op("tunekit::dual_skinny", mutates_args=())
def dual_skinny(dy: Tensor, b: Tensor, h: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Both products. Autograd does not know it.

    Args:
        dy: (tokens, out).
        b: (out, rank), of dy's type.
        h: (tokens, rank), of dy's type.
        scale: Factor of both.

    Returns:
        p in dy's type, and db in float32, or float64 as dy is.
    """
    if uses_triton(dy) and dy.element_size() == 2 and b.shape[1] <= MAX_RANK:
        return _launch_dual_skinny(dy, b, h, scale)
    # In these forms BLAS on a CPU takes half the time and less for few columns.
    p = torch.nn.functional.linear(dy, b.T.contiguous()).mul_(scale)
    return p, (h.T @ dy).T.to(_sum_dtype(dy)).contiguous().mul_(scale)


@dual_skinny.register_fake
def _(dy: Tensor, b: Tensor, h: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape[0], b.shape[1]), dy.new_empty(b.shape, dtype=_sum_dtype(dy))


def _sum_dtype(dy: Tensor) -> torch.dtype:
    """Type that sums of dy are formed in."""
    return torch.promote_types(dy.dtype, torch.float32)


_BLOCK_TOKENS, _BLOCK_OUTPUTS = 64, 256
"""Rows and columns of a block of dy."""

_MIN_BLOCKS = 4
"""Blocks of rows that a program has at least: with fewer, the parts of db would be as large as what is read."""


def _launch_dual_skinny(dy: Tensor, b: Tensor, h: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The kernel, and the sum of what its programs found."""
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    b, h = b.contiguous(), h if h.stride(1) == 1 else h.contiguous()
    num_tokens, num_outputs, rank = *dy.shape, b.shape[1]
    p, db = dy.new_empty(num_tokens, rank), dy.new_empty(num_outputs, rank, dtype=torch.float32)
    if num_tokens == 0 or num_outputs == 0:
        return p, db.zero_()
    padded = max(16, triton.next_power_of_2(rank))
    num_columns = triton.cdiv(num_outputs, _BLOCK_OUTPUTS)
    num_blocks = triton.cdiv(num_tokens, _BLOCK_TOKENS)
    # Two programs fit in a multiprocessor. Twice as many take turns, so that their ends do not coincide.
    num_programs = 4 * num_multiprocessors(dy)
    blocks_a_program = max(_MIN_BLOCKS, triton.cdiv(num_blocks, max(1, num_programs // num_columns)))
    num_chunks = triton.cdiv(num_blocks, blocks_a_program)
    p_parts = dy.new_empty(num_columns, num_tokens, padded, dtype=torch.float32)
    db_parts = dy.new_empty(num_chunks, num_outputs, padded, dtype=torch.float32)
    _dual_skinny_kernel[(num_columns, num_chunks)](
        *(p_parts, db_parts, dy, b, h, num_tokens, num_outputs, dy.stride(0), blocks_a_program),
        RANK=rank,
        H_STRIDE=h.stride(0),
        BLOCK_RANK=padded,
        BLOCK_TOKENS=_BLOCK_TOKENS,
        BLOCK_OUTPUTS=_BLOCK_OUTPUTS,
        STAGES=2,
        num_warps=8,
    )
    block = 256
    p_programs = triton.cdiv(num_tokens * padded, block)
    grid = (p_programs + triton.cdiv(num_outputs * padded, block),)
    _sum_parts_kernel[grid](
        *(p, db, p_parts, db_parts, num_columns, num_chunks),
        *(num_tokens * padded, num_outputs * padded, p_programs, scale),
        RANK=rank,
        BLOCK_RANK=padded,
        BLOCK=block,
        BLOCK_PARTS=8,
        num_warps=4,
    )
    return p, db


@jit
def _dual_skinny_kernel(
    p_parts, db_parts, dy, b, h, num_tokens, num_outputs, dy_stride, blocks_a_program,
    RANK: tl.constexpr, H_STRIDE: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program goes through some blocks of rows of its columns."""
    column, chunk = tl.program_id(0), tl.program_id(1)
    output = column * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    place = tl.arange(0, BLOCK_RANK)
    narrow = place < RANK
    b_block = tl.load(
        b + output[:, None].to(tl.int64) * RANK + place[None, :],
        mask=(output < num_outputs)[:, None] & narrow[None, :],
        other=0.0,
    )
    db = tl.zeros((BLOCK_OUTPUTS, BLOCK_RANK), tl.float32)
    first = chunk * blocks_a_program * BLOCK_TOKENS
    for start in tl.range(first, first + blocks_a_program * BLOCK_TOKENS, BLOCK_TOKENS, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_TOKENS)
        exists = token < num_tokens
        token = token.to(tl.int64)
        dy_block = tl.load(
            dy + token[:, None] * dy_stride + output[None, :],
            mask=exists[:, None] & (output < num_outputs)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        h_block = tl.load(
            h + token[:, None] * H_STRIDE + place[None, :], mask=exists[:, None] & narrow[None, :], other=0.0
        )
        db = tl.dot(tl.trans(dy_block), h_block, db)
        p = tl.dot(dy_block, b_block)
        row = column.to(tl.int64) * num_tokens + token
        tl.store(p_parts + row[:, None] * BLOCK_RANK + place[None, :], p, mask=exists[:, None])
    row = chunk.to(tl.int64) * num_outputs + output
    tl.store(db_parts + row[:, None] * BLOCK_RANK + place[None, :], db, mask=(output < num_outputs)[:, None])


@jit
def _sum_parts_kernel(
    p, db, p_parts, db_parts, num_p_parts, num_db_parts,
    p_size, db_size, p_programs, scale,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """The first programs sum parts of p, the others parts of db; columns beyond the rank are left out."""
    program = tl.program_id(0)
    if program < p_programs:
        _sum_parts(p, p_parts, num_p_parts, p_size, program, scale, RANK, BLOCK_RANK, BLOCK, BLOCK_PARTS)
    else:
        _sum_parts(
            db, db_parts, num_db_parts, db_size, program - p_programs, scale, RANK, BLOCK_RANK, BLOCK, BLOCK_PARTS
        )


@jit
def _sum_parts(
    result,
    parts,
    num_parts,
    size,
    program,
    scale,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Write scale times the sum of the parts, (num_parts, size), for a block of places."""
    place = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK_PARTS, BLOCK), tl.float32)
    for start in range(0, num_parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        total += tl.load(
            parts + part[:, None].to(tl.int64) * size + place[None, :],
            mask=(part < num_parts)[:, None] & (place < size)[None, :],
            other=0.0,
        )
    value = tl.sum(total, 0) * tl.cast(scale, tl.float32)
    column = place % BLOCK_RANK
    tl.store(
        result + (place // BLOCK_RANK) * RANK + column,
        value.to(result.dtype.element_ty),
        mask=(place < size) & (column < RANK),
    )
