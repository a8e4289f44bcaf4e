"""LoRA linears against the formula in float64, and against PEFT's layers.

Tolerances are in units of the type's epsilon, times the largest value that is expected. In bfloat16 an output is
rounded twice, base product and sum, and rests on h, rounded too; a gradient of x is rounded once a layer, and rests on
rounded products: 3. In float32 sums of some tens of products are formed in another order: 8.
"""

from contextlib import nullcontext

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import Linear4bit as PeftLinear4bit
from torch.utils.checkpoint import checkpoint

from tests.kernels.interpreter import interpreted
from tests.kernels.references import reference_lora_linears
from tunekit.kernels.dropout import dropout_factors
from tunekit.kernels.lora import Linear, Low, lora_linears, lora_parts
from tunekit.kernels.nf4 import Quantized

UNITS = {torch.float64: 8, torch.float32: 8, torch.bfloat16: 3}
NUM_INPUTS = 64


@pytest.fixture(params=["torch", "triton"])
def path(request):
    with interpreted() if request.param == "triton" else nullcontext():
        yield request.param


def quantised(weight, dtype):
    """A weight in NF4, and what it stands for."""
    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    second = (state.state2.absmax, state.state2.code, state.offset)
    matrix = Quantized(packed, state.absmax, state.code, 64, tuple(weight.shape), dtype, *second)
    return matrix, dequantize_4bit(packed, state)


