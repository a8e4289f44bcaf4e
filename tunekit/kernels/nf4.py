"""NF4 matrices, as bitsandbytes packs them, made dense in one pass.

A matrix is cut, row after row, into blocks of some 64 values. A block has its largest magnitude, absmax, and each value
is one of the 16 numbers of a code times it:

    value[i] = code[index[i]] * absmax[i // block_size]

Two indices share a byte, the first one in its upper half. With double quantisation the absmax are quantised
themselves, to 8 bits in blocks of 256, after their mean was taken off:

    absmax[j] = nested_code[absmax_index[j]] * nested_absmax[j // nested_block_size] + nested_offset

All of it is computed in float32, each operation rounded by itself, and the value rounded once to the type asked for:
the bits are those of bitsandbytes' dequantize_4bit, which takes two launches and the absmax through memory.

Source: QLoRA, https://arxiv.org/abs/2305.14314; bitsandbytes 0.50, backends/default/ops.py.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tunekit.kernels.backend import jit, tl, triton, uses_triton

__all__ = ["Quantized", "dequantize"]


@dataclass(frozen=True)
class Quantized:
    """A matrix in NF4.

    Attributes:
        packed: Indices, two a byte, in any shape; of another type than uint8 it is read as bytes.
        absmax: One a block: float32, or uint8 where they are quantised too.
        code: The 16 values of NF4, float32.
        block_size: Values a block.
        shape: Of the matrix: (out, in).
        dtype: Type in which products with the matrix are computed.
        nested_absmax: Of blocks of absmax, float32; None where absmax are not quantised. So are the next two.
        nested_code: The 256 values of a quantised absmax, float32.
        nested_offset: Mean of the absmax, float32, one element.
        nested_block_size: absmax a block.
        quant_type: bitsandbytes' name of the format. Only `nf4` is taken.
    """

    packed: Tensor
    absmax: Tensor
    code: Tensor
    block_size: int
    shape: tuple[int, int]
    dtype: torch.dtype
    nested_absmax: Tensor | None = None
    nested_code: Tensor | None = None
    nested_offset: Tensor | None = None
    nested_block_size: int = 256
    quant_type: str = "nf4"


def dequantize(matrix: Quantized, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """The matrix with its values written out, of shape (out, in).

    Args:
        matrix: What to write out.
        dtype: Type of the result. None is the one that products are computed in.
        out: Contiguous buffer of as many values, which is overwritten and returned in the matrix's shape; or None.

    Raises:
        ValueError: The format is not NF4, or the buffer does not fit.
    """
    if matrix.quant_type != "nf4":
        raise ValueError(f"quant_type is {matrix.quant_type!r}; only 'nf4' can be dequantised")
    num_values = prod(matrix.shape)
    if out is None:
        out = torch.empty(matrix.shape, dtype=dtype or matrix.dtype, device=matrix.packed.device)
    elif not out.is_contiguous() or out.numel() != num_values or (dtype is not None and out.dtype != dtype):
        raise ValueError(f"the buffer must be contiguous, of {num_values} values, and of the requested type")
    packed = matrix.packed.reshape(-1)
    _dequantize(
        *(out.view(-1), packed if packed.dtype == torch.uint8 else packed.view(torch.uint8)),
        *(matrix.absmax, matrix.code, matrix.block_size),
        *(matrix.nested_absmax, matrix.nested_code, matrix.nested_offset, matrix.nested_block_size),
    )
    return out.view(matrix.shape)


@torch.library.custom_op("tunekit::dequantize_nf4", mutates_args=("out",))
def _dequantize(
    out: Tensor,
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    block_size: int,
    nested_absmax: Tensor | None,
    nested_code: Tensor | None,
    nested_offset: Tensor | None,
    nested_block_size: int,
) -> None:
    """Write the values of an NF4 matrix into a flat buffer."""
    if uses_triton(out):
        num_blocks = max(1, 4096 // block_size)
        _dequantize_kernel[(triton.cdiv(out.numel(), num_blocks * block_size),)](
            *(out, packed, absmax, code, nested_absmax, nested_code, nested_offset, out.numel(), packed.numel()),
            BLOCK_SIZE=block_size,
            NUM_BLOCKS=num_blocks,
            NESTED=nested_absmax is not None,
            NESTED_BLOCK_SIZE=nested_block_size,
            num_warps=4,
            # Products and sums are not fused: their intermediate values are rounded too.
            enable_fp_fusion=False,
        )
        return
    if nested_absmax is not None:
        assert nested_code is not None and nested_offset is not None
        absmax = _times_blocks(nested_code[absmax.int()], nested_absmax, nested_block_size).add_(nested_offset)
    # A byte stands for two values: looked up in a table of all pairs, they come in order.
    pairs = torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=1)
    values = pairs[packed.int()].view(-1)[: out.numel()]
    out.copy_(_times_blocks(values, absmax, block_size))


@_dequantize.register_fake
def _(out: Tensor, *_: object) -> None:
    pass


def _times_blocks(values: Tensor, factors: Tensor, block_size: int) -> Tensor:
    """Multiply each block of flat values, the last one maybe shorter, by its factor, in place."""
    num_blocks = values.numel() // block_size
    whole = num_blocks * block_size
    values[:whole].view(-1, block_size).mul_(factors[:num_blocks, None])
    if whole < values.numel():
        values[whole:].mul_(factors[num_blocks])
    return values


@jit
def _dequantize_kernel(
    out, packed, absmax, code, nested_absmax, nested_code, nested_offset, num_values, num_bytes,
    BLOCK_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    NESTED: tl.constexpr, NESTED_BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A program writes NUM_BLOCKS blocks: their factors once a block, their indices two a byte."""
    block = tl.program_id(0).to(tl.int64) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    exists = block * BLOCK_SIZE < num_values
    factor = tl.load(absmax + block, mask=exists, other=0)
    if NESTED:
        factor = tl.load(nested_code + factor.to(tl.int32))
        factor = factor * tl.load(nested_absmax + block // NESTED_BLOCK_SIZE, mask=exists, other=0.0)
        factor = factor + tl.load(nested_offset)
    byte = block[:, None] * (BLOCK_SIZE // 2) + tl.arange(0, BLOCK_SIZE // 2)[None, :]
    pair = tl.load(packed + byte, mask=byte < num_bytes, other=0).to(tl.int32)
    value = tl.interleave(tl.load(code + (pair >> 4)), tl.load(code + (pair & 15))) * factor[:, None]
    position = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    tl.store(out + position, value.to(out.dtype.element_ty), mask=position < num_values)
