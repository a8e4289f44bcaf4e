"""The head's losses and log-probabilities, in their Triton form and in torch, against float64 autograd.

Tolerances: sums of float32 over a row's columns and over a chunk's tokens round by some 1e-6 of the largest number. In
bfloat16, logits and their gradient are rounded once each, by 2^-9 of their size, and so are results; what is expected
is computed from the rounded arguments.
"""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.kernels.interpreter import interpreted
from tests.kernels.references import reference_linear_ce
from tunekit.kernels import linear_ce as module
from tunekit.kernels.chunks import chunk_rows
from tunekit.kernels.cross_entropy import IGNORED, STATISTICS, Shape
from tunekit.kernels.linear_ce import linear_ce, linear_logprob, new_logits, places_of

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the largest number of a tensor."""

SHAPES = {
    "plain": Shape(),
    "scaled": Shape(logit_scale=0.5, temperature=0.7),
    "capped": Shape(softcap=4.0, logit_scale=1.5),
    "smoothed": Shape(label_smoothing=0.1, z_loss=1e-2, temperature=1.5),
    "weighted": Shape(1.2, 5.0, 0.8, entropy_top_k=20, entropy_power=1.5),
    "all": Shape(1.2, 5.0, 0.8, 0.2, 1e-2),
}

SIZES = {"one row": (1, 16, 1024), "ragged": (13, 24, 1003), "two blocks": (5, 8, 9001)}
"""Tokens, hidden size, vocabulary."""


@pytest.fixture(params=["torch", "triton"])
def form(request):
    """Each of the two forms."""
    with interpreted() if request.param == "triton" else contextlib.nullcontext():
        yield request.param


def arguments(size, dtype, seed=0):
    """Hidden states, weight, bias, labels of which a third is masked, and weights of tokens."""
    num_tokens, hidden, vocabulary = SIZES[size]
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).to(dtype)

    labels = torch.randint(0, vocabulary, (num_tokens,), generator=draw)
    labels[1::3] = IGNORED
    tensors = normal(num_tokens, hidden), normal(vocabulary, hidden, scale=hidden**-0.5), normal(vocabulary, scale=0.5)
    return *tensors, labels, torch.rand(num_tokens, generator=draw)


def computed(function, tensors, *, frozen=()):
    """What a function of hidden states, weight and bias gives, and its gradients."""
    leaves = [tensor.clone().requires_grad_(place not in frozen) for place, tensor in enumerate(tensors)]
    result = function(*leaves)
    result.backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def close(found, expected, dtype):
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max().clamp(min=1e-3).item()
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=TOLERANCES[dtype] * scale)


SUMS = [
    *((shape, "ragged", dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)),
    *(("all", size, dtype) for size in ("one row", "two blocks") for dtype in (torch.float32, torch.bfloat16)),
    ("all", "ragged", torch.float16),
]


@pytest.mark.parametrize(("shape", "size", "dtype"), SUMS)
def test_the_sum_of_losses_and_its_gradients(shape, size, dtype, form):
    *tensors, labels, weights = arguments(size, dtype)
    options = {"shape": SHAPES[shape], "token_weights": weights}
    found = computed(lambda x, w, b: linear_ce(x, w, labels, bias=b, **options).loss * 3, tensors)
    wide = [tensor.double() for tensor in tensors]
    expected = computed(lambda x, w, b: reference_linear_ce(x, w, labels, bias=b, **options).loss * 3, wide)
    close(found, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [(1, 2), ()], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("shape", ["plain", "all"])
def test_log_probabilities_and_their_gradients(shape, frozen, dtype, form):
    *tensors, labels, factors = arguments("ragged", dtype)

    def of(function):
        return lambda x, w, b: (function(x, w, labels, bias=b, shape=SHAPES[shape]).log_probs * factors).sum()

    found = computed(of(linear_logprob), tensors, frozen=frozen)
    close(found, computed(of(reference_linear_ce), [one.double() for one in tensors], frozen=frozen), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [(1, 2), ()], ids=["frozen head", "trained head"])
def test_the_gradient_of_the_entropy_beside_that_of_log_probabilities(frozen, dtype, form):
    *tensors, labels, factors = arguments("ragged", dtype)

    def of(function, **options):
        def summed(x, w, b):
            scores = function(x, w, labels, bias=b, shape=Shape(1.2, 5.0, 0.8), **options)
            return (scores.log_probs * factors + scores.entropy * factors.flip(0)).sum()

        return summed

    options = {"statistics": ["entropy"], "entropy_gradient": True}
    found = computed(of(linear_logprob, **options), tensors, frozen=frozen)
    close(found, computed(of(reference_linear_ce), [one.double() for one in tensors], frozen=frozen), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [linear_ce, linear_logprob])
def test_what_is_said_of_each_token(function, dtype, form):
    hidden, weight, _, labels, _ = arguments("two blocks", dtype)
    labels[0] = (hidden.double() @ weight.double().T)[0].argmax()
    found = function(hidden, weight, labels, statistics=STATISTICS)
    expected = reference_linear_ce(hidden.double(), weight.double(), labels)
    close(found[1:-1], expected[1:-1], dtype)
    assert found.is_top1.equal(expected.is_top1) and found.is_top1[0]
    assert all(not column[1] for column in found[1:]), "of a masked token nothing is said"


def test_the_first_of_equal_logits_is_the_top_one(form):
    hidden, weight = torch.ones(2, 16), torch.zeros(1030, 16)
    weight[[7, 900]] = 1.0
    found = linear_ce(hidden, weight, torch.tensor([7, 900]), statistics=["is_top1"])
    assert found.is_top1.tolist() == [True, False]


def test_the_plain_loss_is_torchs_cross_entropy(form):
    *tensors, labels, _ = arguments("ragged", torch.float32)
    found = computed(lambda x, w, b: linear_ce(x, w, labels, bias=b).loss, tensors)
    summed = {"ignore_index": IGNORED, "reduction": "sum"}
    wide = [tensor.double() for tensor in tensors]
    close(found, computed(lambda x, w, b: cross_entropy(x @ w.T + b, labels, **summed), wide), torch.float32)


@pytest.mark.parametrize("wanted", [torch.float32, None])
def test_the_weights_gradient_over_many_chunks(wanted):
    """In the type of the products too much is lost to be tested more sharply: 2^-9 of the sum for each chunk."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(600, 16, generator=draw).bfloat16(), torch.randn(50, 16, generator=draw).bfloat16()
    labels = torch.randint(0, 50, (600,), generator=draw)
    options = {"budget_bytes": 1, "weight_gradient_dtype": wanted}
    found = computed(lambda x, w: linear_ce(x, w, labels, **options).loss, [hidden, weight])
    expected = computed(lambda x, w: reference_linear_ce(x, w, labels).loss, [hidden.double(), weight.double()])
    close(found, expected, torch.bfloat16)


