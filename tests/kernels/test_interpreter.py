"""The interpreter of kernels computes what devices do, as torch does in bfloat16; all is as before in the end."""

import contextlib
import sys

import numpy as np
import pytest
import torch
import triton
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, ReduceOps, ScanOps
from triton.runtime.jit import JITFunction

from tests.kernels import interpreter as support
from tests.kernels.interpreter import CORRECTIONS, interpreted, narrow, widen
from tunekit.kernels import backend
from tunekit.kernels.backend import jit, tl

HERE = sys.modules[__name__]
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": lambda x, y: torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.maximum(x, y))),
    "minimum": lambda x, y: torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.minimum(x, y))),
    "less": lambda x, y: (x < y).to(x.dtype),
    "equal": lambda x, y: (x == y).to(x.dtype),
    "smaller": lambda x, y: torch.where(x < y, x, y),
    "masked": lambda x, y: ((x < y) & (x != 0)).to(x.dtype),
}
UNARY = {
    "neg": torch.neg,
    "abs": torch.abs,
    "scaled": lambda x: torch.tensor(1.7, dtype=x.dtype) * x,
    "clamp": lambda x: x.clamp(-1.5, 1.5),
    "rounded": lambda x: (x.float() * 1.00390625).to(x.dtype),
}


@jit
def _twice(x):
    return x + x


