"""RMSNorm against float64, against transformers' modules bit for bit, and against liger-kernel's.

Tolerances are in units of the type's epsilon, times the largest value that is expected. In bfloat16 a value is rounded
three times at most (sum, norm, product), each by half a unit: 2. In float32 the errors of sums come on top: 8.
"""

from contextlib import nullcontext

import liger_kernel.ops.rms_norm as liger
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RMSNorm

from tests.kernels.interpreter import interpreted
from tests.kernels.references import reference_rms_norm
from tunekit.kernels import rms_norm as module
from tunekit.kernels.rms_norm import MAX_COLUMNS, rms_norm

EPS = 1e-6

UNITS = {torch.float32: 8, torch.bfloat16: 2}

# (..., columns): tiles that are not full in rows, in columns, and in both, and rows that have a tile for themselves.
SHAPES = [(1, 64), (2, 5, 100), (37, 1000), (3, 2050)]

FAMILIES = [
    *((family, "llama") for family in (GraniteRMSNorm, LlamaRMSNorm, Phi3RMSNorm, Qwen3RMSNorm, SmolLM3RMSNorm)),
    *((family, "float32") for family in (GptOssRMSNorm, Olmo2RMSNorm, Olmo3RMSNorm)),
    *((family, "gemma") for family in (Gemma2RMSNorm, Gemma3RMSNorm, GemmaRMSNorm)),
]


@pytest.fixture(params=["torch", "triton"])
def path(request):
    with interpreted() if request.param == "triton" else nullcontext():
        yield request.param


class Case:
    """Random rows, a residual, a weight, and gradients of what is returned."""

    def __init__(self, shape, dtype, *, residual=True, weight=True, casting="llama"):
        torch.manual_seed(0)
        self.x = torch.randn(shape).to(dtype).requires_grad_()
        self.residual = torch.randn(shape).to(dtype).requires_grad_() if residual else None
        self.weight = torch.randn(shape[-1]).to(dtype).requires_grad_() if weight else None
        self.gradients = list(torch.randn(2, *shape).to(dtype))
        self.options = {"eps": EPS, "casting": casting, "offset": float(casting == "gemma")}

    @property
    def inputs(self):
        return [x for x in (self.x, self.residual, self.weight) if x is not None]

    def values(self, function):
        """Results and gradients of a function like ours."""
        results = function(self.x, self.weight, residual=self.residual, **self.options)
        results = [results] if self.residual is None else list(results)
        return [*results, *torch.autograd.grad(results, self.inputs, self.gradients[: len(results)])]

    def expected(self):
        """The same in float64."""
        inputs = [x.detach().double().requires_grad_() for x in self.inputs]
        total = inputs[0] if self.residual is None else inputs[0] + inputs[1]
        y = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt()
        y = y if self.weight is None else y * (self.options["offset"] + inputs[-1])
        results = [y] if self.residual is None else [y, total]
        gradients = [gradient.double() for gradient in self.gradients[: len(results)]]
        return [*results, *torch.autograd.grad(results, inputs, gradients)]


def assert_close(found, expected, dtype):
    for one, other in zip(found, expected, strict=True):
        bound = UNITS[dtype] * torch.finfo(dtype).eps * float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=bound)


