"""The Triton kernel of `adamw`: a program updates four tiles, each of four blocks of 256 values."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from tunekit.kernels.backend import jit, tl

BLOCK = 256
"""Values that share a scale."""

LEAST_SCALE = 1e-12
"""Scale of blocks in 4 bits whose values are all smaller."""

M_SHARES = (0.0055, 0.032500003, 0.0775, 0.21249999, 0.4375, 0.6625, 0.8875, 1.0)
"""Sizes that m has in 4 bits, of the scale; but for the last one also with a minus, and 0 between: 16 values. They are
the means of neighbours that divide 0.001 to 0.01 once, to 0.1 twice and to 1 four times (the dynamic map of
https://arxiv.org/abs/2110.02861 with 3 bits of exponent), as float32 numbers come out."""

_NEGATIVE = (-0.775, -0.55, -0.325, -0.145, -0.055, -0.019000001, -0.00275)
M_LIMITS = (*_NEGATIVE, 0.00275, 0.019000001, 0.055000003, 0.145, 0.32500002, 0.55, 0.77500004, 0.94375)
"""Least number that each value of m in 4 bits but the first stands for: the middle of it and the one below, where their
float32 difference is at least half of theirs."""

TILE = 4 * BLOCK
"""Values that a program has in registers at once: 8 in each of 128 threads, so that loads have 16 bytes."""

GROUP = 4 * TILE
"""Values of a program, and of the random numbers that a tile's counters give."""


@jit
def _rounded(x, random, dtype: tl.constexpr):
    """Numbers rounded at random to bfloat16, or as they are."""
    if dtype == tl.bfloat16:
        x = ((x.to(tl.int32, bitcast=True) + random) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@jit
def _decoded(codes, scales, EXPONENTS: tl.constexpr, SIGNED: tl.constexpr):
    codes = codes.to(tl.int32)
    sizes = codes & 127 if SIGNED else codes
    shares = ((sizes - 1 + ((128 - EXPONENTS) << 3)) << 20).to(tl.float32, bitcast=True)
    numbers = tl.where(sizes > 0, shares, 0.0) * scales
    return tl.where(codes > 127, -numbers, numbers) if SIGNED else numbers


@jit
def _encoded(x, random, EXPONENTS: tl.constexpr, SIGNED: tl.constexpr):
    """Codes of (blocks, 256) numbers, and the largest absolute value of each block: (blocks, 1)."""
    LEAST: tl.constexpr = 2.0 ** (1 - EXPONENTS)
    scales = tl.max(tl.abs(x), axis=1)[:, None]
    shares = tl.div_rn(tl.abs(x), tl.where(scales > 0, scales, 1.0).broadcast_to(x.shape))
    codes = ((shares.to(tl.int32, bitcast=True) + (random << 4)) >> 20) - (((128 - EXPONENTS) << 3) - 1)
    if SIGNED:
        small = (random.to(tl.float32) * (LEAST / 65536) < shares).to(tl.int32)
        codes = tl.where(shares < LEAST, small, codes) + tl.where(x < 0, 128, 0)
    else:
        codes = tl.where(shares < LEAST, (shares > 0).to(tl.int32), codes)
    return codes.to(tl.uint8), scales


@jit
def _decoded_4bit(packed, scales, SIGNED: tl.constexpr, SHARES: tl.constexpr):
    """Numbers of (blocks, 128) bytes, of which the upper half is the first one's code."""
    packed = packed.to(tl.int32)
    codes = tl.interleave(packed >> 4, packed & 15)
    if SIGNED:
        sizes = tl.abs(codes - 7)
        shares = tl.where(sizes == 1, SHARES[0], 0.0)
        for at in tl.static_range(1, 8):
            shares = tl.where(sizes == at + 1, SHARES[at], shares)
        shares = tl.where(codes < 7, -shares, shares)
    else:
        shares = (codes + 1).to(tl.float32) * 0.0625
    return shares * scales


@jit
def _encoded_4bit(x, SIGNED: tl.constexpr, LIMITS: tl.constexpr, LEAST: tl.constexpr):
    """Bytes of (blocks, 256) numbers, and the largest absolute value of each block: (blocks, 1)."""
    scales = tl.maximum(tl.max(tl.abs(x), axis=1)[:, None], LEAST)
    shares = tl.div_rn(x, scales.broadcast_to(x.shape))
    if SIGNED:
        codes = (shares >= LIMITS[0]).to(tl.int32)
        for at in tl.static_range(1, 15):
            codes += (shares >= LIMITS[at]).to(tl.int32)
    else:
        codes = (shares * 16 - 0.5).to(tl.int32)
    upper, lower = tl.split(tl.reshape(codes, (x.shape[0], x.shape[1] // 2, 2)))
    return ((upper << 4) | lower).to(tl.uint8), scales


@jit
def adamw_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, gradient_scale_ptr, size, key,
    decay, step_size, rate1, beta2, rate2, root, eps,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr,
    SHARES: tl.constexpr, LIMITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """A group of values: their weights, and states in float32, bfloat16 or codes with scales, updated in place.

    Whole blocks have codes in 4 bits.
    """
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    counters = (program * TILE + lanes).to(tl.int32)
    zeros = tl.zeros_like(counters)
    words = tl.philox(key, counters, zeros, zeros, zeros)
    for tile in tl.static_range(4):
        at = program * 4 * TILE + tile * TILE + lanes
        there = at < size
        word = words[tile]
        for_weights = (word & 0xFFFF).to(tl.int32)
        for_states = (word >> 16).to(tl.int32)
        p = tl.load(p_ptr + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at, mask=there, other=0.0).to(tl.float32)
        if SCALED:
            g = g * tl.load(gradient_scale_ptr).to(tl.float32)
        if BITS > 0:
            rows = tl.arange(0, TILE // BLOCK)[:, None]
            blocks = program * (4 * TILE // BLOCK) + tile * (TILE // BLOCK) + rows
            has_block = blocks * BLOCK < size
            m_scales = tl.load(m_scale_ptr + blocks, mask=has_block, other=0.0)
            v_scales = tl.load(v_scale_ptr + blocks, mask=has_block, other=0.0)
        if BITS == 4:
            pairs = blocks * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            m = _decoded_4bit(tl.load(m_ptr + pairs, mask=has_block, other=0), m_scales, True, SHARES)
            v = _decoded_4bit(tl.load(v_ptr + pairs, mask=has_block, other=0), v_scales, False, SHARES)
        elif BITS == 8:
            m = _decoded(tl.load(m_ptr + at, mask=there, other=0), m_scales, 16, True)
            v = _decoded(tl.load(v_ptr + at, mask=there, other=0), v_scales, 32, False)
        else:
            m = tl.load(m_ptr + at, mask=there, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
        m = m + (g - m) * tl.cast(rate1, tl.float32)
        v = v * tl.cast(beta2, tl.float32) + g * g * tl.cast(rate2, tl.float32)
        root_v = tl.sqrt(v) / tl.cast(root, tl.float32) + tl.cast(eps, tl.float32)
        p = p * tl.cast(decay, tl.float32) - m / root_v * tl.cast(step_size, tl.float32)
        tl.store(p_ptr + at, _rounded(p, for_weights, p_ptr.dtype.element_ty), mask=there)
        if BITS > 0:
            if BITS == 4:
                m_codes, m_scales = _encoded_4bit(m, True, LIMITS, LEAST)
                v_codes, v_scales = _encoded_4bit(v, False, LIMITS, LEAST)
                tl.store(m_ptr + pairs, m_codes, mask=has_block)
                tl.store(v_ptr + pairs, v_codes, mask=has_block)
            else:
                m_codes, m_scales = _encoded(m, for_states, 16, True)
                v_codes, v_scales = _encoded(v, for_states, 32, False)
                tl.store(m_ptr + at, m_codes, mask=there)
                tl.store(v_ptr + at, v_codes, mask=there)
            tl.store(m_scale_ptr + blocks, m_scales, mask=has_block)
            tl.store(v_scale_ptr + blocks, v_scales, mask=has_block)
        else:
            tl.store(m_ptr + at, _rounded(m, for_states, m_ptr.dtype.element_ty), mask=there)
            tl.store(v_ptr + at, _rounded(v, for_states, v_ptr.dtype.element_ty), mask=there)
