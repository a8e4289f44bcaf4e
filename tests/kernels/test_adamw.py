"""AdamW in few bits: against torch's in float32, its kernel against itself in torch bit by bit, what rounding loses."""

import copy
import math

import pytest
import torch

from tests.kernels.interpreter import interpreted
from tunekit.kernels import adamw
from tunekit.kernels.adamw import AdamW
from tunekit.kernels.adamw_codes import M_EXPONENTS, V_EXPONENTS, decoded, decoded_4bit, encoded, encoded_4bit
from tunekit.kernels.adamw_kernel import BLOCK, GROUP, LEAST_SCALE, M_LIMITS

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

EPS = torch.finfo(torch.float32).eps

SIZES = [(1,), (3, 5), (BLOCK,), (GROUP + 300,), (3, 16, 128), (GROUP + 256,)]
"""One value, less than a block, one exactly, more than what a program updates, and the two with states in 4 bits."""

SHAPES = [(64, 64), (33, 256), (5,), (33, 128), (3, 16, 128), (16, 256), (4095,), (GROUP + 256,)]
"""Matrices, more dimensions, less than 4096 values, exactly as many, and no multiple of 256."""


def parameters_of(dtype, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def take_steps(optimizer, num_steps, *, first=0):
    """Steps with gradients that are the same for the same step, of sizes far apart."""
    for step in range(first, first + num_steps):
        torch.manual_seed(100 + step)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                sizes = torch.logspace(-6, 2, parameter.numel()).view(parameter.shape)
                parameter.grad = (torch.randn(parameter.shape) * sizes).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
def test_in_float32_it_is_the_adamw_of_torch(kernel):
    ours, theirs = parameters_of(torch.float32), parameters_of(torch.float32)
    optimizer = AdamW(ours, **OPTIONS, states="float32")
    if kernel:
        with interpreted():
            take_steps(optimizer, 2)
    else:
        take_steps(optimizer, 2)
    take_steps(torch.optim.AdamW(theirs, **OPTIONS), 2)
    for one, other in zip(ours, theirs, strict=True):
        # Each of two steps rounds a few times.
        torch.testing.assert_close(one, other, rtol=8 * torch.finfo(torch.float32).eps, atol=1e-8)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dtype", "states"),
    [
        (torch.float32, "float32"),
        (torch.float32, "8bit"),
        (torch.bfloat16, "bfloat16"),
        (torch.bfloat16, "8bit"),
        (torch.float32, "4bit"),
        (torch.bfloat16, "4bit"),
    ],
)
def test_kernel_and_torch_give_the_same_bits(dtype, states):
    in_torch, in_triton = parameters_of(dtype), parameters_of(dtype)
    optimizers = [AdamW(parameters, **OPTIONS, states=states, seed=5) for parameters in (in_torch, in_triton)]
    take_steps(optimizers[0], 2)
    with interpreted():
        take_steps(optimizers[1], 2)
    for one, other in zip(in_torch, in_triton, strict=True):
        assert torch.equal(one, other)
        found, expected = optimizers[0].state[one], optimizers[1].state[other]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
def test_a_scale_of_gradients_is_as_if_they_were_scaled(kernel):
    plain, scaled = (torch.nn.Parameter(torch.ones(300)) for _ in range(2))
    gradient = torch.randn(300)
    plain.grad, scaled.grad = gradient / 4, gradient
    AdamW([plain], **OPTIONS).step()
    with interpreted() if kernel else torch.enable_grad():
        AdamW([scaled], **OPTIONS).step(gradient_scale=torch.tensor(0.25))
    assert torch.equal(plain, scaled)