@jit
def _elementwise(x_ptr, y_ptr, out_ptr, num, operation: tl.constexpr, block: tl.constexpr):
    index = tl.program_id(0) * block + tl.arange(0, block)
    mask = index < num
    x = tl.load(x_ptr + index, mask=mask, other=0.0)
    y = tl.load(y_ptr + index, mask=mask, other=0.0)
    if operation == "add":
        out = x + y
    elif operation == "sub":
        out = x - y
    elif operation == "mul":
        out = x * y
    elif operation == "div":
        out = x / y
    elif operation == "maximum":
        out = tl.maximum(x, y)
    elif operation == "minimum":
        out = tl.minimum(x, y)
    elif operation == "less":
        out = x < y
    elif operation == "equal":
        out = x == y
    elif operation == "smaller":
        out = tl.where(x < y, x, y)
    elif operation == "masked":
        out = (x < y) & (x != 0.0)
    elif operation == "neg":
        out = -x
    elif operation == "abs":
        out = tl.abs(x)
    elif operation == "scaled":
        out = x * 1.7
    elif operation == "clamp":
        out = tl.clamp(x, -1.5, 1.5)
    elif operation == "rounded":
        out = x.to(tl.float32) * 1.00390625
    elif operation == "twice":
        out = _twice(x)
    tl.store(out_ptr + index, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _copy(x_ptr, out_ptr, num: tl.constexpr):
    index = tl.arange(0, num)
    tl.store(out_ptr + index, tl.load(x_ptr + index).to(out_ptr.dtype.element_ty))


@jit
def _product(a_ptr, b_ptr, out_ptr, size: tl.constexpr):
    index = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(out_ptr + index, tl.dot(tl.load(a_ptr + index), tl.load(b_ptr + index)))


@jit
def _along_rows(x_ptr, out_ptr, operation: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    row = tl.arange(0, rows)
    index = row[:, None] * columns + tl.arange(0, columns)[None, :]
    x = tl.load(x_ptr + index)
    if operation == "cumsum":
        tl.store(out_ptr + index, tl.cumsum(x, axis=1))
    elif operation == "cumprod":
        tl.store(out_ptr + index, tl.cumprod(x, axis=1))
    else:
        if operation == "sum":
            out = tl.sum(x, axis=1)
        elif operation == "method":
            out = x.sum(axis=1)
        elif operation == "max":
            out = tl.max(x, axis=1)
        elif operation == "min":
            out = tl.min(x, axis=1)
        else:
            out = tl.argmax(x, axis=1)
        tl.store(out_ptr + row, out)


@jit
def _fused(x_ptr, out_ptr, num: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, num))
    tl.store(out_ptr + tl.arange(0, num), tl.fma(x, x, x))


@jit
def _scaled(x_ptr, out_ptr, factor, num: tl.constexpr):
    index = tl.arange(0, num)
    tl.store(out_ptr + index, tl.load(x_ptr + index) * factor.to(tl.float32))


def any_bfloat16(num: int, seed: int) -> torch.Tensor:
    """Random bits: subnormals, infinities and NaN among them, and as often a number near one."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (num,), generator=generator, dtype=torch.int16)
    near = torch.randn(num, generator=generator).to(torch.bfloat16)
    return torch.where(torch.rand(num, generator=generator) < 0.5, bits.view(torch.bfloat16), near)


def elementwise(operation: str, num: int = 3000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = any_bfloat16(num, seed=0), any_bfloat16(num, seed=1)
    y[:100] = x[:100]
    out = torch.empty_like(x)
    _elementwise[(-(-num // 1024),)](x, y, out, num, operation, 1024)
    return x, y, out


def same(computed: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(computed, expected, rtol=0, atol=0, equal_nan=True)


def check_binary(operation: str) -> None:
    x, y, out = elementwise(operation)
    same(out, BINARY[operation](x, y))


def check_unary(operation: str) -> None:
    x, _, out = elementwise(operation)
    if operation == "clamp":  # NaN becomes a limit on devices
        x, out = x[~x.isnan()], out[~x.isnan()]
    same(out, UNARY[operation](x))


def check_dot() -> None:
    a, b = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out = torch.empty(32, 32)
    _product[(1,)](a, b, out, 32)
    # 32 products, each exact in float32, and as many roundings of sums of about 6.
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=0, atol=1e-5)


def check_along_rows(operation: str) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    if operation == "cumprod":
        x = x.sign() * 2.0 ** (torch.arange(64) % 2 * 2 - 1)  # products that are exact
        x = x.to(torch.bfloat16)
    whole = operation in ("cumsum", "cumprod")
    out = torch.empty(8, 64 if whole else 1, dtype=torch.int32 if operation == "argmax" else torch.bfloat16)
    _along_rows[(1,)](x, out, operation, 8, 64)
    exact = x.double()
    expected = {
        "sum": exact.sum(1, keepdim=True),
        "method": exact.sum(1, keepdim=True),
        "max": exact.amax(1, keepdim=True),
        "min": exact.amin(1, keepdim=True),
        "argmax": exact.argmax(1, keepdim=True),
        "cumsum": exact.cumsum(1),
        "cumprod": exact.cumprod(1),
    }[operation]
    # One rounding to bfloat16 of sums that float32 has to about 1e-6.
    torch.testing.assert_close(out.double(), expected.double(), rtol=2**-8, atol=1e-5)


def check_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator, dtype=torch.int64).to(torch.int32)
    ties = (bits & ~0xFFFF) | 0x8000
    x = torch.cat([bits, ties]).view(torch.float32)
    out = torch.empty(8192, dtype=torch.bfloat16)
    _copy[(1,)](x, out, 8192)
    same(out, x.to(torch.bfloat16))


def check_integers() -> None:
    x = torch.randint(-(2**20), 2**20, (1024,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    out = torch.empty(1024, dtype=torch.bfloat16)
    _copy[(1,)](x, out, 1024)
    same(out, x.to(torch.bfloat16))


def check_float_argument() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    out = torch.empty(64)
    _scaled[(1,)](x, out, 0.3, 64)
    same(out, x * torch.tensor(0.3))


CHECKS = {
    **{operation: lambda operation=operation: check_binary(operation) for operation in BINARY},
    **{operation: lambda operation=operation: check_unary(operation) for operation in UNARY},
    **{
        operation: lambda operation=operation: check_along_rows(operation)
        for operation in ("sum", "method", "max", "min", "argmax", "cumsum", "cumprod")
    },
    "dot": check_dot,
    "rounding": check_rounding,
    "integers": check_integers,
    "float_argument": check_float_argument,
}


def state() -> dict[str, dict[str, object]]:
    """Every name in whatever is changed while kernels are interpreted."""
    modules = [module for name, module in sys.modules.items() if f"{name}.".startswith(("triton.", "tunekit.kernels."))]
    owners = [HERE, *modules, tl.tensor, tl.dtype, tl.condition, tl.core.tensor_descriptor_base, ReduceOps, ScanOps]
    owners += [InterpreterBuilder, InterpretedFunction]
    return {f"{owner.__name__} {position}": dict(vars(owner)) for position, owner in enumerate(owners)}


@pytest.mark.parametrize("check", CHECKS)
def test_bfloat16_is_computed_as_torch_does(check):
    with interpreted(HERE):
        CHECKS[check]()


@pytest.mark.parametrize(
    ("name", "check"),
    {
        "_implicit_cvt": "float_argument",
        "binary_op": "add",
        "cast_impl": "integers",
        "create_dot": "dot",
        "cumprod": "cumprod",
        "cumsum": "cumsum",
        "min_max": "argmax",
        "sum": "sum",
        "unary_op": "neg",
    }.items(),
)
def test_each_correction_is_needed(name, check, monkeypatch):
    if triton.__version__ < "3.9" and name in ("unary_op", "min_max", "cumsum", "cumprod"):
        pytest.skip("Triton 3.6 needs it less: it negates by subtraction and widens before it reduces")
    monkeypatch.setattr(support, "CORRECTIONS", [correction for correction in CORRECTIONS if correction.name != name])
    with interpreted(HERE), pytest.raises((AssertionError, InterpreterError)):
        CHECKS[check]()


def test_a_fused_multiplication_of_bfloat16_is_refused():
    x = torch.ones(16, dtype=torch.bfloat16)
    with interpreted(HERE), pytest.raises(InterpreterError, match="cast to float32"):
        _fused[(1,)](x, torch.empty_like(x), 16)


def test_numbers_survive_being_widened_and_narrowed():
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    assert np.array_equal(widen(bits), numbers.float().numpy(), equal_nan=True)
    assert np.array_equal(narrow(widen(bits))[~numbers.isnan().numpy()], bits[~numbers.isnan().numpy()])


def test_a_kernel_calls_another():
    with interpreted(HERE):
        x, _, out = elementwise("twice")
    same(out, 2 * x)


def test_tunekits_kernels_are_interpreted_where_they_stand():
    kernels = [
        (module, name)
        for module in sys.modules.values()
        if module.__name__.startswith("tunekit.kernels.")
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    ]
    with interpreted():
        assert backend.interprets
        assert backend.uses_triton(torch.empty(1))
        assert all(isinstance(vars(module)[name], InterpretedFunction) for module, name in kernels)
    assert not backend.uses_triton(torch.empty(1))


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_as_before_in_the_end(fails):
    with interpreted(HERE):  # imports what it needs
        elementwise("twice")
    before = state()
    with contextlib.suppress(ZeroDivisionError), interpreted(HERE):
        elementwise("twice")
        check_along_rows("sum")
        assert state() != before
        if fails:
            raise ZeroDivisionError
    after = state()
    assert after.keys() == before.keys()
    for owner in before:
        assert after[owner] == before[owner], owner


def test_it_does_not_nest():
    with interpreted(), pytest.raises(RuntimeError, match="already"), interpreted():
        pass


def test_another_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(InterpreterBuilder, "binary_op", lambda self, lhs, rhs: None)
    with pytest.raises(RuntimeError, match=r"InterpreterBuilder.binary_op\(self, lhs, rhs, op\)"), interpreted():
        pass


def test_liger_kernel_is_interpreted_too():
    from liger_kernel.ops import rms_norm

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 96, generator=generator).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(96, generator=generator).to(torch.bfloat16).requires_grad_()
    grad = torch.randn(4, 96, generator=generator).to(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = torch.nn.functional.rms_norm(exact[0], (96,), exact[1], eps=1e-6)
    expected.backward(grad.double())
    with interpreted(rms_norm):
        y = rms_norm.LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "gemma", False)
        y.backward(grad)
    # One rounding of each result: half of 2^-7 of it; the weight's gradient is a sum of four.
    for computed, value in ((y, expected), (x.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        torch.testing.assert_close(computed.double(), value, rtol=2**-8, atol=2e-5)
