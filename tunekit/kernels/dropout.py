"""Dropout without a saved mask: whether an element is dropped is a function of a seed and of where the element is.

    y[row, column] = x[row, column] / (1 - probability) where random(seed, place, row, column) >= probability, else 0

The random numbers are those of Philox 4x32-10, a cipher of counters: the counter (column // 4, row, place, 0), under
the 64 bits of the seed as key, is turned to four words of 32 bits for four neighbouring columns, of which 31 bits are
compared. `place` tells apart uses of one seed. All devices drop the same elements. As the gradient of x is the same
function of the gradient of y, nothing is saved but the seed.

Computed in float32, rounded once to x's type.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import torch
from torch import Tensor

from tunekit.kernels.backend import jit, tl, triton, uses_triton

__all__ = ["dropout", "dropout_factors", "philox"]


@torch.library.custom_op("tunekit::dropout", mutates_args=())
def dropout(x: Tensor, seed: Tensor, place: int, probability: float) -> Tensor:
    """The matrix with some of its elements dropped and the others made larger. Autograd does not know it.

    Args:
        x: (rows, columns).
        seed: int64, one element, on x's device.
        place: Tells apart the uses of one seed.
        probability: Share of the elements that are dropped, at least 0 and below 1.
    """
    if uses_triton(x):
        return _launch_dropout(x, seed, place, probability)
    return (x * dropout_factors(x, seed, place, probability)).to(x.dtype)


@dropout.register_fake
def _(x: Tensor, seed: Tensor, place: int, probability: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def dropout_factors(x: Tensor, seed: Tensor, place: int, probability: float) -> Tensor:
    """Return the factor of each element of x: 0, or 1 / (1 - probability).

    Args:
        x: (..., columns).
        seed: As for `dropout`; the next ones too.
        place: See there.
        probability: See there.

    Returns:
        float32, or float64 as x is, in the shape of x.
    """
    num_columns = x.shape[-1]
    row = torch.arange(x.numel() // max(num_columns, 1), device=x.device)[:, None]
    quarter = torch.arange((num_columns + 3) // 4, device=x.device)[None, :]
    counter = [quarter, row, torch.full_like(row, place), torch.zeros_like(row)]
    words = torch.stack(philox(counter, seed), dim=-1).view(row.shape[0], -1)[:, :num_columns]
    mask = (words >> 1) >= _threshold(probability)
    return (mask.to(torch.promote_types(x.dtype, torch.float32)) * (1 / (1 - probability))).view(x.shape)


def philox(counter: list[Tensor], seed: Tensor) -> list[Tensor]:
    """The four words of 32 bits, in int64, that counters of four words give under a key of 64 bits."""
    key = [_word(seed), _word(seed >> 32)]
    for _ in range(10):
        # Products of two words overflow, and keep their 64 bits.
        product, other = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            _word(other >> 32) ^ counter[1] ^ key[0],
            _word(other),
            _word(product >> 32) ^ counter[3] ^ key[1],
            _word(product),
        ]
        key = [_word(key[0] + 0x9E3779B9), _word(key[1] + 0xBB67AE85)]
    return counter


def _word(number: Tensor) -> Tensor:
    """The lower 32 bits."""
    return number & 0xFFFFFFFF


def _threshold(probability: float) -> int:
    """The random numbers of 31 bits below it drop their element."""
    return round(probability * 2**31)


def _launch_dropout(x: Tensor, seed: Tensor, place: int, probability: float) -> Tensor:
    """The kernel over rows and blocks of columns."""
    x = x.contiguous()
    y = torch.empty_like(x)
    num_rows, num_columns = x.shape
    if x.numel():
        block = min(2048, max(16, triton.next_power_of_2(num_columns)))
        grid = (num_rows, triton.cdiv(num_columns, block))
        threshold, factor = _threshold(probability), 1 / (1 - probability)
        _dropout_kernel[grid](y, x, seed, place, threshold, factor, num_columns, BLOCK=block, num_warps=4)
    return y


@jit
def _dropout_kernel(y, x, seed, place, threshold, factor, num_columns, BLOCK: tl.constexpr):
    """A program does a block of a row; four columns take the four words of a counter."""
    row = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    quarter = start // 4 + tl.arange(0, BLOCK // 4)
    zeros = quarter * 0
    first, second, third, fourth = tl.philox(tl.load(seed), quarter, zeros + row, zeros + place, zeros)
    words = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    column = start + tl.arange(0, BLOCK)
    position = row.to(tl.int64) * num_columns + column
    value = tl.load(x + position, mask=column < num_columns, other=0.0).to(tl.float32) * tl.cast(factor, tl.float32)
    mask = (words >> 1).to(tl.int32) >= threshold
    tl.store(y + position, tl.where(mask, value, 0.0).to(y.dtype.element_ty), mask=column < num_columns)
