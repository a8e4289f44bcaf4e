"""The Triton kernels of `rope`: a row is one head of one token, and rows of a token's heads are next to each other."""

# ruff: noqa: ANN201
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from tunekit.kernels.backend import jit, tl


@jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@jit
def _rows_of(block, seq, batch_stride, token_stride, head_stride, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Return the start of each of a block's rows in a tensor of these strides."""
    rows = block * ROWS + tl.arange(0, ROWS)
    tokens = rows // HEADS
    heads = (rows - tokens * HEADS).to(tl.int64)
    batch = tokens // seq
    positions = (tokens - batch * seq).to(tl.int64)
    return (batch.to(tl.int64) * batch_stride + positions * token_stride + heads * head_stride)[:, None]


@jit
def _scaled(x, rstd, pointers, mask, offset, X: tl.constexpr, NORMED: tl.constexpr, LLAMA: tl.constexpr):
    """Normalised values, rounded as their casting says."""
    scale = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    normed = x * rstd[:, None]
    if LLAMA:
        normed = _rounded(normed, X)
        scale = _rounded(scale, pointers.dtype.element_ty)
    return _rounded(normed * scale, NORMED)


@jit
def _turn(x1, x2, cos, sin, PRODUCT: tl.constexpr):
    y1 = _rounded(x1 * cos, PRODUCT) - _rounded(x2 * sin, PRODUCT)
    y2 = _rounded(x2 * cos, PRODUCT) + _rounded(x1 * sin, PRODUCT)
    return y1, y2


@jit
def _forward_block(
    block, num_rows, seq,
    x_ptr, x_batch, x_token, x_head,
    y_ptr, y_batch, y_token, y_head,
    cos_ptr, sin_ptr, angle_batch, angle_token,
    weight_ptr, rstd_ptr, eps, offset,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    NORMS: tl.constexpr, LLAMA: tl.constexpr, NORMED: tl.constexpr, PRODUCT: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    X: tl.constexpr = x_ptr.dtype.element_ty
    Y: tl.constexpr = y_ptr.dtype.element_ty
    rows = block * ROWS + tl.arange(0, ROWS)
    weight_ptrs = weight_ptr + tl.zeros((ROWS, 1), tl.int32) if NORMS else weight_ptr
    x_ptrs = x_ptr + _rows_of(block, seq, x_batch, x_token, x_head, HEADS, ROWS)
    y_ptrs = y_ptr + _rows_of(block, seq, y_batch, y_token, y_head, HEADS, ROWS)
    angles = _rows_of(block, seq, angle_batch, angle_token, 0, HEADS, ROWS)
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < HALF)
    tail_offsets = 2 * HALF + tl.arange(0, max(REST_BLOCK, 1))[None, :]
    other_mask = (rows < num_rows)[:, None] & (tail_offsets < HEAD_DIM)
    x1 = tl.load(x_ptrs + columns, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + HALF + columns, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + angles + columns, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angles + columns, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    if REST_BLOCK:
        tail_values = tl.load(x_ptrs + tail_offsets, mask=other_mask, other=0.0).to(tl.float32)
    if NORMS:
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        if REST_BLOCK:
            squares += tl.sum(tail_values * tail_values, axis=1)
        rstd = tl.rsqrt(squares / HEAD_DIM + tl.cast(eps, tl.float32))
        tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
        x1 = _scaled(x1, rstd, weight_ptrs + columns, mask, offset, X, NORMED, LLAMA)
        x2 = _scaled(x2, rstd, weight_ptrs + HALF + columns, mask, offset, X, NORMED, LLAMA)
        if REST_BLOCK:
            tail_values = _scaled(tail_values, rstd, weight_ptrs + tail_offsets, other_mask, offset, X, NORMED, LLAMA)
    y1, y2 = _turn(x1, x2, cos, sin, PRODUCT)
    tl.store(y_ptrs + columns, y1.to(Y), mask=mask)
    tl.store(y_ptrs + HALF + columns, y2.to(Y), mask=mask)
    if REST_BLOCK:
        tl.store(y_ptrs + tail_offsets, tail_values.to(Y), mask=other_mask)


@jit
def forward_kernel(
    q_ptr, k_ptr, turned_q_ptr, turned_k_ptr,
    cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_rstd_ptr, k_rstd_ptr,
    q_batch, q_token, q_head,
    k_batch, k_token, k_head,
    turned_q_batch, turned_q_token, turned_q_head,
    turned_k_batch, turned_k_token, turned_k_head,
    angle_batch, angle_token,
    num_q_blocks, num_q_rows, num_k_rows, seq, eps, offset,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    NORMS: tl.constexpr, LLAMA: tl.constexpr,
    Q_NORMED: tl.constexpr, K_NORMED: tl.constexpr,
    Q_PRODUCT: tl.constexpr, K_PRODUCT: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """A block of q's rows, or after these, one of k's."""
    block = tl.program_id(0)
    if block < num_q_blocks:
        _forward_block(
            block, num_q_rows, seq,
            q_ptr, q_batch, q_token, q_head,
            turned_q_ptr, turned_q_batch, turned_q_token, turned_q_head,
            cos_ptr, sin_ptr, angle_batch, angle_token,
            q_weight_ptr, q_rstd_ptr, eps, offset,
            Q_HEADS, HEAD_DIM, HALF, ROWS, HALF_BLOCK, REST_BLOCK, NORMS, LLAMA, Q_NORMED, Q_PRODUCT, INVERSE,
        )  # fmt: skip
    else:
        _forward_block(
            block - num_q_blocks, num_k_rows, seq,
            k_ptr, k_batch, k_token, k_head,
            turned_k_ptr, turned_k_batch, turned_k_token, turned_k_head,
            cos_ptr, sin_ptr, angle_batch, angle_token,
            k_weight_ptr, k_rstd_ptr, eps, offset,
            K_HEADS, HEAD_DIM, HALF, ROWS, HALF_BLOCK, REST_BLOCK, NORMS, LLAMA, K_NORMED, K_PRODUCT, INVERSE,
        )  # fmt: skip


@jit
def _gradient(dh, normed, pointers, mask, offset, X: tl.constexpr, LLAMA: tl.constexpr):
    """Of the normalised values, before the mean over the row is taken off; and the share of the weight's gradient."""
    scale = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + tl.cast(offset, tl.float32)
    if LLAMA:
        scale = _rounded(scale, pointers.dtype.element_ty)
        return _rounded(dh * scale, X), dh * _rounded(normed, X)
    return dh * scale, dh * normed


@jit
def _backward_block(
    program, num_rows, seq,
    dy_ptr, dy_batch, dy_token, dy_head,
    x_ptr, x_batch, x_token, x_head,
    dx_ptr, dx_batch, dx_token, dx_head,
    cos_ptr, sin_ptr, angle_batch, angle_token,
    weight_ptr, rstd_ptr, share_ptr, offset,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LLAMA: tl.constexpr, NORMED: tl.constexpr, PRODUCT: tl.constexpr,
    LEARNS: tl.constexpr,
):  # fmt: skip
    X: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    tail_offsets = 2 * HALF + tl.arange(0, max(REST_BLOCK, 1))[None, :]
    weight_ptrs = weight_ptr + tl.zeros((ROWS, 1), tl.int32)
    share1 = tl.zeros((ROWS, HALF_BLOCK), tl.float32)
    share2 = tl.zeros((ROWS, HALF_BLOCK), tl.float32)
    share_rest = tl.zeros((ROWS, max(REST_BLOCK, 1)), tl.float32)
    for i in range(BLOCKS):
        block = program * BLOCKS + i
        rows = block * ROWS + tl.arange(0, ROWS)
        dy_ptrs = dy_ptr + _rows_of(block, seq, dy_batch, dy_token, dy_head, HEADS, ROWS)
        x_ptrs = x_ptr + _rows_of(block, seq, x_batch, x_token, x_head, HEADS, ROWS)
        dx_ptrs = dx_ptr + _rows_of(block, seq, dx_batch, dx_token, dx_head, HEADS, ROWS)
        angles = _rows_of(block, seq, angle_batch, angle_token, 0, HEADS, ROWS)
        there = (rows < num_rows)[:, None]
        mask = there & (columns < HALF)
        other_mask = there & (tail_offsets < HEAD_DIM)
        dy1 = tl.load(dy_ptrs + columns, mask=mask, other=0.0).to(tl.float32)
        dy2 = tl.load(dy_ptrs + HALF + columns, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(x_ptrs + columns, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptrs + HALF + columns, mask=mask, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + angles + columns, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        dh1, dh2 = _turn(dy1, dy2, cos, -sin, PRODUCT)
        n1, n2 = x1 * rstd, x2 * rstd
        g1, own1 = _gradient(_rounded(dh1, NORMED), n1, weight_ptrs + columns, mask, offset, X, LLAMA)
        g2, own2 = _gradient(_rounded(dh2, NORMED), n2, weight_ptrs + HALF + columns, mask, offset, X, LLAMA)
        sums = tl.sum(g1 * n1 + g2 * n2, axis=1)
        if REST_BLOCK:
            dy_rest = tl.load(dy_ptrs + tail_offsets, mask=other_mask, other=0.0).to(tl.float32)
            n_rest = tl.load(x_ptrs + tail_offsets, mask=other_mask, other=0.0).to(tl.float32) * rstd
            g_rest, own_rest = _gradient(dy_rest, n_rest, weight_ptrs + tail_offsets, other_mask, offset, X, LLAMA)
            sums += tl.sum(g_rest * n_rest, axis=1)
        mean = (sums / HEAD_DIM)[:, None]
        tl.store(dx_ptrs + columns, (rstd * (g1 - n1 * mean)).to(X), mask=mask)
        tl.store(dx_ptrs + HALF + columns, (rstd * (g2 - n2 * mean)).to(X), mask=mask)
        if REST_BLOCK:
            tl.store(dx_ptrs + tail_offsets, (rstd * (g_rest - n_rest * mean)).to(X), mask=other_mask)
        if LEARNS:
            share1 += own1
            share2 += own2
            if REST_BLOCK:
                share_rest += own_rest
    if LEARNS:
        shares = share_ptr + program * HEAD_DIM
        at = tl.arange(0, HALF_BLOCK)
        tl.store(shares + at, tl.sum(share1, axis=0), mask=at < HALF)
        tl.store(shares + HALF + at, tl.sum(share2, axis=0), mask=at < HALF)
        if REST_BLOCK:
            at = 2 * HALF + tl.arange(0, REST_BLOCK)
            tl.store(shares + at, tl.sum(share_rest, axis=0), mask=at < HEAD_DIM)


@jit
def backward_kernel(
    dturned_q_ptr, dturned_k_ptr, q_ptr, k_ptr, dq_ptr, dk_ptr,
    cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_rstd_ptr, k_rstd_ptr, q_share_ptr, k_share_ptr,
    dturned_q_batch, dturned_q_token, dturned_q_head,
    dturned_k_batch, dturned_k_token, dturned_k_head,
    q_batch, q_token, q_head,
    k_batch, k_token, k_head,
    dq_batch, dq_token, dq_head,
    dk_batch, dk_token, dk_head,
    angle_batch, angle_token,
    num_q_programs, num_q_rows, num_k_rows, seq, offset,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LLAMA: tl.constexpr,
    Q_NORMED: tl.constexpr, K_NORMED: tl.constexpr,
    Q_PRODUCT: tl.constexpr, K_PRODUCT: tl.constexpr,
    LEARNS: tl.constexpr,
):  # fmt: skip
    """Some blocks of q's rows one after the other, or of k's, and their share of the weight's gradient."""
    program = tl.program_id(0)
    if program < num_q_programs:
        _backward_block(
            program, num_q_rows, seq,
            dturned_q_ptr, dturned_q_batch, dturned_q_token, dturned_q_head,
            q_ptr, q_batch, q_token, q_head,
            dq_ptr, dq_batch, dq_token, dq_head,
            cos_ptr, sin_ptr, angle_batch, angle_token,
            q_weight_ptr, q_rstd_ptr, q_share_ptr, offset,
            Q_HEADS, HEAD_DIM, HALF, ROWS, HALF_BLOCK, REST_BLOCK, BLOCKS, LLAMA, Q_NORMED, Q_PRODUCT, LEARNS,
        )  # fmt: skip
    else:
        _backward_block(
            program - num_q_programs, num_k_rows, seq,
            dturned_k_ptr, dturned_k_batch, dturned_k_token, dturned_k_head,
            k_ptr, k_batch, k_token, k_head,
            dk_ptr, dk_batch, dk_token, dk_head,
            cos_ptr, sin_ptr, angle_batch, angle_token,
            k_weight_ptr, k_rstd_ptr, k_share_ptr, offset,
            K_HEADS, HEAD_DIM, HALF, ROWS, HALF_BLOCK, REST_BLOCK, BLOCKS, LLAMA, K_NORMED, K_PRODUCT, LEARNS,
        )  # fmt: skip
