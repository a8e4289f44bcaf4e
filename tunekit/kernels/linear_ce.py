"""Cross-entropy and log-probabilities of the tokens that a linear head predicts, without the logits of all of them.

    logits = hidden @ weight.T + bias

`cross_entropy` says what is computed of them. Tokens go through the head in chunks, as many as fit a budget of bytes:
one product makes a chunk's logits, one pass turns them into numbers and, in place, into their gradient, and products
with it give the gradients of hidden states and weight. So logits are made in one buffer, which all chunks share. Tokens
without a loss are left out before any product. With N tokens that count, H wide, and V words:

`linear_ce` gives the sum of all losses. What the backward pass will multiply it by is one number, so the gradients are
computed in the forward pass (idea: github.com/mgmalek/efficient_cross_entropy), and scaled in the backward pass: 6 NHV
FLOPs, 4 NHV where the head is frozen. Kept for the backward pass: the gradient of hidden states `(N, H)` in the compute
type, and that of the weight `(V, H)` in `weight_gradient_dtype`.

`linear_logprob` gives each token's log-probability, each with a gradient of its own. Where the head is frozen, the
derivative of each by its hidden state is kept, `(N, H)` in the compute type, and scaled in the backward pass: 4 NHV.
Where the head is trained, or the entropy is, hidden states and weight are kept, and logits are computed again: 8 NHV.

Precision: products in the compute type, autocast's where it is on and that of the hidden states otherwise, with sums in
float32; logits are rounded to it, all that is made of them is float32, and their gradient is rounded to it. The
weight's gradient is summed over chunks in float32, or in the compute type if that is asked for, which is half as large
and loses what is small against the sum. Each sum has always the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tunekit.kernels.backend import uses_triton
from tunekit.kernels.chunks import BUDGET_BYTES, chunk_rows, row_columns
from tunekit.kernels.cross_entropy import IGNORED, STATISTICS, Rows, Shape, launch_cross_entropy

PLAIN = Shape()
"""Of a loss that is the cross-entropy itself."""


class TokenScores(NamedTuple):
    """Per-token results of a head, each `(..., seq)` like the labels zero without a label; None if not requested."""

    loss: Tensor | None
    log_probs: Tensor
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


def linear_ce(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    token_weights: Tensor | None = None,
    statistics: Sequence[str] = (),
    shape: Shape = PLAIN,
    weight_gradient_dtype: torch.dtype | None = torch.float32,
    budget_bytes: int = BUDGET_BYTES,
) -> TokenScores:
    """The sum of the tokens' losses, with a gradient, and numbers of each token, without.

    Its backward pass can be taken once.

    Args:
        hidden: `(..., hidden)`.
        weight: Of the head, `(vocabulary, hidden)`.
        labels: The token that each hidden state is to predict, `(...)`; -100 has no loss.
        bias: Of the head, `(vocabulary,)`.
        index: Places of the tokens with a loss, in the order of the flattened labels. Without it, they are looked for
            in the labels, which an accelerator has to wait for.
        token_weights: What each token's loss is multiplied by, `(...)`.
        statistics: Of `cross_entropy.STATISTICS`, those that are wanted.
        shape: What makes a loss of logits.
        weight_gradient_dtype: Type in which the weight's gradient is summed; None for the compute type.
        budget_bytes: Bytes of a chunk's logits, at most; a chunk has 128 tokens at least.
    """
    rows, targets, places = _scored(hidden, labels, index)
    weights = None if token_weights is None else token_weights.reshape(-1).index_select(0, places).float()
    how = _Settings(labels.numel(), tuple(statistics), shape, weight_gradient_dtype, budget_bytes)
    loss, *columns = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, targets, places, weights, how, torch.is_grad_enabled()
    )
    return _token_scores(loss, columns, labels)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    statistics: Sequence[str] = (),
    entropy_gradient: bool = False,
    shape: Shape = PLAIN,
    weight_gradient_dtype: torch.dtype | None = torch.float32,
    budget_bytes: int = BUDGET_BYTES,
) -> TokenScores:
    """Each token's log-probability, with a gradient, and other numbers, without.

    Args:
        hidden: As for `linear_ce`, and so `weight`, `labels`, `bias`, `index`, `statistics`, `shape`,
            `weight_gradient_dtype` and `budget_bytes`.
        weight: See there.
        labels: See there.
        bias: See there.
        index: See there.
        statistics: See there.
        entropy_gradient: Whether the entropy has a gradient too. It costs the logits a second time.
        shape: See there; `label_smoothing`, `z_loss` and `entropy_top_k` are those of a loss, and not used.
        weight_gradient_dtype: See there.
        budget_bytes: See there.
    """
    shape = shape._replace(label_smoothing=0.0, z_loss=0.0, entropy_top_k=0)
    how = _Settings(labels.numel(), tuple(statistics), shape, weight_gradient_dtype, budget_bytes)
    rows, targets, places = _scored(hidden, labels, index)
    columns = _LinearLogProb.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, targets, places, entropy_gradient, how, torch.is_grad_enabled()
    )
    return _token_scores(None, columns, labels)


class _Settings(NamedTuple):
    """Numbers and types of a call, as the functions below take them."""

    num_tokens: int
    statistics: tuple[str, ...]
    shape: Shape
    weight_gradient_dtype: torch.dtype | None
    budget_bytes: int


def _scored(hidden: Tensor, labels: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states as rows, labels of the tokens with a loss, and places of these."""
    places = places_of(labels) if index is None else index
    return hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).index_select(0, places), places


