"""The Triton kernel of cross-entropy over the logits of a chunk of tokens, in place, for `linear_ce`.

With logits y of a token (its row of `hidden @ weight.T + bias`), label t, weight w:

    z = softcap * tanh(logit_scale * y / softcap) / temperature        (without softcap: logit_scale * y / temperature)
    log_prob = z_t - lse,   lse = log sum_j exp z_j,   p_j = exp(z_j - lse)
    entropy = lse - sum_j p_j z_j,   log_sum_sq_probs = log sum_j p_j^2,   mean_logits = mean_j z_j
    loss = w * ((1 - label_smoothing) * -log_prob + label_smoothing * (lse - mean_logits) + z_loss * lse^2)

With `entropy_top_k`, the weight is also multiplied by the entropy of the softmax of a token's largest logits, over that
of as many equal ones, to the power `entropy_power` (EAFT, arXiv 2601.02151); it has no gradient.

And the gradient that takes the place of y, where one is asked for, is that of `loss + w_entropy * entropy`:

    dz_j = w * ((1 + 2 z_loss lse) p_j - (1 - label_smoothing) [j = t] - label_smoothing / V)
           - w_entropy p_j (z_j - lse + entropy)
    dy_j = dz_j / temperature * (1 - tanh^2) * logit_scale

Everything is computed in float32, and the gradient is rounded to the type of the logits. A row labelled -100 has no
loss, no statistics and no gradient.

The kernel reads a row twice, once for the sums and once for the gradient. One program of 1024 threads does one row, so
that the rows in flight stay in the L2 cache of a large device: the second read is not one of memory. Each thread keeps
the running maximum and sums (Milakov and Gimelshein, arXiv 1805.02867) of its own eight columns at a time, which are
put together once, at the end.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tunekit.kernels.backend import jit, tl, triton

IGNORED = -100
"""Label of a token that has no loss."""

STATISTICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Statistics of each token besides its log-probability, without a gradient of their own."""

_MAX_THREADS = 1024


class Shape(NamedTuple):
    """Parameters that turn a token's logits into its loss."""

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    entropy_top_k: float = 0
    entropy_power: float = 1.0


class Rows(NamedTuple):
    """Numbers of each token, in float32; `is_top1` is bool, and what is not asked for has no elements."""

    losses: Tensor
    log_probs: Tensor
    entropy: Tensor
    log_sum_sq_probs: Tensor
    mean_logits: Tensor
    is_top1: Tensor


@jit
def _scored(y, logit_scale, softcap, inverse_temperature, HAS_SOFTCAP: tl.constexpr):
    z = y * tl.cast(logit_scale, tl.float32)
    if HAS_SOFTCAP:
        # tanh(x) = 2 sigmoid(2x) - 1
        cap = tl.cast(softcap, tl.float32)
        z = cap * (2 * tl.sigmoid(2 * z / cap) - 1)
    return z * tl.cast(inverse_temperature, tl.float32)


