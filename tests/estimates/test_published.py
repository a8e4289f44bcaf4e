"""The memory estimate against peaks that others measured and published: `published.yaml` says where, and how near."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from tests.estimates.published import LOGITS, error, print_errors, rows
from tunekit.models.step_trace import LiveBytes


def marked(row):
    return pytest.param(row, marks=pytest.mark.xfail(reason=row.missed, strict=True) if row.missed else ())


@pytest.mark.parametrize("row", [marked(row) for row in rows()], ids=lambda row: f"{row.name}: {row.words}")
def test_the_estimate_is_near_what_was_measured(row):
    low, high = row.tolerance
    assert low <= error(row) <= high, row.because


def test_every_row_says_where_it_is_from_and_why_it_may_be_off():
    assert len(rows()) >= 25
    for row in rows():
        assert row.source.startswith("https://")
        assert row.because
        assert -0.3 <= row.tolerance[0] < 0 < row.tolerance[1] <= 0.25


def test_the_errors_can_be_printed(capsys):
    print_errors()
    assert f"{len(rows())} rows" in capsys.readouterr().out


ROWS, TOKENS, ENTRIES, WIDTH = 2, 256, 8000, 8


def transformers_loss(logits, labels):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, labels, ENTRIES)


def former_loss(logits, labels):
    """That of transformers before 4.45, whose model made float32 logits."""
    shifted = logits[..., :-1, :].contiguous()
    return cross_entropy(shifted.view(-1, ENTRIES), labels[..., 1:].reshape(-1))


def plain(weight, hidden, labels):
    logits = linear(hidden, weight)
    return transformers_loss(logits, labels), None


def plain_kept(weight, hidden, labels):
    logits = linear(hidden, weight)
    return transformers_loss(logits, labels), logits


def former_kept(weight, hidden, labels):
    logits = linear(hidden, weight).float()
    return former_loss(logits, labels), logits


def in_pieces(weight, hidden, labels, *, of=8, as_float32=False):
    pieces = [linear(piece, weight) for piece in hidden.split(of, dim=1)]
    losses = [
        cross_entropy((piece.float() if as_float32 else piece).flatten(0, 1), label.flatten(), reduction="sum")
        for piece, label in zip(pieces, labels.split(of, dim=1), strict=True)
    ]
    return torch.stack(losses).sum(), pieces


def in_float32_pieces(weight, hidden, labels):
    return in_pieces(weight, hidden, labels, as_float32=True)


@pytest.mark.parametrize(
    ("kind", "loss_of"),
    [
        ("dropped", plain),
        ("kept", plain_kept),
        ("kept in float32", former_kept),
        ("pieces", in_pieces),
        ("pieces in float32", in_float32_pieces),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_loss_over_all_logits_holds_what_is_said(kind, loss_of):
    weight = torch.randn(ENTRIES, WIDTH, dtype=torch.bfloat16)
    hidden = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, ENTRIES, (ROWS, TOKENS))
    tracker = LiveBytes([weight, hidden, labels])
    with tracker:
        loss, kept = loss_of(weight, hidden, labels)
        forward = max(tracker.peaks.values())
        loss.backward()
        whole = max(tracker.peaks.values())
    del kept
    said = tuple(count * ROWS * TOKENS * ENTRIES for count in LOGITS[kind])
    # Pieces hold a float32 copy of one piece besides.
    assert (forward, whole) == (pytest.approx(said[0], rel=0.05), pytest.approx(said[1], rel=0.05))