def _token_scores(loss: Tensor | None, columns: Sequence[Tensor | None], labels: Tensor) -> TokenScores:
    log_probs, *statistics = columns
    assert log_probs is not None
    laid = (None if column is None else column.view(labels.shape) for column in statistics)
    return TokenScores(loss, log_probs.view(labels.shape), *laid)


def next_labels(labels: Tensor) -> Tensor:
    """The label of the token behind each, `(batch, seq)`; the last one has none."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def places_of(labels: Tensor) -> Tensor:
    """Places of the tokens with a loss, in the order of the flattened labels."""
    return (labels.reshape(-1) != IGNORED).nonzero().squeeze(1)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the type of products with hidden states: that of autocast, if it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def new_rows(num_rows: int, wanted: Sequence[bool], like: Tensor) -> Rows:
    """Room for the numbers of tokens on the device of a tensor, and those of `STATISTICS` that are wanted."""
    types = [torch.float32] * (len(STATISTICS) + 1) + [torch.bool]
    return Rows(
        *(
            like.new_empty(num_rows if is_wanted else 0, dtype=dtype)
            for dtype, is_wanted in zip(types, (True, True, *wanted), strict=True)
        )
    )


def new_logits(num_rows: int, num_columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for logits, `(num_rows, num_columns)`; behind each row there is some more, which is zero.

    On processors with AMX, torch's product of bfloat16 takes columns in blocks: those that the last one lacks it reads
    from behind the row, and counts on weights of zero to undo them, which they do not with NaN.
    """
    room = like.new_empty(num_rows, row_columns(num_columns), dtype=dtype)
    room[:, num_columns:].zero_()
    return room[:, :num_columns]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    entropy_weights: Tensor | None,
    rows: Rows,
    shape: Shape,
    *,
    gradient: bool,
) -> None:
    """Write the numbers of each token, and put the gradient in the place of the logits.

    There are two tensors of the size of float32 logits at most, and one more of other types.

    Args:
        logits: `(tokens, vocabulary)`, as `new_logits` makes them.
        labels: `(tokens,)`.
        weights: Of each token's loss, `(tokens,)`, in float32.
        entropy_weights: Of each token's entropy, for its gradient; then `rows` has the entropy.
        rows: Where the numbers go.
        shape: What makes a loss of logits.
        gradient: Whether the gradient is wanted. Otherwise the logits stay, or are undefined.
    """
    is_scored = labels >= 0
    target = labels.clamp(min=0)[:, None]
    z = _scaled(logits, shape)
    lse = torch.logsumexp(z, -1)
    log_probs = z.gather(-1, target).squeeze(-1) - lse
    rows.log_probs.copy_(log_probs.where(is_scored, 0))
    weights = weights.where(is_scored, 0)
    losses = -(1 - shape.label_smoothing) * log_probs + shape.z_loss * lse * lse
    if shape.label_smoothing:
        losses = losses + shape.label_smoothing * (lse - z.mean(-1))
    rows.losses.copy_((losses * weights).where(is_scored, 0))
    if len(rows.mean_logits):
        rows.mean_logits.copy_(z.mean(-1).where(is_scored, 0))
    if len(rows.is_top1):
        # Of equal ones argmax takes the first.
        rows.is_top1.copy_((z.argmax(-1) == labels) & is_scored)
    if not (gradient or len(rows.entropy) or len(rows.log_sum_sq_probs)):
        return
    p = (z - lse[:, None]).exp_()
    if len(rows.entropy):
        rows.entropy.copy_((lse - torch.linalg.vecdot(p, z)).where(is_scored, 0))
    if len(rows.log_sum_sq_probs):
        rows.log_sum_sq_probs.copy_(torch.linalg.vecdot(p, p).log().where(is_scored, 0))
    if not gradient:
        return
    factor = (weights * (1 + 2 * shape.z_loss * lse))[:, None]
    if entropy_weights is not None:
        factor = factor - entropy_weights.where(is_scored, 0)[:, None] * (z - (lse - rows.entropy)[:, None])
    p.mul_(factor)
    p.scatter_add_(-1, target, (-(1 - shape.label_smoothing) * weights)[:, None])
    if shape.label_smoothing:
        p.sub_((weights * shape.label_smoothing / logits.shape[1])[:, None])
    if shape.softcap is not None:
        p.mul_(1 - (z * (shape.temperature / shape.softcap)).square_())
    logits.copy_(p.mul_(shape.logit_scale / shape.temperature))


