"""Attention with sinks: each head has a number more in the denominator of its softmax, and so may attend to nothing.

    p_ij = exp(s_ij) / (exp(sink) + sum_k exp(s_ik))

Flash attention without sinks gives an output and the logarithm of its denominator, `lse`. Those with sinks follow:

    lse' = log(exp(lse) + exp(sink)),  output' = output * exp(lse - lse')

Its backward pass makes the probabilities again from the scores and the denominator, and the mean of their gradients
from the output, so that with `lse'` and `output'` it gives the gradients of queries, keys and values with sinks. The
value at a sink is zero, hence

    d sink = - sum_i exp(sink - lse'_i) * (d output'_i . output'_i)

Source: gpt-oss, https://arxiv.org/abs/2508.10925, section 2.2; FlashAttention-2, https://arxiv.org/abs/2307.08691,
algorithm 2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Flash(NamedTuple):
    """Flash attention without sinks.

    Attributes:
        forward: Takes queries, keys and values; returns the output and `lse`, `(..., heads, tokens)`.
        backward: Takes the gradient of the output, queries, keys, values, output and `lse`; returns the gradients of
            queries, keys and values.
        tokens_first: True if the output is `(tokens, heads, value_dim)`, False if it is `(..., heads, tokens,
            value_dim)`.
    """

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    tokens_first: bool


def attend(flash: Flash, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Return the output of attention with sinks, in the layout of `flash`.

    Args:
        flash: The attention without them.
        q: Queries.
        k: Keys.
        v: Values.
        sinks: `(heads,)`.
    """
    output: Tensor = _Attention.apply(q, k, v, sinks, flash)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, flash: Flash) -> Tensor:
        plain, lse = flash.forward(q, k, v)
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        share = _beside(torch.exp(lse - total), flash)
        output = (plain * share).to(plain.dtype)
        ctx.save_for_backward(q, k, v, sinks, output, total)
        ctx.flash = flash
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, output, total = ctx.saved_tensors
        of_sinks = None
        if ctx.needs_input_grad[3]:
            weight = torch.exp(sinks.to(total.dtype)[:, None] - total)
            mean = (gradient.to(total.dtype) * output).sum(-1)
            mean = mean.transpose(0, 1) if ctx.flash.tokens_first else mean
            per_head = -(weight * mean).sum(-1)
            of_sinks = per_head.reshape(-1, len(sinks)).sum(0).to(sinks.dtype)
        return *ctx.flash.backward(gradient, q, k, v, output, total), of_sinks, None


def _beside(values: Tensor, flash: Flash) -> Tensor:
    """Bring one value for each head and token beside an output."""
    return (values.transpose(0, 1) if flash.tokens_first else values)[..., None]


def attend_to_all(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, scale: float | None, visible: Tensor | None = None
) -> Tensor:
    """Return the output with a score for each pair of tokens in memory, for rows with a mask and for single tokens.

    Args:
        q: `(rows, heads, queries, head_dim)`.
        k: `(rows, kv_heads, keys, head_dim)`.
        v: `(rows, kv_heads, keys, value_dim)`.
        sinks: `(heads,)`.
        scale: Factor of the scores; 1 / sqrt(head_dim) where it is None.
        visible: True where a query sees a key, `(rows, 1, queries, keys)`; None where it sees all.

    Returns:
        `(rows, heads, queries, value_dim)`.
    """
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = (q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)).float()
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    column = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return weights.to(v.dtype) @ v
