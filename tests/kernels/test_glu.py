"""The product of gated MLPs against float64, against transformers' modules, and against liger-kernel's.

Tolerances are in units of the type's epsilon, times the largest value that is expected. Results, and gradients of gate
and up, are rounded once, which is half a unit; in bfloat16 the gradients of low-rank factors are sums of products of
what was rounded before: 1. In float32 the errors of the products and of exponentials come on top: 8.
"""

from contextlib import nullcontext

import liger_kernel.ops.geglu as liger_geglu
import liger_kernel.ops.swiglu as liger_swiglu
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import Gemma2Config, Gemma3TextConfig, GemmaConfig, LlamaConfig, Phi3Config
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from tests.kernels.interpreter import interpreted
from tests.kernels.references import reference_glu, reference_glu_lora
from tunekit.kernels import glu as module
from tunekit.kernels.glu import glu, glu_lora, glu_packed

UNITS = {torch.float32: 8, torch.bfloat16: 1}

ACTIVATIONS = ["silu", "gelu_tanh", "gelu"]


@pytest.fixture(params=["torch", "triton"])
def path(request):
    with interpreted() if request.param == "triton" else nullcontext():
        yield request.param


class Case:
    """Random gate and up, low-rank terms of them where there are ranks, and a gradient of the product."""

    def __init__(self, shape, dtype, activation="silu", ranks=(0, 0)):
        torch.manual_seed(0)
        self.gate, self.up = (2 * torch.randn(2, *shape)).to(dtype).unbind()
        self.gate.requires_grad_(), self.up.requires_grad_()
        self.dy = torch.randn(shape).to(dtype)
        tokens, columns = self.dy[..., 0].numel(), shape[-1]
        self.lows = [
            (
                torch.randn(tokens, rank).to(dtype).requires_grad_(),
                torch.randn(columns, rank).to(dtype).requires_grad_(),
                scale,
            )
            if rank
            else None
            for rank, scale in zip(ranks, (0.5, 2.0), strict=True)
        ]
        self.activation = activation

    @property
    def inputs(self):
        return [self.gate, self.up, *(factor for low in self.lows if low for factor in low[:2])]

    def values(self, function):
        """The result and the gradients of a function like ours."""
        lows = self.lows if any(self.lows) else []
        y = function(self.gate, self.up, *lows, activation=self.activation)
        return [y, *torch.autograd.grad(y, self.inputs, self.dy)]

    def expected(self):
        """The same in float64."""
        inputs = [x.detach().double().requires_grad_() for x in self.inputs]
        gate, up, *factors = inputs
        if self.lows[0]:
            gate = gate + (self.lows[0][2] * factors[0] @ factors[1].T).view(gate.shape)
        if self.lows[1]:
            up = up + (self.lows[1][2] * factors[-2] @ factors[-1].T).view(up.shape)
        if self.activation == "silu":
            activated = gate / (1 + torch.exp(-gate))
        elif self.activation == "gelu":
            activated = gate * torch.special.ndtr(gate)
        else:
            activated = gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        return [y := activated * up, *torch.autograd.grad(y, inputs, self.dy.double())]