def test_random_words_are_those_of_philox():
    """Of the authors' known answers, those for a counter of zeros; their key is that of zeros too."""
    words = adamw._random_words(0, 0, GROUP).view(4, -1)
    assert [f"{int(word):08x}" for word in words[:, 0]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_each_part_of_a_tensor_has_random_words_of_its_own():
    words = adamw._random_words(77, 0, 3 * GROUP)
    assert torch.equal(adamw._random_words(77, 1, GROUP), words[GROUP : 2 * GROUP])
    assert len(words.unique()) > 0.99 * len(words)
    keys = {adamw._key(*of) for of in [(0, 1, 0, []), (1, 1, 0, []), (0, 2, 0, []), (0, 1, 1, []), (0, 1, 0, [1])]}
    assert len(keys) == 5


def test_an_update_below_half_a_unit_moves_the_mean_by_what_it_is():
    """Between 1 and 1 - 2^-8 a step of 2^-12 is taken once in 16 times; to the nearest it never would.

    Of a million values the mean is off by less than five of its standard deviations.
    """
    count, update = 2**20, 2.0**-12
    parameter = torch.nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    AdamW([parameter], lr=update, eps=0.0).step()
    assert set(parameter.detach().float().unique().tolist()) == {1.0, 1 - 2.0**-8}
    share = update * 2**8
    deviation = 2.0**-8 * math.sqrt(share * (1 - share) / count)
    assert abs(1 - float(parameter.detach().double().mean()) - update) < 5 * deviation
    assert (1 - torch.tensor(update)).bfloat16() == 1


def test_rounding_at_random_is_right_on_average_over_seeds():
    """The sum of 400 seeds' roundings of 4096 values; each is off by at most a unit, with half of one as deviation."""
    torch.manual_seed(0)
    exact = torch.randn(4096)
    total = torch.zeros(4096, dtype=torch.float64)
    for seed in range(400):
        random = adamw._random_words(adamw._key(seed, 1, 0, []), 0, 4096).int() & 0xFFFF
        total += adamw._rounded(exact, torch.bfloat16, random).double()
    unit = 2.0 ** (exact.abs().log2().floor().double() - 7)
    errors = (total / 400 - exact) / unit
    assert float(errors.abs().max()) < 5 * 0.5 / math.sqrt(400)
    assert abs(float(errors.mean())) < 5 * 0.5 / math.sqrt(400 * 4096)


@pytest.mark.parametrize("states", ["bfloat16", "8bit"])
def test_a_state_falls_to_what_gradients_have_become(states):
    """After 500 steps with a tenth of the gradient, v has fallen as it should; to the nearest it would never."""
    parameter = torch.nn.Parameter(torch.zeros(256))
    optimizer = AdamW([parameter], lr=0.0, states=states)
    parameter.grad = torch.ones_like(parameter)
    for _ in range(10):
        optimizer.step()
    parameter.grad = parameter.grad / 10
    for _ in range(500):
        optimizer.step()
    state = optimizer.state[parameter]
    v = state["v"].float() if states == "bfloat16" else decoded(state["v"], state["v_scale"], V_EXPONENTS, signed=False)
    exact = (1 - 0.999**10) * 0.999**500 + 0.01 * (1 - 0.999**500)
    assert float(v.mean()) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(("exponents", "signed"), [(M_EXPONENTS, True), (V_EXPONENTS, False)], ids=["m", "v"])
def test_codes_are_off_by_an_eighth_at_most_and_not_on_average(exponents, signed):
    torch.manual_seed(0)
    x = torch.randn(2048) * 10.0 ** torch.randint(-14, 2, (2048,))
    x = x if signed else x.abs()
    largest = x.abs().view(-1, BLOCK).amax(-1).repeat_interleave(BLOCK)
    least = largest * 2.0 ** (1 - exponents)
    bound = torch.maximum(x.abs() / 8, least) * (1 + 1e-6)
    total = torch.zeros(2048, dtype=torch.float64)
    for seed in range(400):
        codes, scales = encoded(x, (adamw._random_words(seed, 0, 2048) >> 16).int(), exponents, signed=signed)
        found = decoded(codes, scales, exponents, signed=signed)
        assert bool(((found - x).abs() <= bound).all())
        assert torch.equal(found[x.abs() == largest], x[x.abs() == largest])
        assert signed or bool((found[x > 0] > 0).all())
        total += found.double()
    unbiased = x.abs() >= least if not signed else x.abs() >= 0
    errors = ((total / 400 - x) / bound)[unbiased]
    assert float(errors.abs().max()) < 5 * 0.5 / math.sqrt(400)


def test_blocks_of_zeros_stay_zeros():
    codes, scales = encoded(torch.zeros(300), torch.full((300,), 0xFFFF, dtype=torch.int32), M_EXPONENTS, signed=True)
    assert not codes.any() and not scales.any() and scales.shape == (2,)


@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit", "4bit"])
def test_a_resumed_optimizer_gives_the_same_bits(states, tmp_path):
    through, broken = parameters_of(torch.bfloat16), parameters_of(torch.bfloat16)
    take_steps(AdamW(through, **OPTIONS, states=states, seed=3), 5)
    first = AdamW(broken, **OPTIONS, states=states, seed=3)
    take_steps(first, 2)
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    take_steps(first, 3, first=2)
    again = copy.deepcopy(parameters_of(torch.bfloat16))
    half = AdamW(again, **OPTIONS, states=states, seed=3)
    take_steps(half, 2)
    resumed = AdamW(again, **OPTIONS, states=states)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    take_steps(resumed, 3, first=2)
    for one, other, third in zip(through, broken, again, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)


def test_another_seed_gives_other_bits_and_the_same_seed_the_same():
    found = []
    for seed in (1, 1, 2):
        parameters = parameters_of(torch.bfloat16)
        take_steps(AdamW(parameters, lr=1e-3, seed=seed), 2)
        found.append(parameters[-1])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.fixture(scope="module")
def torchao_optim():
    """torchao's optimizers, whose steps are not compiled."""
    from torchao import optim

    with torch.compiler.set_stance("force_eager"):
        yield optim


def states_of_torchao(optimizer, parameter):
    """m and v of torchao's optimizer, and their scales if they are in 4 bits, by our names."""
    state = optimizer.state[parameter]
    of_names = {"m": state["exp_avg"], "v": state["exp_avg_sq"]}
    if not hasattr(of_names["m"], "codes"):
        return of_names
    scales = {f"{name}_scale": value.scale for name, value in of_names.items()}
    return {name: value.codes for name, value in of_names.items()} | scales


def begin_as(parameter, optimizer, other, reference):
    """Give a parameter the values and states of torchao's, and return m and v in float64."""
    with torch.no_grad():
        parameter.copy_(other)
    state = optimizer.state[parameter]
    if not state:
        return [torch.zeros(parameter.numel(), dtype=torch.float64)] * 2
    expected = states_of_torchao(reference, other)
    assert expected.keys() == state.keys() - {"step"}
    for name, value in expected.items():
        state[name].copy_(value)
    if "m_scale" not in state:
        return [state[name].flatten().double() for name in ("m", "v")]
    return [decoded_4bit(state[name], state[f"{name}_scale"], signed=name == "m").double() for name in ("m", "v")]


def in_float64(parameter, m, v, step):
    """m, v and weights after a step, exact but for what they are before it."""
    weight, gradient = parameter.detach().flatten().double(), parameter.grad.flatten().double()
    (beta1, beta2), lr = OPTIONS["betas"], OPTIONS["lr"]
    m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient.square()
    update = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + OPTIONS["eps"])
    return m, v, (1 - lr * OPTIONS["weight_decay"]) * weight - lr * update