@jit
def _cross_entropy_kernel(
    logits_ptr, row_stride, labels_ptr, weights_ptr, entropy_weights_ptr,
    losses_ptr, log_probs_ptr, entropy_ptr, log_sum_sq_probs_ptr, mean_logits_ptr, is_top1_ptr,
    num_columns, logit_scale, softcap, inverse_temperature, label_smoothing, z_loss,
    HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, HAS_LOG_SUM_SQ_PROBS: tl.constexpr, HAS_MEAN_LOGITS: tl.constexpr,
    HAS_IS_TOP1: tl.constexpr, HAS_GRADIENT: tl.constexpr, HAS_ENTROPY_GRADIENT: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    is_scored = label >= 0
    of_label = tl.load(logits_ptr + tl.maximum(label, 0)).to(tl.float32)
    target = _scored(of_label, logit_scale, softcap, inverse_temperature, HAS_SOFTCAP)

    lanes = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    # A lane that has seen no column yet has a finite maximum, so that differences from it are numbers.
    highest = tl.full((LANES,), -1e30, tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    products = tl.zeros((LANES,), tl.float32)
    squares = tl.zeros((LANES,), tl.float32)
    totals = tl.zeros((LANES,), tl.float32)
    before = tl.full((LANES,), -float("inf"), tl.float32)
    for start in range(0, num_columns, LANES * WIDTH):
        columns = start + lanes
        is_column = columns < num_columns
        # A row's stride is a multiple of what a load takes, and its end is there to be read.
        y = tl.load(logits_ptr + columns, mask=columns < row_stride, other=0.0).to(tl.float32)
        # What is behind its columns, nobody has written.
        y = tl.where(is_column, y, 0.0)
        z = _scored(y, logit_scale, softcap, inverse_temperature, HAS_SOFTCAP)
        if HAS_MEAN_LOGITS or HAS_SMOOTHING:
            totals += tl.sum(z, axis=1)
        masked = tl.where(is_column, z, -float("inf"))
        if HAS_IS_TOP1:
            before = tl.maximum(before, tl.max(tl.where(columns < label, masked, -float("inf")), axis=1))
        new = tl.maximum(highest, tl.max(masked, axis=1))
        rescale = tl.exp(highest - new)
        e = tl.exp(masked - new[:, None])
        sums = sums * rescale + tl.sum(e, axis=1)
        if HAS_ENTROPY:
            products = products * rescale + tl.sum(e * z, axis=1)
        if HAS_LOG_SUM_SQ_PROBS:
            squares = squares * rescale * rescale + tl.sum(e * e, axis=1)
        highest = new
    top = tl.max(highest, axis=0)
    rescale = tl.exp(highest - top)
    sum_exp = tl.sum(sums * rescale, axis=0)
    lse = top + tl.log(sum_exp)
    log_prob = target - lse
    entropy = 0.0
    weight = tl.where(is_scored, tl.load(weights_ptr + row), 0.0)
    smoothing, penalty = tl.cast(label_smoothing, tl.float32), tl.cast(z_loss, tl.float32)
    loss = -(1 - smoothing) * log_prob + penalty * lse * lse
    if HAS_MEAN_LOGITS or HAS_SMOOTHING:
        mean = tl.sum(totals, axis=0) / num_columns
        loss += smoothing * (lse - mean)
        if HAS_MEAN_LOGITS:
            tl.store(mean_logits_ptr + row, tl.where(is_scored, mean, 0.0))
    tl.store(losses_ptr + row, tl.where(is_scored, weight * loss, 0.0))
    tl.store(log_probs_ptr + row, tl.where(is_scored, log_prob, 0.0))
    if HAS_ENTROPY:
        entropy = lse - tl.sum(products * rescale, axis=0) / sum_exp
        tl.store(entropy_ptr + row, tl.where(is_scored, entropy, 0.0))
    if HAS_LOG_SUM_SQ_PROBS:
        squared = tl.log(tl.sum(squares * rescale * rescale, axis=0)) - 2 * tl.log(sum_exp)
        tl.store(log_sum_sq_probs_ptr + row, tl.where(is_scored, squared, 0.0))
    if HAS_IS_TOP1:
        is_first = (target >= top) & (target > tl.max(before, axis=0))
        tl.store(is_top1_ptr + row, (is_first & is_scored).to(tl.int1))

    if HAS_GRADIENT:
        entropy_weight = 0.0
        if HAS_ENTROPY_GRADIENT:
            entropy_weight = tl.where(is_scored, tl.load(entropy_weights_ptr + row), 0.0)
        of_probability = weight * (1 + 2 * penalty * lse)
        of_target = weight * (1 - smoothing)
        of_all = weight * smoothing / num_columns
        scale = tl.cast(logit_scale, tl.float32) * tl.cast(inverse_temperature, tl.float32)
        for start in range(0, num_columns, LANES * WIDTH):
            columns = start + lanes
            inside = columns < row_stride
            y = tl.load(logits_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            y = tl.where(columns < num_columns, y, 0.0)
            z = _scored(y, logit_scale, softcap, inverse_temperature, HAS_SOFTCAP)
            p = tl.exp(z - lse)
            gradient = of_probability * p - of_all - tl.where(columns == label, of_target, 0.0)
            if HAS_ENTROPY_GRADIENT:
                gradient -= entropy_weight * p * (z - lse + entropy)
            if HAS_SOFTCAP:
                t = z / (tl.cast(softcap, tl.float32) * tl.cast(inverse_temperature, tl.float32))
                gradient *= 1 - t * t
            gradient = tl.where((columns < num_columns) & is_scored, gradient * scale, 0.0)
            tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def launch_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    entropy_weights: Tensor | None,
    rows: Rows,
    shape: Shape,
    *,
    gradient: bool,
) -> None:
    """`linear_ce.cross_entropy` on an accelerator."""
    num_rows, num_columns = logits.shape
    width = 16 // logits.element_size()
    block = min(_MAX_THREADS * width, max(1024, triton.next_power_of_2(num_columns)))
    _cross_entropy_kernel[(num_rows,)](
        *(logits, logits.stride(0), labels, weights, weights if entropy_weights is None else entropy_weights),
        *(*rows, num_columns, shape.logit_scale, shape.softcap or 1.0, 1 / shape.temperature),
        *(shape.label_smoothing, shape.z_loss),
        HAS_SOFTCAP=shape.softcap is not None,
        HAS_SMOOTHING=shape.label_smoothing != 0,
        HAS_ENTROPY=len(rows.entropy) > 0,
        HAS_LOG_SUM_SQ_PROBS=len(rows.log_sum_sq_probs) > 0,
        HAS_MEAN_LOGITS=len(rows.mean_logits) > 0,
        HAS_IS_TOP1=len(rows.is_top1) > 0,
        HAS_GRADIENT=gradient,
        HAS_ENTROPY_GRADIENT=entropy_weights is not None,
        LANES=block // width,
        WIDTH=width,
        num_warps=block // (32 * width),
    )
