"""Rotary positions and norms of queries and keys, against complex numbers in float64 and against transformers' modules.

Tolerances are in units of the type's epsilon, times the largest value that is expected. In bfloat16 a value is rounded
up to five times (norm, weight, two products, their sum), each by half a unit at most: 3. In float32 the errors of the
norm's sum come on top: 8.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as apply_in_float32
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.kernels.interpreter import interpreted
from tests.kernels.references import reference_qk_norm_rope
from tunekit.kernels.rope import qk_norm_rope

EPS = 1e-6

UNITS = {torch.float32: 8, torch.bfloat16: 3}

# (batch, seq, heads, kv_heads, head_dim, rotary_dim), with blocks that are not full in each way.
SHAPES = {
    "one row": (1, 1, 1, 1, 64, 64),
    "grouped heads": (2, 5, 6, 2, 16, 16),
    "odd heads": (1, 7, 7, 1, 32, 32),
    "a half that is no power of two": (1, 3, 4, 4, 96, 96),
    "part of each head": (2, 3, 3, 2, 80, 32),
    "more than a block": (1, 9, 8, 2, 256, 256),
}


@pytest.fixture(params=["torch", "triton"])
def path(request):
    with interpreted() if request.param == "triton" else nullcontext():
        yield request.param


class Case:
    """Random queries and keys, as views of one projection, and angles of positions that begin anew within a row."""

    def __init__(self, shape, dtype, *, norms=True, offset=0.0, batch_of_angles=1, weights=None, angles=None):
        batch, seq, heads, kv_heads, head_dim, rotary_dim = shape
        torch.manual_seed(0)
        fused = torch.randn(batch, seq, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        self.q = fused[..., : heads * head_dim].view(batch, seq, heads, head_dim).requires_grad_()
        self.k = fused[..., heads * head_dim :][..., : kv_heads * head_dim].view(batch, seq, kv_heads, head_dim)
        self.k.requires_grad_()
        positions = torch.stack([(torch.arange(seq) + row) % max(seq // 2, 1) for row in range(batch_of_angles)])
        self.angles = positions[..., None] / 100 ** (torch.arange(rotary_dim // 2) / rotary_dim)
        both = torch.cat((self.angles, self.angles), dim=-1)
        self.cos, self.sin = (values.to(angles or dtype) for values in (both.cos(), both.sin()))
        self.offset, self.norms = offset, norms
        self.weights = [torch.randn(head_dim).to(weights or dtype).requires_grad_() for _ in range(2 * norms)]
        self.gradients = [torch.randn_like(self.q), torch.randn_like(self.k)]

    @property
    def inputs(self):
        return [self.q, self.k, *self.weights]

    def values(self, function, **options):
        """Results and gradients of a function like ours."""
        q_weight, k_weight = self.weights or (None, None)
        options = {"eps": EPS, "offset": self.offset, "q_weight": q_weight, "k_weight": k_weight} | options
        results = function(self.q, self.k, self.cos, self.sin, **options)
        gradients = [dy.to(y.dtype) for dy, y in zip(self.gradients, results, strict=True)]
        return [*results, *torch.autograd.grad(results, self.inputs, gradients)]

    def expected(self):
        """The same in float64: pairs are complex numbers, which are turned by multiplication."""
        inputs = [tensor.detach().double().requires_grad_() for tensor in self.inputs]
        half = self.cos.shape[-1] // 2
        turn = torch.complex(self.cos[..., :half].double(), self.sin[..., :half].double())[:, :, None]
        results = []
        for x, weight in zip(inputs[:2], inputs[2:] or (None, None), strict=True):
            if weight is not None:
                x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (self.offset + weight)
            turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
            results.append(torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1))
        return [*results, *torch.autograd.grad(results, inputs, [dy.double() for dy in self.gradients])]


def assert_close(found, expected, dtype):
    for one, other in zip(found, expected, strict=True):
        bound = UNITS[dtype] * torch.finfo(dtype).eps * float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=bound)


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "casting"),
    [
        ("one row", "llama"),
        ("grouped heads", "llama"),
        ("odd heads", "gemma"),
        ("odd heads", None),
        ("a half that is no power of two", None),
        ("part of each head", "llama"),
        ("part of each head", "float32"),
        ("part of each head", None),
        ("more than a block", "gemma"),
    ],
)
def test_results_and_gradients_are_those_of_float64(shape, dtype, casting, path):
    case = Case(SHAPES[shape], dtype, norms=casting is not None, offset=float(casting == "gemma"))
    options = {} if casting is None else {"casting": casting}
    assert_close(case.values(qk_norm_rope, **options), case.expected(), dtype)
    assert_close(case.values(reference_qk_norm_rope, **options), case.expected(), dtype)


def of_transformers(norm, apply):
    """A function like ours made of transformers' own, whose heads come before the tokens."""

    def function(q, k, cos, sin, *, q_weight, k_weight, eps, offset):
        if q_weight is not None:
            modules = norm(q.shape[-1], eps=eps), norm(q.shape[-1], eps=eps)
            for module, weight in zip(modules, (q_weight, k_weight), strict=True):
                del module.weight
                module.weight = weight
            q, k = modules[0](q), modules[1](k)
        return tuple(x.transpose(1, 2) for x in apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin))

    return function