def assert_codes(packed, exact, table):
    """Codes are of the values of a table that are nearest to numbers, but where two are as near to 1e-6."""
    largest = exact.abs().view(-1, BLOCK).amax(-1).clamp(min=LEAST_SCALE).repeat_interleave(BLOCK)
    nearest = ((exact / largest)[:, None] - table).abs().topk(2, dim=1, largest=False)
    is_clear = nearest.values[:, 1] - nearest.values[:, 0] > 1e-6
    assert is_clear.float().mean() > 0.999
    found = torch.stack([packed >> 4, packed & 15], dim=-1).flatten().long()
    assert torch.equal(found[is_clear], nearest.indices[:, 0][is_clear])


def test_steps_in_4_bits_are_those_of_torchao_and_of_the_formula_in_float64(torchao_optim):
    """Both begin each step with the same weights and states, and are held against float64 to what float32 rounds."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    optimizer = AdamW(ours, **OPTIONS, states="4bit")
    reference = torchao_optim.AdamW4bit(theirs, **OPTIONS, block_size=256)
    signed = torch.tensor(torchao_optim.quant_utils.create_dynamic_map(True, 3, 4), dtype=torch.float64)
    tables = {"m": signed, "v": torch.arange(1, 17, dtype=torch.float64) / 16}
    for step in range(1, 6):
        moments, exact = [], []
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape) * torch.logspace(-6, 2, one.numel()).view(one.shape)
            other.grad = one.grad.clone()
            moments.append(begin_as(one, optimizer, other, reference))
            exact.append(in_float64(one, *moments[-1], step))
        optimizer.step()
        reference.step()
        for one, other, (old_m, _), (m, v, weight) in zip(ours, theirs, moments, exact, strict=True):
            is_4bit = one.numel() >= 4096 and one.numel() % 256 == 0
            for parameter, state in ((one, optimizer.state[one]), (other, states_of_torchao(reference, other))):
                error = (parameter.flatten().double() - weight).abs()
                # torchao takes 1 - b^t in float32.
                assert bool((error <= 2 * EPS * weight.abs() + 1e-5 * OPTIONS["lr"]).all())
                assert ("m_scale" in state) == is_4bit
                if is_4bit:
                    for name, number in (("m", m), ("v", v)):
                        assert_codes(state[name], number, tables[name])
                        largest = number.abs().view(-1, BLOCK).amax(-1).clamp(min=LEAST_SCALE)
                        torch.testing.assert_close(state[f"{name}_scale"].double(), largest, rtol=4 * EPS, atol=0)
                else:
                    sizes = old_m.abs() + one.grad.flatten().abs()
                    assert bool(((state["m"].flatten().double() - m).abs() <= 2 * EPS * sizes).all())
                    torch.testing.assert_close(state["v"].flatten().double(), v, rtol=4 * EPS, atol=1e-30)


def test_codes_in_4_bits_are_torchaos_to_the_last_bit(torchao_optim):
    """Around each limit between two values, at both ends, and for zeros, and back."""
    functions = torchao_optim.quant_utils
    signed = torch.tensor(functions.create_dynamic_map(True, 3, 4))
    for table, is_signed in ((signed, True), (torch.linspace(0, 1, 17)[1:], False)):
        limits = torch.tensor(M_LIMITS) if is_signed else (table[1:] + table[:-1]) / 2
        beside = [limits]
        for direction in (-10.0, 10.0):
            moved = limits
            for _ in range(20):
                moved = torch.nextafter(moved, torch.tensor(direction))
                beside.append(moved)
        x = torch.cat([*beside, table, table.new_tensor([0.0, 1.0]), *([torch.tensor([-1.0])] if is_signed else [])])
        x = torch.nn.functional.pad(x, (0, -len(x) % (BLOCK - 1))).view(-1, BLOCK - 1)
        x = torch.nn.functional.pad(x, (0, 1), value=1.0).flatten()
        packed, scales = encoded_4bit(x, signed=is_signed)
        assert torch.equal(scales, torch.ones_like(scales))
        expected = functions.quantize_4bit_with_qmap(x, table)
        assert torch.equal(torch.stack([packed >> 4, packed & 15], dim=-1).flatten(), expected)
        scales = torch.rand(len(scales))
        codes = expected.view(len(scales), -1)
        assert torch.equal(
            decoded_4bit(packed, scales, signed=is_signed), functions.dequant_with_qmap(codes, table, scales).flatten()
        )
    packed, scales = encoded_4bit(torch.zeros(512), signed=False)
    assert not packed.any() and torch.equal(scales, torch.full((2,), 1e-12))


def test_a_transposed_parameter_is_updated_where_it_is():
    plain = torch.nn.Parameter(torch.randn(6, 4))
    turned = torch.nn.Parameter(plain.detach().t().contiguous().t())
    plain.grad = torch.randn(6, 4)
    turned.grad = plain.grad.clone()
    for parameter in (plain, turned):
        AdamW([parameter], **OPTIONS).step()
    assert torch.equal(plain, turned) and not turned.is_contiguous()


def test_half_precision_is_refused():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(TypeError, match="and float32 parameters"):
        AdamW([parameter]).step()
