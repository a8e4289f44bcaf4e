"""What tunekit's head is planned to hold, against what its operation allocates on fake tensors of real shapes."""

from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.estimates.shapes import LLAMA_1B, LLAMA_8B
from tunekit.estimates.memory.activations import head_of, products_of
from tunekit.kernels import linear_ce as module
from tunekit.models.step_trace import LiveBytes
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

TOKENS = 8200
"""Of which all count. The last chunk is shorter than the others."""


def allocated(model, hidden_dtype, weight_dtype, dtype, gradients):
    """The most bytes that are live beside the arguments, as on CUDA: passes are in place, sums without casts."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        hidden = torch.empty(TOKENS, model.hidden_size, dtype=hidden_dtype)
        weight = torch.empty(model.vocab_size, model.hidden_size, dtype=weight_dtype)
        labels = torch.zeros(TOKENS, dtype=torch.long)
        weights = torch.ones(TOKENS)
        tracker = LiveBytes([hidden, weight, labels, weights])
        with (
            mock.patch.object(module, "cross_entropy", lambda *_args, **_kwargs: None),
            mock.patch.object(module, "add_product", lambda *_args, **_kwargs: None),
            tracker,
        ):
            tracker.enter("forward")
            module._linear_cross_entropy._init_fn(
                hidden, weight, labels, dtype, torch.float32, [True, False, False, True], [*gradients, False],
                None, labels, weights, None, [1.0, 0.0, 1.0, 0.0, 0.0], module.BUDGET_BYTES,
            )  # fmt: skip
        return tracker.peaks["forward"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", [LLAMA_1B, LLAMA_8B], ids=["1B", "8B"])
@pytest.mark.parametrize(
    ("adapter", "dtype"), [(FullAdapter(), "bfloat16"), (FullAdapter(), "float32"), (LoraAdapter(), "bfloat16")]
)
@pytest.mark.parametrize("kind", ["sums", "chunks"])
def test_the_head_holds_what_is_planned(kind, adapter, dtype, model):
    full, compute = isinstance(adapter, FullAdapter), getattr(torch, dtype)
    stored = torch.float32 if full else compute
    again = full and kind == "chunks"
    found = allocated(model, stored, stored, compute, [not again, full and not again])
    planned = head_of(products_of(model, adapter, dtype), TOKENS, kind=kind)
    # The norm's share, and what the head reads, which is there without it.
    read = stored.itemsize * model.hidden_size * TOKENS
    norm = (4 + (stored.itemsize if full else 0)) * model.hidden_size * TOKENS
    assert planned.kept + planned.forward - norm - read == pytest.approx(found, rel=0.01)