@pytest.mark.sample(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("casting", ["llama", "gemma", "float32"])
def test_results_and_gradients_are_those_of_float64(shape, dtype, casting, path):
    case = Case(shape, dtype, casting=casting, residual=casting != "gemma", weight=shape[0] != 2)
    assert_close(case.values(rms_norm), case.expected(), dtype)
    assert_close(case.values(reference_rms_norm), case.expected(), dtype)


def test_few_programs_go_through_many_rows(monkeypatch):
    """Two programs for 5 tiles of rows, of which the last is not full."""
    monkeypatch.setattr(module, "num_multiprocessors", lambda x: 1)
    case = Case((35, 500), torch.float32)
    with interpreted():
        found = case.values(rms_norm)
    assert_close(found, case.expected(), torch.float32)


@pytest.mark.parametrize(("family", "casting"), FAMILIES, ids=lambda value: str(getattr(value, "__name__", value)))
@pytest.mark.parametrize("has_residual", [True, False])
def test_float32_is_that_of_transformers_bit_for_bit(family, casting, has_residual):
    case = Case((2, 7, 96), torch.float32, residual=has_residual, casting=casting)

    def theirs(x, weight, *, residual, eps, **_):
        norm = family(x.shape[-1], eps=eps)
        del norm.weight
        norm.weight = weight
        total = x if residual is None else residual + x
        return norm(total) if residual is None else (norm(total), total)

    for ours, other in zip(case.values(rms_norm), case.values(theirs), strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize(("family", "casting"), FAMILIES, ids=lambda value: str(getattr(value, "__name__", value)))
def test_bfloat16_is_rounded_where_transformers_rounds_it(family, casting, path):
    """The kernel's sum of squares has another order, so that a value in a thousand may be rounded to the other side."""
    case = Case((4, 7, 96), torch.bfloat16, residual=False, casting=casting)
    norm = family(96, eps=EPS)
    norm.weight.data = case.weight.data
    differs = rms_norm(case.x, case.weight, **case.options) != norm(case.x)
    assert differs.float().mean() <= (0 if path == "torch" else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_liger_kernel_finds_the_same(casting, dtype):
    case = Case((6, 100), dtype, residual=False, casting=casting)

    def theirs(x, weight, *, residual, eps, casting, offset):
        return liger.LigerRMSNormFunction.apply(x, weight, eps, offset, casting, False)

    with interpreted(liger):
        assert_close(case.values(rms_norm), [value.double() for value in case.values(theirs)], dtype)


def test_wider_types_of_weight_and_residual_are_kept(path):
    """As bfloat16 rows meet norms in float32, or a stream in float32: the product and the sum are float32."""
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    weight, residual = torch.randn(64, requires_grad=True), torch.randn(3, 64, requires_grad=True)
    expected = LlamaRMSNorm(64, eps=EPS)
    assert rms_norm(x, weight, eps=EPS).dtype == expected(x).dtype == torch.float32
    assert rms_norm(x, weight, eps=EPS, casting="gemma").dtype == GemmaRMSNorm(64)(x).dtype == torch.bfloat16
    y, total = rms_norm(x, weight, eps=EPS, residual=residual)
    assert total.dtype == torch.float32
    assert torch.equal(total, x + residual)
    (y.sum() + total.sum()).backward()
    assert [tensor.grad.dtype for tensor in (x, weight, residual)] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.slow
def test_a_frozen_weight_costs_no_sums(path, monkeypatch):
    wanted = []

    def spied(*args):
        wanted.append(args[-1])
        return launch(*args)

    name = "_launch_backward" if path == "triton" else "_backward_in_torch"
    launch = getattr(module, name)
    monkeypatch.setattr(module, name, spied)
    case = Case((3, 64), torch.float32)
    trained = case.values(rms_norm)
    case.weight.requires_grad_(False)
    y, total = rms_norm(case.x, case.weight, residual=case.residual, **case.options)
    dx, dresidual = torch.autograd.grad((y, total), (case.x, case.residual), case.gradients)
    assert wanted == [True, False]
    assert torch.equal(dx, trained[2])
    assert torch.equal(dresidual, trained[3])
    assert case.weight.grad is None


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_may_have_no_gradient(used, path):
    case = Case((3, 64), torch.float32)
    results = rms_norm(case.x, case.weight, residual=case.residual, **case.options)
    found = torch.autograd.grad(results[used], case.inputs, case.gradients[used], allow_unused=True)
    case.gradients[1 - used].zero_()
    assert_close([g for g in found if g is not None], case.expected()[2 : 2 + len(found)], torch.float32)


def test_inputs_may_be_views(path):
    case = Case((4, 6, 64), torch.float32, residual=False)
    expected = case.values(rms_norm)
    wide = torch.zeros(4, 6, 192)
    wide[..., 64:128] = case.x.detach()
    case.x = wide[..., 64:128].requires_grad_()
    case.gradients[0] = case.gradients[0].transpose(0, 1).contiguous().transpose(0, 1)
    for found, value in zip(case.values(rms_norm), expected, strict=True):
        assert torch.equal(found, value)
        assert found.is_contiguous()
    case.x = case.x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    assert_close(case.values(rms_norm), expected, torch.float32)


def test_no_rows_have_no_norm(path):
    case = Case((0, 64), torch.float32)
    y, total, dx, dresidual, dweight = case.values(rms_norm)
    assert y.shape == total.shape == dx.shape == dresidual.shape == (0, 64)
    assert not dweight.any()


def test_rows_too_wide_for_a_program_go_through_torch():
    case = Case((2, MAX_COLUMNS + 2), torch.float32)
    plain = case.values(rms_norm)
    with interpreted():
        for found, expected in zip(case.values(rms_norm), plain, strict=True):
            assert torch.equal(found, expected)


def test_what_is_kept_is_the_sum_a_number_per_row_and_the_weight():
    case, kept = Case((6, 64), torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        _, total = rms_norm(case.x, case.weight, residual=case.residual, **case.options)
    assert [(x.dtype, x.numel()) for x in kept] == [(torch.bfloat16, 384), (torch.bfloat16, 64), (torch.float32, 6)]
    assert kept[0].data_ptr() == total.data_ptr()
    assert kept[1].data_ptr() == case.weight.data_ptr()


def test_inputs_and_gradients_are_not_written_to(path):
    case = Case((3, 64), torch.float32)
    before = [x.clone() for x in (*case.inputs, *case.gradients)]
    case.values(rms_norm)
    assert all(torch.equal(x, y) for x, y in zip((*case.inputs, *case.gradients), before, strict=True))


def test_operations_are_what_torch_is_told_of_them():
    x, other, weight, rstd = torch.randn(2, 5, 64), torch.randn(2, 5, 64), torch.randn(64), torch.rand(10)
    for args in [(x.bfloat16(), other, weight), (x.transpose(0, 1), None, weight)]:
        torch.library.opcheck(module._rms_norm, (*args, EPS, 1.0, True))
    for args in [(x, x, other.bfloat16(), weight), (x.transpose(0, 1), None, other.transpose(0, 1), None)]:
        torch.library.opcheck(module._rms_norm_backward, (*args, rstd, 0.0, args[3] is not None))


def test_it_is_compiled_as_one_graph():
    case = Case((5, 64), torch.float32)
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    for found, expected in zip(case.values(compiled), case.values(rms_norm), strict=True):
        assert torch.equal(found, expected)


def test_checkpoints_and_autocast_change_nothing(path):
    case = Case((5, 64), torch.float32)
    expected = case.values(rms_norm)

    def again(x, weight, **options):
        return checkpoint(lambda: rms_norm(x, weight, **options), use_reentrant=False)

    with torch.autocast("cpu", torch.bfloat16):
        found = case.values(again)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with torch.no_grad():
        y = rms_norm(case.x, case.weight, residual=case.residual, **case.options)[0]
    assert torch.equal(y, expected[0])
    assert not y.requires_grad


def test_the_same_tensor_may_be_rows_and_residual(path):
    case = Case((5, 64), torch.float32)
    y, total = rms_norm(case.x, case.weight, residual=case.x, **case.options)
    (dx,) = torch.autograd.grad((y, total), case.x, case.gradients)
    case.residual = case.x.detach().clone().requires_grad_()
    expected = case.expected()
    assert_close([dx], [expected[2] + expected[3]], torch.float32)