def _scaled(logits: Tensor, shape: Shape) -> Tensor:
    """Return logits in float32 as probabilities are computed from them."""
    z = logits.float()
    if shape.logit_scale != 1:
        z = z * shape.logit_scale
    if shape.softcap is not None:
        z = shape.softcap * torch.tanh(z / shape.softcap)
    if shape.temperature != 1:
        z = z / shape.temperature
    return z


def eaft_weights(logits: Tensor, shape: Shape) -> Tensor:
    """Return the factors of the losses of tokens by `shape.entropy_top_k`, `(tokens,)` in float32, from 0 to 1.

    Args:
        logits: `(tokens, vocabulary)`.
        shape: Number of largest logits, and the power of their entropy.
    """
    num_kept = min(int(shape.entropy_top_k), logits.shape[1])
    log_p = _scaled(logits.topk(num_kept, -1, sorted=False).values, shape).log_softmax(-1)
    # A word that cannot be chosen adds nothing; 0 times -inf would be NaN.
    entropy = -(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0)).sum(-1)
    return (entropy / math.log(num_kept)).clamp(0, 1) ** shape.entropy_power


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """Add `a @ b` to a sum of its own type, without rounding the product to theirs; what was there is not, at first."""
    beta = 0 if is_first else 1
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


@torch.library.custom_op("tunekit::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    dtype: torch.dtype,
    weight_gradient_dtype: torch.dtype,
    wanted: Sequence[bool],
    gradients: Sequence[bool],
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    entropy_weights: Tensor | None,
    shape: Sequence[float],
    budget_bytes: int,
) -> list[Tensor]:
    """Numbers of each token, and gradients of hidden states, weight and bias: `Rows`, then those three.

    What is not asked for has no elements; `wanted` is of `STATISTICS`. `labels`, `weights` and `entropy_weights` are of
    the tokens at `index`, in whose order results are.
    """
    num_rows, num_columns = len(index), len(weight)
    results: list[Tensor] = _room(hidden, weight, index, dtype, weight_gradient_dtype, wanted, gradients)
    rows, (of_hidden, of_weight, of_bias) = Rows(*results[:-3]), results[-3:]
    per_chunk = chunk_rows(num_rows, num_columns, dtype.itemsize, budget_bytes)
    buffer = new_logits(per_chunk, num_columns, hidden, dtype)
    weight, shape_args = weight.to(dtype), Shape(shape[0], shape[1] or None, *shape[2:])
    compute = launch_cross_entropy if uses_triton(hidden) else cross_entropy
    for start in range(0, num_rows, per_chunk):
        end = min(start + per_chunk, num_rows)
        x = hidden.index_select(0, index[start:end]).to(dtype)
        logits = buffer[: end - start]
        torch.mm(x, weight.t(), out=logits)
        if bias is not None:
            logits.add_(bias.to(dtype))
        of_tokens = weights[start:end]
        if shape_args.entropy_top_k:
            of_tokens = of_tokens * eaft_weights(logits, shape_args)
        compute(
            logits,
            labels[start:end],
            of_tokens,
            None if entropy_weights is None else entropy_weights[start:end],
            Rows(*(column[start:end] for column in rows)),
            shape_args,
            gradient=any(gradients),
        )
        if gradients[0]:
            torch.mm(logits, weight, out=of_hidden[start:end])
        if gradients[1]:
            add_product(of_weight, logits.t(), x, is_first=start == 0)
        if gradients[2]:
            of_bias += logits.sum(0, dtype=torch.float32)
    return results