def layer(num_outputs, rank, dtype=torch.float32, *, base="float", adapters=None, bias=True, dropout=0.0):
    """A random layer, and the weight that its base stands for."""
    weight = torch.randn(num_outputs, NUM_INPUTS).to(dtype)
    low = None
    if rank:
        matrices = torch.randn(rank, NUM_INPUTS) / 8, torch.randn(num_outputs, rank)
        low = Low(*(matrix.to(adapters or dtype).requires_grad_() for matrix in matrices), 0.5, dropout)
    bias = torch.randn(num_outputs).to(dtype) if bias else None
    if base == "nf4":
        matrix, dense = quantised(weight, dtype)
        return Linear(matrix, bias, low=low), dense
    if base == "float8":
        scale = torch.rand(num_outputs, 1) + 0.5
        coarse = weight.to(torch.float8_e4m3fn)
        return Linear(coarse, bias, scale, low), (coarse.float() * scale).to(dtype)
    if base == "float8 in blocks":
        scale = torch.rand(num_outputs // 8, 2) + 0.5
        coarse = weight.to(torch.float8_e4m3fn)
        blocks = scale.repeat_interleave(8, 0).repeat_interleave(NUM_INPUTS // 2, 1)
        return Linear(coarse, bias, scale, low), (coarse.float() * blocks).to(dtype)
    return Linear(weight, bias, low=low), weight


def leaves(x, layers):
    return [x, *(matrix for one in layers if one.low is not None for matrix in (one.low.a, one.low.b))]


def in_float64(x, layers, weights, factors=None):
    """The formula, its leaves in the order of `leaves`, and its outputs."""
    inputs = x.detach().double().requires_grad_()
    found, outputs = [inputs], []
    for place, (one, weight) in enumerate(zip(layers, weights, strict=True)):
        y = inputs @ weight.double().T
        if one.bias is not None:
            y = y + one.bias.double()
        if one.low is not None:
            a, b = (matrix.detach().double().requires_grad_() for matrix in (one.low.a, one.low.b))
            found += [a, b]
            dropped = inputs if factors is None else inputs * factors[place].double()
            y = y + one.low.scale * ((dropped @ a.T) @ b.T)
        outputs.append(y)
    return found, outputs


def assert_close(found, expected, units):
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other.double()).abs().max() / other.double().abs().max()
        assert error <= units * torch.finfo(one.dtype).eps


def assert_equal_to_float64(x, layers, weights, compute=lora_linears, factors=None, units=None, seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    outputs = compute(x, layers)
    expected_leaves, expected = in_float64(x, layers, weights, factors)
    gradients = [torch.randn_like(y) for y in outputs]
    found = torch.autograd.grad(outputs, leaves(x, layers), gradients)
    wanted = torch.autograd.grad(expected, expected_leaves, [gradient.double() for gradient in gradients])
    assert [one.dtype for one in found] == [one.dtype for one in leaves(x, layers)]
    assert_close((*outputs, *found), (*expected, *wanted), units or UNITS[x.dtype])


GROUPS = {
    "one layer": [(40, 16)],
    "two of different ranks": [(40, 4), (24, 64)],
    "three, one without an update": [(40, 8), (24, 0), (24, 3)],
    "none with an update": [(40, 0), (24, 0)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", GROUPS)
def test_groups_of_layers(path, group, dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 9, NUM_INPUTS).to(dtype).requires_grad_()
    layers, weights = zip(*(layer(*sizes, dtype, bias=sizes[0] == 40) for sizes in GROUPS[group]), strict=True)
    assert_equal_to_float64(x, layers, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["nf4", "float8", "float8 in blocks"])
def test_quantised_bases(path, base, dtype):
    torch.manual_seed(0)
    x = torch.randn(5, NUM_INPUTS).to(dtype).requires_grad_()
    layers, weights = zip(*(layer(num, 8, dtype, base=base) for num in (40, 24)), strict=True)
    assert_equal_to_float64(x, layers, weights)


def test_the_plain_form_is_the_same():
    torch.manual_seed(0)
    x = torch.randn(5, NUM_INPUTS, requires_grad=True)
    layers, weights = zip(*(layer(num, 8, base="nf4") for num in (40, 24)), strict=True)
    assert_equal_to_float64(x, layers, weights, reference_lora_linears)


def test_inputs_may_be_views_and_rows_few(path):
    torch.manual_seed(0)
    layers, weights = zip(layer(40, 8), layer(24, 4), strict=True)
    for shape in ((1,), (3, 2), (0,)):
        x = torch.randn(NUM_INPUTS, *shape, requires_grad=True)
        moved = x.movedim(0, -1)
        outputs = lora_linears(moved, layers)
        expected = in_float64(moved, layers, weights)[1]
        assert [y.shape for y in outputs] == [y.shape for y in expected]
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        assert x.grad.shape == x.shape
        if x.numel():
            assert_close(outputs, expected, UNITS[x.dtype])
    with torch.no_grad():
        assert not any(y.requires_grad for y in lora_linears(moved, layers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropped_elements_have_no_gradient(path, dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 9, NUM_INPUTS).to(dtype).requires_grad_()
    layers, weights = zip(
        layer(40, 8, dtype, dropout=0.4), layer(24, 8, dtype), layer(24, 4, dtype, dropout=0.1), strict=True
    )
    torch.manual_seed(7)
    seed = torch.randint(2**63 - 1, (1,))
    factors = [dropout_factors(x, seed, place, one.low.dropout) for place, one in enumerate(layers)]
    assert len({tuple(mask.flatten().tolist()) for mask in factors}) == 3
    # Dropped x and what comes back through it are rounded as well.
    assert_equal_to_float64(x, layers, weights, factors=factors, units=UNITS[dtype] + 1, seed=7)


def test_recomputed_layers_drop_the_same():
    torch.manual_seed(0)
    x = torch.randn(9, NUM_INPUTS, requires_grad=True)
    layers = [layer(40, 8, dropout=0.4)[0], layer(24, 8, base="nf4", dropout=0.4)[0]]
    found = []
    for recomputes in (False, True):
        torch.manual_seed(7)
        outputs = checkpoint(lora_linears, x, layers, use_reentrant=False) if recomputes else lora_linears(x, layers)
        torch.rand(3)
        found.append(torch.autograd.grad([y.sin().sum() for y in outputs], leaves(x, layers)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def peft_layer(base, dtype, adapters, rank=8, compute_dtype=None, dropout=0.0):
    """PEFT's layer with a random update, and the same one as the kernels take it."""
    weight, bias = torch.randn(40, NUM_INPUTS).to(dtype), torch.randn(40).to(dtype)
    if base == "nf4":
        linear = Linear4bit(NUM_INPUTS, 40, compute_dtype=compute_dtype or dtype, quant_type="nf4")
        linear.load_state_dict({"weight": weight, "bias": bias})
        linear.weight = linear.weight._quantize("cpu")
        state = linear.weight.quant_state
        second = (state.state2.absmax, state.state2.code, state.offset)
        weight = Quantized(
            linear.weight, state.absmax, state.code, state.blocksize, tuple(state.shape), linear.compute_dtype, *second
        )
    else:
        linear = torch.nn.Linear(NUM_INPUTS, 40, dtype=dtype)
        linear.load_state_dict({"weight": weight, "bias": bias})
    linear.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=4, lora_dropout=dropout, init_lora_weights=False)
    kind = PeftLinear4bit if base == "nf4" else PeftLinear
    module = kind(linear, "default", config=config, r=rank, lora_alpha=4)
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    a.data, b.data = a.data.to(adapters), b.data.to(adapters)
    return module, Linear(weight, bias, low=Low(a, b, module.scaling["default"]))


@pytest.mark.parametrize("autocasts", [False, True], ids=["as they are", "autocast"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["float", "nf4"])
def test_types_and_results_are_those_of_peft(base, x_dtype, autocasts):
    torch.manual_seed(0)
    # Adapters are kept in float32 beside a base of 16 bits, which without autocast takes no x of 32 bits.
    dtype = torch.bfloat16 if autocasts or base == "nf4" else x_dtype
    module, own = peft_layer(base, dtype, torch.float32)
    x = torch.randn(9, NUM_INPUTS).to(x_dtype).requires_grad_()
    gradient = torch.randn(9, 40)
    found = []
    for compute in (module, lambda x: lora_linears(x, [own])[0]):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            y = compute(x)
        found.append((y, *torch.autograd.grad(y, leaves(x, [own]), gradient.to(y.dtype))))
    peft, ours = found
    assert [one.dtype for one in ours] == [one.dtype for one in peft]
    # PEFT rounds each of its steps as well. Results of 32 bits come from products of 16 bits here, but for one case.
    exact = dtype == torch.float32
    for one, other in zip(ours, peft, strict=True):
        error = (one.double() - other.double()).abs().max() / other.double().abs().max()
        assert error <= (8 * torch.finfo(torch.float32).eps if exact else 3 * torch.finfo(torch.bfloat16).eps)


def test_parts_leave_the_update_to_their_consumer(path):
    torch.manual_seed(0)
    x = torch.randn(2, 9, NUM_INPUTS, requires_grad=True)
    layers, weights = zip(layer(40, 8), layer(24, 0), layer(24, 4, dropout=0.4), strict=True)

    def consume(x, layers):
        parts = lora_parts(x, layers)
        assert parts[1][1] is None
        lows = [one.low for one in layers]
        return tuple(
            y if low is None else y + low.scale * (h @ low.b.T) for (y, h), low in zip(parts, lows, strict=True)
        )

    torch.manual_seed(7)
    seed = torch.randint(2**63 - 1, (1,))
    factors = [dropout_factors(x, seed, place, one.low.dropout if one.low else 0) for place, one in enumerate(layers)]
    assert_equal_to_float64(x, layers, weights, consume, factors, seed=7)


def test_an_output_that_nobody_reads_needs_no_gradient():
    torch.manual_seed(0)
    x = torch.randn(5, NUM_INPUTS, requires_grad=True)
    layers, weights = zip(layer(40, 8), layer(24, 4), strict=True)
    lora_linears(x, layers)[1].sum().backward()
    expected_leaves, expected = in_float64(x, layers, weights)
    expected[1].sum().backward()
    assert layers[0].low.a.grad is None and layers[0].low.b.grad is None
    assert_close([layers[1].low.a.grad, x.grad], [expected_leaves[3].grad, expected_leaves[0].grad], 8)


def test_a_trained_bias_gets_its_gradient_and_frozen_inputs_none():
    torch.manual_seed(0)
    one, _ = layer(40, 8)
    one.bias.requires_grad_()
    x = torch.randn(5, NUM_INPUTS)
    lora_linears(x, [one])[0].sum().backward()
    assert torch.equal(one.bias.grad, torch.full((40,), 5.0))
    assert one.low.a.grad is not None and x.grad is None


def test_nothing_as_wide_as_an_output_or_as_large_as_a_weight_is_saved():
    torch.manual_seed(0)
    x = torch.randn(9, NUM_INPUTS, requires_grad=True)
    layers = [layer(200, 4, base="nf4", dropout=0.1)[0], layer(200, 4)[0]]
    known = {x.data_ptr(), layers[1].weight.data_ptr()}
    sizes = []

    def pack(tensor):
        if tensor.data_ptr() not in known:
            sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lora_linears(x, layers)
    # The largest is the packed weight, half a byte a value; an output would be 7200 bytes, a dense weight 51200.
    assert max(sizes) == 200 * NUM_INPUTS // 2
    assert sorted(sizes)[-2] <= 200 * 4 * 4


def test_it_is_compiled_as_one_graph():
    torch.manual_seed(0)
    x = torch.randn(9, NUM_INPUTS, requires_grad=True)
    layers = [layer(40, 8, dropout=0.4)[0], layer(24, 8, base="nf4")[0], layer(24, 0)[0]]
    found = []
    for compute in (lora_linears, torch.compile(lora_linears, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(7)
        outputs = compute(x, layers)
        found.append((*outputs, *torch.autograd.grad([y.sin().sum() for y in outputs], leaves(x, layers))))
    assert_close(found[1], found[0], 2)


def test_a_trained_base_weight_is_refused():
    one, _ = layer(40, 8)
    one.weight.requires_grad_()
    with pytest.raises(ValueError, match="frozen"):
        lora_linears(torch.randn(5, NUM_INPUTS), [one])


def test_updates_of_different_types_are_refused():
    layers = [layer(40, 8)[0], layer(40, 8, adapters=torch.bfloat16)[0]]
    with pytest.raises(ValueError, match="one dtype"):
        lora_linears(torch.randn(5, NUM_INPUTS), layers)


def test_an_output_may_be_changed_in_place_as_olmo_clips_its_projections():
    torch.manual_seed(0)
    layers, weights = zip(*(layer(num, 4) for num in (32, 16)), strict=True)
    x = torch.randn(2, 5, NUM_INPUTS, requires_grad=True)
    found, exact = leaves(x, layers), in_float64(x, layers, weights)
    clipped = [y.clamp_(-4, 4) for y in lora_linears(x, layers)]
    wanted = [y.clamp(-4, 4) for y in exact[1]]
    assert all((one.abs() == 4).any() for one in clipped)
    ours = torch.autograd.grad(sum(y.square().sum() for y in clipped), found)
    theirs = torch.autograd.grad(sum(y.square().sum() for y in wanted), exact[0])
    for one, other in zip([*clipped, *ours], [*wanted, *theirs], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