def assert_close(found, expected, dtype):
    for one, other in zip(found, expected, strict=True):
        bound = UNITS[dtype] * torch.finfo(dtype).eps * float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (2, 3, 100), (2, 2500)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_product_and_gradients_are_those_of_float64(activation, shape, dtype, path):
    case = Case(shape, dtype, activation)
    assert_close(case.values(glu), case.expected(), dtype)
    assert_close(case.values(reference_glu), case.expected(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("activation", "shape", "ranks"),
    [
        ("silu", (1, 16), (4, 4)),
        ("silu", (2, 20, 140), (16, 8)),
        ("gelu_tanh", (3, 100), (64, 64)),
        ("gelu", (33, 70), (0, 16)),
        ("silu", (33, 70), (24, 0)),
    ],
)
def test_low_rank_terms_and_their_gradients_are_those_of_float64(activation, shape, ranks, dtype, path):
    case = Case(shape, dtype, activation, ranks)
    assert_close(case.values(glu_lora), case.expected(), dtype)


def test_a_term_of_a_high_rank_is_added_by_torch(path):
    """In bfloat16 that sum is rounded, so here it is float32."""
    case = Case((3, 70), torch.float32, ranks=(module.MAX_RANK + 1, 4))
    assert_close(case.values(glu_lora), case.expected(), torch.float32)


def test_float64_agrees_with_the_reference_of_low_rank_terms():
    case = Case((3, 70), torch.float32, "gelu", (4, 8))
    assert_close(case.values(reference_glu_lora), case.expected(), torch.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_tensor_with_both_has_one_gradient(activation, dtype, path):
    case = Case((2, 3, 100), dtype, activation)
    both = torch.cat((case.gate, case.up), dim=-1).detach().requires_grad_()
    y = glu_packed(both, activation=activation)
    (gradient,) = torch.autograd.grad(y, both, case.dy)
    assert_close([y, *gradient.chunk(2, -1)], case.expected(), dtype)
    assert gradient.is_contiguous()


SIZES = {"hidden_size": 32, "intermediate_size": 80}


@pytest.mark.parametrize(
    ("family", "config", "activation"),
    [
        (LlamaMLP, LlamaConfig(**SIZES), "silu"),
        (GemmaMLP, GemmaConfig(**SIZES), "gelu_tanh"),
        (Gemma2MLP, Gemma2Config(**SIZES), "gelu_tanh"),
        (Gemma3MLP, Gemma3TextConfig(**SIZES), "gelu_tanh"),
        (LlamaMLP, LlamaConfig(**SIZES, hidden_act="gelu"), "gelu"),
        (Phi3MLP, Phi3Config(**SIZES, pad_token_id=None), "silu"),
    ],
)
def test_float32_is_that_of_transformers_bit_for_bit(family, config, activation):
    torch.manual_seed(0)
    mlp, x = family(config), torch.randn(2, 7, 32, requires_grad=True)

    def ours(x):
        if family is Phi3MLP:
            return mlp.down_proj(glu_packed(mlp.gate_up_proj(x), activation=activation))
        return mlp.down_proj(glu(mlp.gate_proj(x), mlp.up_proj(x), activation=activation))

    expected, found = ([y, *torch.autograd.grad(y.sum(), [x, *mlp.parameters()])] for y in (mlp(x), ours(x)))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_liger_kernel_finds_the_same(activation, dtype):
    case = Case((6, 100), dtype, activation)

    def theirs(gate, up, *, activation):
        # Its backward pass writes to what it was given.
        function = liger_swiglu.LigerSiLUMulFunction if activation == "silu" else liger_geglu.LigerGELUMulFunction
        return function.apply(gate.clone(), up.clone())

    with interpreted(liger_swiglu, liger_geglu):
        found, expected = case.values(glu), case.values(theirs)
    # Both round, and liger-kernel rounds the activation before the product as well.
    for one, other in zip(found, expected, strict=True):
        bound = (UNITS[dtype] + 1) * torch.finfo(dtype).eps * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=bound)


def test_large_values_have_finite_gradients(path):
    gate = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4]]).requires_grad_()
    for activation in ACTIVATIONS:
        y = glu(gate, torch.ones_like(gate), activation=activation)
        (gradient,) = torch.autograd.grad(y.sum(), gate)
        torch.testing.assert_close(y, gate.clamp(min=0), rtol=0, atol=1e-6)
        slopes = torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]])
        torch.testing.assert_close(gradient, slopes, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [(0, 0), (8, 8)])
def test_gate_and_up_may_be_views(ranks, path):
    case = Case((2, 3, 48), torch.float32, ranks=ranks)
    function = glu_lora if any(ranks) else glu
    expected = case.values(function)
    both = torch.cat((case.gate, case.up), dim=-1).detach()
    case.gate, case.up = (half.requires_grad_() for half in both.split(48, dim=-1))
    case.dy = case.dy.transpose(0, 1).contiguous().transpose(0, 1)
    found = case.values(function)
    assert_close(found, expected, torch.float32)
    assert all(gradient.is_contiguous() for gradient in found[1:3])


