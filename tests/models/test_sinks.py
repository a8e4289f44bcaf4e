"""Attention with sinks against its formula, in float64."""

from itertools import pairwise

import pytest
import torch

from tunekit.models.attention import sdpa_by_document
from tunekit.models.sinks import attend_to_all

BOUNDS = (0, 9, 10, 23)


def by_formula(q, k, v, sinks, *, scale, window):
    """One document: `(tokens, heads, dim)`, with a column for the sink and none of its value."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    at = torch.arange(len(q))
    visible = at[:, None] >= at
    if window is not None:
        visible &= at[:, None] - at < window
    scores = scores.masked_fill(~visible, -torch.inf)
    column = sinks[:, None, None].expand(-1, len(q), 1)
    weights = torch.softmax(torch.cat([column, scores], dim=-1), dim=-1)[..., 1:]
    return torch.einsum("hqk,khd->qhd", weights, v)


def leaves(num_kv_heads, value_dim=8):
    generator = torch.Generator().manual_seed(0)
    shapes = ((23, 4, 8), (23, num_kv_heads, 8), (23, num_kv_heads, value_dim), (4,))
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize(("num_kv_heads", "value_dim"), [(4, 8), (2, 8), (1, 5)])
def test_output_and_gradients_are_those_of_the_formula(num_kv_heads, value_dim, window):
    ours, theirs = leaves(num_kv_heads, value_dim), leaves(num_kv_heads, value_dim)
    q, k, v, sinks = ours
    output = sdpa_by_document(q, k, v, torch.tensor(BOUNDS), sinks, scale=0.4, window=window)
    q, k, v, sinks = theirs
    documents = [slice(start, end) for start, end in pairwise(BOUNDS)]
    parts = [by_formula(q[at], k[at], v[at], sinks, scale=0.4, window=window) for at in documents]
    expected = torch.cat(parts)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for result in (output, expected):
        (result * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11)


def test_a_sink_far_below_all_scores_changes_nothing_and_one_far_above_leaves_nothing():
    q, k, v, _ = leaves(4)
    bounds = torch.tensor(BOUNDS)
    plain = sdpa_by_document(q, k, v, bounds)
    low, high = (torch.full((4,), value, dtype=torch.float64) for value in (-200.0, 200.0))
    torch.testing.assert_close(sdpa_by_document(q, k, v, bounds, low), plain, rtol=1e-12, atol=0)
    assert sdpa_by_document(q, k, v, bounds, high).abs().max() < 1e-30


def test_rows_with_a_mask_are_those_of_the_formula():
    q, k, v, sinks = leaves(2)
    rows = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    visible = torch.ones(23, 23).tril().bool()[None, None]
    output = attend_to_all(*rows, sinks, scale=0.4, visible=visible)[0].transpose(0, 1)
    # Its softmax is in float32.
    torch.testing.assert_close(output, by_formula(q, k, v, sinks, scale=0.4, window=None), rtol=1e-5, atol=1e-6)
