"""States of AdamW as codes of 8 and 4 bits with scales, in torch: bit by bit what its kernel computes.

Formats are told in `adamw`: small floating-point numbers in 8 bits, rounded at random, and the nearest of 16 values in
4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tunekit.kernels.adamw_kernel import BLOCK, LEAST_SCALE, M_LIMITS, M_SHARES

MANTISSA_BITS = 3

M_EXPONENTS, V_EXPONENTS = 16, 32
"""Powers of two below the largest value of a block that 8-bit numbers have."""


def encoded(x: Tensor, random: Tensor, exponents: int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes of float32 numbers, and the largest absolute value of each 256; `random` is as above."""
    scales = torch.nn.functional.pad(x.abs(), (0, -x.numel() % BLOCK)).view(-1, BLOCK).amax(-1)
    shares = x.abs() / _of_each(torch.where(scales > 0, scales, 1.0), x)
    least = 2.0 ** (1 - exponents)
    codes = ((shares.view(torch.int32) + (random << 4)) >> 20) - (_first(exponents) - 1)
    if signed:
        codes = torch.where(shares < least, (random * (least / 65536) < shares).int(), codes) + 128 * (x < 0)
    else:
        codes = torch.where(shares < least, (shares > 0).int(), codes)
    return codes.to(torch.uint8), scales


def decoded(codes: Tensor, scales: Tensor, exponents: int, *, signed: bool) -> Tensor:
    """The float32 numbers that codes stand for."""
    sizes = codes.int() & 127 if signed else codes.int()
    shares = ((sizes - 1 + _first(exponents)) << 20).view(torch.float32)
    numbers = torch.where(sizes > 0, shares, 0.0) * _of_each(scales, codes)
    return torch.where(codes > 127, -numbers, numbers) if signed else numbers


def encoded_4bit(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Two codes a byte of float32 numbers, the first one in its upper half, and scales of each 256."""
    scales = x.abs().view(-1, BLOCK).amax(-1).clamp(min=LEAST_SCALE)
    shares = x / scales.repeat_interleave(BLOCK)
    if signed:
        codes = torch.bucketize(shares, torch.tensor(M_LIMITS, device=x.device), right=True)
    else:
        codes = (shares * 16 - 0.5).int()
    return (codes[::2] << 4 | codes[1::2]).to(torch.uint8), scales


def decoded_4bit(packed: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 numbers that codes of 4 bits stand for."""
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).view(-1).int()
    if signed:
        table = [*(-share for share in reversed(M_SHARES[:-1])), 0.0, *M_SHARES]
    else:
        table = [(code + 1) / 16 for code in range(16)]
    return torch.tensor(table, device=packed.device)[codes] * scales.repeat_interleave(BLOCK)


def _first(exponents: int) -> int:
    """The least number's exponent and mantissa, as float32 has them."""
    return (128 - exponents) << MANTISSA_BITS


def _of_each(scales: Tensor, x: Tensor) -> Tensor:
    return scales.repeat_interleave(BLOCK)[: x.numel()]