@pytest.mark.parametrize("function", [linear_ce, linear_logprob])
def test_without_a_label_all_is_zero_and_connected(function, form):
    *tensors, labels, _ = arguments("ragged", torch.float32)
    labels[:] = IGNORED

    def of(x, w, b):
        scores = function(x, w, labels, bias=b, statistics=STATISTICS)
        return scores.log_probs.sum() if scores.loss is None else scores.loss

    assert all(not one.any() for one in computed(of, tensors))


def test_masked_tokens_may_be_anything(form):
    hidden, weight, bias, labels, _ = arguments("ragged", torch.float32)
    options = {"bias": bias, "index": torch.arange(len(labels))}
    clean = computed(lambda x, w: linear_ce(x, w, labels, **options).loss, [hidden, weight])
    given = computed(lambda x, w: linear_ce(x, w, labels, bias=bias, index=places_of(labels)).loss, [hidden, weight])
    # An index may name masked tokens too: they count nothing.
    close(clean, given, torch.float32)
    hidden[1] = torch.nan
    close(computed(lambda x, w: linear_ce(x, w, labels, bias=bias).loss, [hidden, weight]), given, torch.float32)


def test_chunks_fit_their_budget_and_are_as_long_as_each_other():
    assert chunk_rows(8192, 128256, 2, 512 << 20) == 2048
    assert chunk_rows(8200, 128256, 2, 512 << 20) == 1664
    assert chunk_rows(100, 128256, 2, 512 << 20) == 100
    assert chunk_rows(8192, 256000, 4, 1 << 20) == 128
    assert chunk_rows(0, 1000, 2, 512 << 20) == 1


