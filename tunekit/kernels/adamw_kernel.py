"""The Triton kernel of `adamw`: a program updates four tiles, each of four blocks of 256 values."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from tunekit.kernels.backend import jit, tl

BLOCK = 256
"""Values that share a scale in 8 bits."""

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
def adamw_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, gradient_scale_ptr, size, key,
    decay, step_size, rate1, beta2, rate2, root, eps,
    BLOCK: tl.constexpr, TILE: tl.constexpr, QUANTISED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """A group of values: their weights, and states in float32, bfloat16 or codes with scales, updated in place."""
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
        if QUANTISED:
            rows = tl.arange(0, TILE // BLOCK)[:, None]
            blocks = program * (4 * TILE // BLOCK) + tile * (TILE // BLOCK) + rows
            has_block = blocks * BLOCK < size
            m_codes = tl.load(m_ptr + at, mask=there, other=0)
            v_codes = tl.load(v_ptr + at, mask=there, other=0)
            m = _decoded(m_codes, tl.load(m_scale_ptr + blocks, mask=has_block, other=0.0), 16, True)
            v = _decoded(v_codes, tl.load(v_scale_ptr + blocks, mask=has_block, other=0.0), 32, False)
        else:
            m = tl.load(m_ptr + at, mask=there, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
        m = m + (g - m) * tl.cast(rate1, tl.float32)
        v = v * tl.cast(beta2, tl.float32) + g * g * tl.cast(rate2, tl.float32)
        root_v = tl.sqrt(v) / tl.cast(root, tl.float32) + tl.cast(eps, tl.float32)
        p = p * tl.cast(decay, tl.float32) - m / root_v * tl.cast(step_size, tl.float32)
        tl.store(p_ptr + at, _rounded(p, for_weights, p_ptr.dtype.element_ty), mask=there)
        if QUANTISED:
            m_codes, m_scales = _encoded(m, for_states, 16, True)
            v_codes, v_scales = _encoded(v, for_states, 32, False)
            tl.store(m_ptr + at, m_codes, mask=there)
            tl.store(v_ptr + at, v_codes, mask=there)
            tl.store(m_scale_ptr + blocks, m_scales, mask=has_block)
            tl.store(v_scale_ptr + blocks, v_scales, mask=has_block)
        else:
            tl.store(m_ptr + at, _rounded(m, for_states, m_ptr.dtype.element_ty), mask=there)
            tl.store(v_ptr + at, _rounded(v, for_states, v_ptr.dtype.element_ty), mask=there)