@_linear_cross_entropy.register_fake
def _room(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    dtype: torch.dtype,
    weight_gradient_dtype: torch.dtype,
    wanted: Sequence[bool],
    gradients: Sequence[bool],
    *_: object,
) -> list[Tensor]:
    """Room for numbers and gradients; that for the weight's is zero only if there are no tokens."""
    num_rows, (of_hidden, of_weight, of_bias) = len(index), gradients
    new = hidden.new_empty if num_rows else hidden.new_zeros
    return [
        *new_rows(num_rows, wanted, hidden),
        hidden.new_empty((num_rows if of_hidden else 0, hidden.shape[1]), dtype=dtype),
        new((len(weight) if of_weight else 0, hidden.shape[1]), dtype=weight_gradient_dtype),
        hidden.new_zeros(len(weight) if of_bias else 0, dtype=torch.float32),
    ]


def _flags(statistics: Sequence[str]) -> list[bool]:
    return [name in statistics for name in STATISTICS]


def _numbers(shape: Shape) -> list[float]:
    return [float(number or 0) for number in shape]


def _spread(columns: Sequence[Tensor], index: Tensor, how: _Settings) -> list[Tensor | None]:
    """Numbers of tokens at their places among all, zero elsewhere; None for what is not wanted."""
    wanted = ("log_probs", *how.statistics)
    return [
        column.new_zeros(how.num_tokens).index_copy(0, index, column) if name in wanted else None
        for name, column in zip(("log_probs", *STATISTICS), columns, strict=True)
    ]