def test_under_autocast_products_are_in_its_type():
    *tensors, labels, _ = arguments("ragged", torch.float32)
    rounded = [tensor.bfloat16().double() for tensor in tensors]

    def under(x, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return linear_ce(x, w, labels, bias=b).loss

    found = computed(under, tensors)
    assert all(one.dtype == torch.float32 for one in found)
    close(found, computed(lambda x, w, b: reference_linear_ce(x, w, labels, bias=b).loss, rounded), torch.bfloat16)


def test_what_is_kept_for_the_backward_pass():
    """The gradients themselves where they are known; else the head's arguments, whose logits are computed again."""
    hidden, weight, _, labels, _ = arguments("ragged", torch.bfloat16)
    num = len(places_of(labels))

    def kept(function, trained):
        sizes = []
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)

        def keep(tensor):
            sizes.append((tuple(tensor.shape), tensor.dtype))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            function(x, w, labels, index=places_of(labels))
        return [size for size in sizes if size[0] not in ((0,), (num,), (0, 24))]

    of_hidden, of_weight = ((num, 24), torch.bfloat16), ((1003, 24), torch.float32)
    assert kept(linear_ce, True) == [of_hidden, of_weight]
    assert kept(linear_ce, False) == kept(linear_logprob, False) == [of_hidden]
    assert kept(linear_logprob, True)[:2] == [((13, 24), torch.bfloat16), ((1003, 24), torch.bfloat16)]


def test_no_gradient_is_computed_where_none_can_be_asked_for():
    hidden, weight, _, labels, _ = arguments("ragged", torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.no_grad():
        scores = linear_ce(hidden, weight, labels), linear_logprob(hidden, weight, labels)
    assert not scores[0].loss.requires_grad and not scores[1].log_probs.requires_grad


def test_a_second_backward_pass_through_gradients_made_once_is_refused():
    hidden, weight, _, labels, _ = arguments("ragged", torch.float32)
    loss = linear_ce(hidden, weight.requires_grad_(), labels).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_arguments_may_have_leading_dimensions_and_gaps():
    hidden, weight, _, labels, _ = arguments("ragged", torch.float32)
    gaps = torch.stack([hidden, hidden]).transpose(0, 1)
    found = linear_ce(gaps, weight.T.contiguous().T, torch.stack([labels, labels], 1)[:, :], statistics=["entropy"])
    once = linear_ce(hidden, weight, labels, statistics=["entropy"])
    torch.testing.assert_close(found.loss, 2 * once.loss)
    torch.testing.assert_close(found.entropy, torch.stack([once.entropy, once.entropy], 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("function", [linear_ce, linear_logprob])
def test_it_compiles_as_a_whole(function, trained):
    hidden, weight, _, labels, _ = arguments("ragged", torch.float32)
    index = places_of(labels)

    def of(x, w):
        scores = function(x, w, labels, index=index, statistics=["entropy"])
        return scores.log_probs.sum() if scores.loss is None else scores.loss

    frozen = () if trained else (1,)
    compiled = torch.compile(of, backend="aot_eager", fullgraph=True)
    close(
        computed(compiled, [hidden, weight], frozen=frozen),
        computed(of, [hidden, weight], frozen=frozen),
        torch.float32,
    )


@pytest.mark.parametrize("trained", [True, False])
def test_the_operation_is_what_it_says_of_itself(trained):
    hidden, weight, bias, labels, weights = arguments("ragged", torch.float32)
    index = places_of(labels)
    torch.library.opcheck(
        module._linear_cross_entropy,
        (hidden, weight, index, torch.float32, torch.float32, [True, False, False, True], [True, trained, trained],
         bias, labels[index], weights[index], None, [1.0, 0.0, 1.0, 0.0, 0.0], 1),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("vocabulary", [258, 259])
def test_what_was_in_memory_before_counts_nowhere(vocabulary, dtype, monkeypatch):
    """Fresh memory holds NaN here, also behind the rows of logits, where products on some processors read."""
    hidden = torch.randn(120, 64).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, 64) / 8).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (120,))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        linear_ce(hidden, weight, labels).loss.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert hidden.grad is not None and weight.grad is not None
    assert bool(hidden.grad.isfinite().all()) and bool(weight.grad.isfinite().all())


def test_behind_a_row_of_logits_there_is_nothing_but_zeros(monkeypatch):
    """Zeros, where processors read it or not."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        logits = new_logits(3, 258, torch.empty(0), torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    rows = logits.as_strided((3, logits.stride(0)), logits.stride())
    assert logits.isnan().all() and rows.shape[1] > 258
    assert not rows[:, 258:].any()