@pytest.mark.parametrize("ranks", [(0, 0), (8, 8)])
def test_no_rows_have_no_product(ranks, path):
    case = Case((0, 48), torch.float32, ranks=ranks)
    y, dgate, dup, *factors = case.values(glu_lora if any(ranks) else glu)
    assert y.shape == dgate.shape == dup.shape == (0, 48)
    assert not any(gradient.any() for gradient in factors)


def test_what_is_kept_is_gate_and_up_and_the_factors():
    case, kept = Case((6, 48), torch.bfloat16, ranks=(8, 8)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        glu(case.gate, case.up, activation="silu")
        assert kept == [case.gate.data_ptr(), case.up.data_ptr()]
        kept.clear()
        glu_lora(case.gate, case.up, *case.lows, activation="silu")
        assert kept == [x.data_ptr() for x in case.inputs]
        kept.clear()
        both = torch.randn(6, 96, requires_grad=True)
        glu_packed(both, activation="silu")
        assert kept == [both.data_ptr()]


def test_frozen_factors_have_no_gradient():
    case = Case((6, 48), torch.float32, ranks=(8, 8))
    expected = case.values(glu_lora)
    for low in case.lows:
        low[1].requires_grad_(False)
    y = glu_lora(case.gate, case.up, *case.lows, activation="silu")
    found = torch.autograd.grad(y, (case.gate, case.up, case.lows[0][0], case.lows[1][0]), case.dy)
    assert all(torch.equal(one, expected[i]) for one, i in zip(found, (1, 2, 3, 5), strict=True))


def test_inputs_and_gradients_are_not_written_to(path):
    case = Case((3, 48), torch.float32, ranks=(8, 8))
    tensors = (*case.inputs, case.dy)
    before = [x.clone() for x in tensors]
    case.values(glu_lora)
    case.lows = [None, None]
    case.values(glu)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_float32_factors_are_cast_and_get_float32_gradients(path):
    """As autocast leaves products in bfloat16 beside adapters that are trained in float32."""
    case = Case((5, 48), torch.bfloat16, ranks=(8, 8))
    expected = case.values(glu_lora)
    case.lows = [(h.detach().float().requires_grad_(), b.detach().float().requires_grad_(), s) for h, b, s in case.lows]
    with torch.autocast("cpu", torch.bfloat16):
        found = case.values(glu_lora)
    assert found[0].dtype == torch.bfloat16
    assert {gradient.dtype for gradient in found[3:]} == {torch.float32}
    assert all(torch.equal(one.to(other.dtype), other) for one, other in zip(found, expected, strict=True))


def test_operations_are_what_torch_is_told_of_them():
    gate, up, dy = torch.randn(3, 2, 5, 48)
    h, b = torch.randn(10, 8), torch.randn(48, 8)
    inputs = (gate.transpose(0, 1), up.transpose(0, 1), [h, b, None, None], [2.0, 0.0], "silu")
    torch.library.opcheck(module._glu, inputs)
    torch.library.opcheck(module._glu_backward, (dy.transpose(0, 1), *inputs))
    torch.library.opcheck(module._glu_packed_backward, (dy, torch.randn(2, 5, 96), "gelu"))


@pytest.mark.parametrize("ranks", [(0, 0), (8, 0)])
def test_it_is_compiled_as_one_graph(ranks):
    case = Case((5, 48), torch.float32, ranks=ranks)
    function = glu_lora if any(ranks) else glu
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for found, expected in zip(case.values(compiled), case.values(function), strict=True):
        assert torch.equal(found, expected)


def test_checkpoints_change_nothing_and_a_tensor_may_be_both():
    x = torch.randn(5, 48, requires_grad=True)
    (found,) = torch.autograd.grad(checkpoint(lambda: glu(x, x, activation="silu"), use_reentrant=False).sum(), x)
    (expected,) = torch.autograd.grad((torch.nn.functional.silu(x) * x).sum(), x)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        assert not glu(x, x, activation="silu").requires_grad