def _spread_gradient(kept: Tensor, factors: Tensor, index: Tensor, like: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradient of all hidden states, from that of those that count and what each of them is multiplied by."""
    # Not in place where it is float32 already, for that is kept.
    scaled = kept * factors if kept.dtype == torch.float32 else kept.float().mul_(factors)
    scaled = scaled.to(dtype)
    return kept.new_zeros(like, dtype=dtype).index_copy_(0, index, scaled)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        index: Tensor,
        token_weights: Tensor | None,
        how: _Settings,
        learns: bool,
    ) -> tuple[Tensor | None, ...]:
        dtype = compute_dtype(hidden)
        weights = hidden.new_ones(len(index), dtype=torch.float32) if token_weights is None else token_weights
        gradients = [learns and needs for needs in ctx.needs_input_grad[:3]]
        losses, *columns, of_hidden, of_weight, of_bias = _linear_cross_entropy(
            hidden, weight, index, dtype, how.weight_gradient_dtype or dtype, _flags(how.statistics), gradients,
            bias, labels, weights, None, _numbers(how.shape), how.budget_bytes,
        )  # fmt: skip
        ctx.save_for_backward(of_hidden, of_weight, of_bias, index)
        ctx.hidden, ctx.types = hidden.shape, (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        spread = _spread(columns, index, how)
        ctx.mark_non_differentiable(*(column for column in spread if column is not None))
        return losses.sum(), *spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, of_bias, index = ctx.saved_tensors
        hidden_dtype, weight_dtype, bias_dtype = ctx.types
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return (
            _spread_gradient(of_hidden, grad, index, ctx.hidden, hidden_dtype) if needs_hidden else None,
            # In place, for it is the largest of all; torch refuses another backward pass that would read it.
            of_weight.mul_(grad).to(weight_dtype) if needs_weight else None,
            (of_bias * grad).to(bias_dtype) if needs_bias else None,
            *[None] * 5,
        )


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        index: Tensor,
        entropy_gradient: bool,
        how: _Settings,
        learns: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        ctx.recomputes = needs_weight or needs_bias or entropy_gradient
        ctx.dtype, ctx.how = compute_dtype(hidden), how
        # The loss that is the log-probability itself has a weight of -1.
        weights = hidden.new_full((len(index),), -1.0, dtype=torch.float32)
        gradients = [learns and needs_hidden and not ctx.recomputes, False, False]
        _, *columns, of_hidden, _, _ = _linear_cross_entropy(
            hidden, weight, index, ctx.dtype, how.weight_gradient_dtype or ctx.dtype, _flags(how.statistics),
            gradients, bias, labels, weights, None, _numbers(how.shape), how.budget_bytes,
        )  # fmt: skip
        if ctx.recomputes:
            ctx.save_for_backward(hidden, weight, bias, labels, index)
        else:
            ctx.save_for_backward(of_hidden, index)
        ctx.hidden, ctx.hidden_dtype = hidden.shape, hidden.dtype
        spread = _spread(columns, index, how)
        with_gradient = 2 if entropy_gradient else 1
        ctx.mark_non_differentiable(*(column for column in spread[with_gradient:] if column is not None))
        return tuple(spread)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        nothing, how = [None] * 5, ctx.how
        if not ctx.recomputes:
            if grad is None:
                return None, None, None, *nothing
            of_hidden, index = ctx.saved_tensors
            factors = grad.index_select(0, index)[:, None]
            return _spread_gradient(of_hidden, factors, index, ctx.hidden, ctx.hidden_dtype), None, None, *nothing
        hidden, weight, bias, labels, index = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weights = hidden.new_zeros(len(index), dtype=torch.float32) if grad is None else -grad.index_select(0, index)
        of_entropy = None if entropy_grad is None else entropy_grad.index_select(0, index)
        wanted = _flags(() if of_entropy is None else ("entropy",))
        *_, of_hidden, of_weight, of_bias = _linear_cross_entropy(
            hidden, weight, index, ctx.dtype, how.weight_gradient_dtype or ctx.dtype, wanted,
            [needs_hidden, needs_weight, needs_bias], bias, labels, weights, of_entropy, _numbers(how.shape),
            how.budget_bytes,
        )  # fmt: skip
        return (
            hidden.new_zeros(hidden.shape).index_copy_(0, index, of_hidden.to(hidden.dtype)) if needs_hidden else None,
            of_weight.to(weight.dtype) if needs_weight else None,
            of_bias.to(bias.dtype) if needs_bias else None,
            *nothing,
        )