@pytest.mark.parametrize(
    ("casting", "norm", "apply"),
    [
        ("llama", None, apply_rotary_pos_emb),
        ("llama", None, apply_partial),
        ("float32", None, apply_in_float32),
        ("llama", Qwen3RMSNorm, apply_rotary_pos_emb),
        ("gemma", Gemma3RMSNorm, apply_rotary_pos_emb),
    ],
)
def test_values_in_bfloat16_are_rounded_where_transformers_rounds_them(casting, norm, apply, path):
    shape = SHAPES["part of each head" if apply is apply_partial else "grouped heads"]
    angles = torch.float32 if apply is apply_in_float32 else None
    case = Case(shape, torch.bfloat16, norms=norm is not None, offset=float(casting == "gemma"), angles=angles)
    found = case.values(qk_norm_rope, casting=casting)
    expected = case.values(of_transformers(norm, apply))
    # OLMo's gradients are rounded more often there than ours.
    num_exact = 2 if apply is apply_in_float32 else 4
    for one, other in zip(found[:num_exact], expected[:num_exact], strict=True):
        # A sum in another order may end on the other side of a rounding now and then.
        assert (one == other).float().mean() > 0.99
    assert_close(found, expected, torch.bfloat16)


def test_each_row_has_its_own_positions_where_these_are_given(path):
    case = Case((3, 6, 4, 2, 32, 32), torch.float32, batch_of_angles=3)
    assert_close(case.values(qk_norm_rope), case.expected(), torch.float32)


def test_weights_in_float32_leave_bfloat16_results_in_their_type(path):
    case = Case(SHAPES["grouped heads"], torch.bfloat16, weights=torch.float32)
    found = case.values(qk_norm_rope)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16] * 4 + [torch.float32] * 2
    assert_close(found, case.expected(), torch.bfloat16)


def test_results_keep_the_order_of_transposed_inputs(path):
    case = Case((2, 5, 4, 2, 32, 32), torch.float32)
    q, k = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k))
    turned_q, turned_k = qk_norm_rope(q, k, case.cos, case.sin)
    assert turned_q.stride() == q.stride() and turned_k.stride() == k.stride()
    for one, other in zip((turned_q, turned_k), qk_norm_rope(case.q, case.k, case.cos, case.sin), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_no_rows_have_no_values_and_weights_no_gradient(path):
    case = Case((0, 5, 4, 2, 32, 32), torch.float32)
    *rows, dq_weight, dk_weight = case.values(qk_norm_rope)
    assert all(tensor.numel() == 0 for tensor in rows)
    assert dq_weight.shape == (32,) and not dq_weight.any() and not dk_weight.any()


def test_frozen_weights_change_no_other_gradient(path):
    case = Case(SHAPES["grouped heads"], torch.float32)
    learning = case.values(qk_norm_rope)
    for weight in case.weights:
        weight.requires_grad_(False)
    results = qk_norm_rope(
        *case.inputs[:2], case.cos, case.sin, q_weight=case.weights[0], k_weight=case.weights[1], eps=EPS
    )
    frozen = torch.autograd.grad(results, case.inputs[:2], case.gradients)
    for one, other in zip(frozen, learning[2:4], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_an_upside_down_gradient_is_read_by_its_strides(path):
    case = Case(SHAPES["grouped heads"], torch.float32)
    plain = case.values(qk_norm_rope)
    case.gradients = [dy.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for dy in case.gradients]
    for one, other in zip(case.values(qk_norm_rope), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_only_what_the_backward_pass_needs_is_kept():
    case = Case(SHAPES["grouped heads"], torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        qk_norm_rope(case.q, case.k, case.cos, case.sin)
        assert [tensor is angles for tensor, angles in zip(kept, (case.cos, case.sin), strict=True)] == [True, True]
        kept.clear()
        qk_norm_rope(case.q, case.k, case.cos, case.sin, q_weight=case.weights[0], k_weight=case.weights[1], eps=EPS)
    own = [tensor for tensor in kept if tensor.data_ptr() not in {tensor.data_ptr() for tensor in case.inputs}]
    assert sorted(tensor.shape for tensor in own if tensor.dtype == torch.float32) == [(2, 5, 2), (2, 5, 6)]
    assert all(tensor.dtype == torch.float32 or tensor.shape == case.cos.shape for tensor in own)


def test_recomputed_activations_have_the_same_gradients(path):
    case = Case(SHAPES["grouped heads"], torch.float32)
    for one, other in zip(
        case.values(lambda *args, **options: checkpoint(qk_norm_rope, *args, use_reentrant=False, **options)),
        case.values(qk_norm_rope),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_one_weight_alone_is_refused():
    case = Case(SHAPES["grouped heads"], torch.float32)
    with pytest.raises(ValueError, match="both q_weight and k_weight, or neither"):
        qk_norm_rope(case.q, case.k, case.cos, case.sin, q_weight=case.weights[0])


@pytest.mark.parametrize("norms", [True, False], ids=["norms", "none"])
def test_torch_compile_sees_one_graph(norms):
    case = Case(SHAPES["grouped heads"], torch.float32, norms=norms)
    compiled = torch.compile(qk_norm_rope, backend="aot_eager", fullgraph=True)
    for one, other in zip(case.values(compiled), case.values(qk_norm_rope), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_operations_are_what_they_claim_to_be():
    case = Case(SHAPES["part of each head"], torch.bfloat16)
    q, k, *weights = (tensor.detach() for tensor in case.inputs)
    torch.library.opcheck(torch.ops.tunekit.rope, (q, k, case.cos, case.sin, True))
    torch.library.opcheck(torch.ops.tunekit.qk_norm_rope, (q, k, case.cos, case.sin, *weights, EPS, 0.0, True))
    rstd = torch.rand(2, 3, 3), torch.rand(2, 3, 2)
    for learns in (True, False):
        arguments = (*case.gradients, q, k, case.cos, case.sin, *weights, *rstd, 0.0, True, learns)
        torch.library.opcheck(torch.ops.tunekit.qk_norm_rope_backward, arguments)
