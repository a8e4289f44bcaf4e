"""Triton's interpreter for tests of kernels on a CPU: no TRITON_INTERPRET variable, and its faults corrected.

The interpreter computes with numpy, and numpy has no bfloat16: Triton 3.6 to 3.9 keep such numbers as uint16. They are
loaded, stored and widened as they should be, but

- arithmetic, comparisons, `tl.dot`, reductions and scans work on the bits as if these were integers,
- what is narrowed from float32 is truncated, where the devices round to the nearest, ties to even, and
- integers and comparisons are turned into bits, not into numbers.

Besides, a float that a launcher passes has no `.to()`, and libdevice's functions do not exist. All of it is corrected
here while the context lasts: bfloat16 is computed in float32 and rounded once. For one operation that is exactly what
the devices do, since float32 has more than twice the bits and two; a sum over an axis rounds in another order there.
Only `tl.fma` would round twice, so it is refused.

What the interpreter cannot show: races, missing barriers, misaligned or scalar loads, too much shared memory, spills.
The compile gate shows the last three.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, ReduceOps, ScanOps, TensorHandle
from triton.runtime.jit import JITFunction, mangle_type

from tests.kernels import kernel_modules
from tunekit.kernels import backend

__all__ = ["CORRECTIONS", "interpreted", "narrow", "widen"]

COMPARISONS = frozenset([np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal])


@contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """A context in which kernels run in Triton's interpreter, on tensors of the CPU.

    Those are the kernels, and the functions that they call, that are globals of a module of `tunekit.kernels` or of one
    of `modules`: a test's own, or liger-kernel's. Nothing can be compiled meanwhile, as `triton.language` itself is
    made to interpret. In the end everything is as it was.

    Raises:
        RuntimeError: Triton is of a version whose interpreter is built in another way than what is corrected here.
    """
    if backend.interprets:
        raise RuntimeError("kernels are interpreted already")
    _check_anchors()
    mangle_type(0)  # imports what would take copies of the functions that are replaced below
    language = [module for name, module in sys.modules.items() if f"{name}.".startswith("triton.language.")]
    with ExitStack() as undo:
        patch = undo.enter_context(pytest.MonkeyPatch.context())
        # As on a device, a division by zero and an overflow are no cause for a warning.
        undo.enter_context(np.errstate(all="ignore"))
        replacements = {id(old): new for old, new in _libdevice(language)}
        for module in [*language, *kernel_modules(), *modules]:
            # What is interpreted gets the names of the interpreter's module beside its own.
            undo.callback(_drop_names, module, set(vars(module)))
            _replace(module, replacements, patch)
        _replace(tl.tensor, replacements, patch)
        patch.setattr(InterpretedFunction, "rewritten_fn", {})
        for correction in CORRECTIONS:
            old = vars(correction.owner).get(correction.name)
            patch.setattr(correction.owner, correction.name, correction.corrected(old), raising=False)
        # Once for all: done at each call of a function, and never undone there, it takes more time than the rest.
        scope = interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
        undo.callback(scope.restore)
        # Triton 3.6 gives numpy one element in a dimension to make an integer of, which numpy 2.4 refuses.
        scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
        patch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
        patch.setattr(backend, "interprets", True)
        yield


def widen(bits: NDArray[Any]) -> NDArray[np.float32]:
    """The float32 numbers that bfloat16's bits stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(numbers: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 numbers, ties to even; every NaN is the quiet one."""
    numbers = np.ascontiguousarray(numbers, dtype=np.float32).reshape(np.shape(numbers))
    bits = numbers.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), nearest).astype(np.uint16)


def _check_anchors() -> None:
    for owner, name, parameters, _ in CORRECTIONS:
        if parameters is None:
            continue
        if name not in vars(owner) or ", ".join(inspect.signature(vars(owner)[name]).parameters) != parameters:
            raise RuntimeError(
                f"Triton {triton.__version__} has no {owner.__name__}.{name}({parameters}), which is corrected by "
                "tests/kernels/interpreter.py: that was written for Triton 3.6 and 3.9"
            )


def _drop_names(module: ModuleType, kept: set[str]) -> None:
    for name in vars(module).keys() - kept:
        delattr(module, name)


def _replace(owner: ModuleType | type, replacements: dict[int, Any], patch: pytest.MonkeyPatch) -> None:
    """Put interpreted functions in the place of an owner's kernels; the same one wherever the same kernel stands."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, JITFunction):
            replacements.setdefault(id(value), InterpretedFunction(value.fn))
        if id(value) in replacements:
            new = replacements[id(value)]
            # As a member of `tl.tensor`, it is called with the tensor first.
            patch.setattr(owner, name, _method(new) if isinstance(owner, type) else new)


def _method(function: InterpretedFunction[Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _libdevice(language: list[ModuleType]) -> Iterator[tuple[Any, Any]]:
    """Pairs of libdevice's functions and those that compute the same with numpy."""

    def by(function: Callable[..., Any]) -> Callable[..., Any]:
        builder = interpreter.interpreter_builder
        return lambda x: tl.tensor(builder.unary_op(x.handle, lambda data: function(data).astype(data.dtype)), x.type)

    replacements = {
        "rsqrt": by(lambda x: 1 / np.sqrt(x)),
        "tanh": by(np.tanh),
        "exp": by(np.exp),
        "erf": by(interpreter.np_erf_fp64),
    }
    for module in language:
        if module.__name__.endswith("libdevice"):
            yield from ((vars(module)[name], new) for name, new in replacements.items() if name in vars(module))


def _is_bfloat16(handle: TensorHandle) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _wide(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(widen(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _narrowed(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(narrow(handle.data), tl.bfloat16)


def _float_arguments(convert: Callable[..., Any]) -> Callable[..., Any]:
    def corrected(arg: Any) -> Any:
        if isinstance(arg, float):
            return tl.tensor(TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
        return convert(arg)

    return corrected


def _nearest(convert: Callable[..., Any]) -> Callable[..., Any]:
    def corrected(data: NDArray[Any], old: tl.dtype, new: tl.dtype, rounding: Any) -> NDArray[Any]:
        # No rounding named means the nearest. What is asked to be truncated is truncated rightly.
        if old == tl.float32 and new == tl.bfloat16 and rounding != ir.ROUNDING_MODE.RTZ:
            return narrow(data)
        return convert(data, old, new, rounding)  # type: ignore[no-any-return]

    return corrected


def _cast(cast: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def corrected(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        if dst_type.scalar == tl.bfloat16:
            return _narrowed(cast(self, _wide(src), tl.float32) if src.dtype.scalar != tl.float32 else src)
        return cast(self, _wide(src), dst_type)

    return corrected


def _binary(compute: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def corrected(self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        both = _is_bfloat16(lhs) and _is_bfloat16(rhs)
        result = compute(self, _wide(lhs), _wide(rhs), op) if both else compute(self, lhs, rhs, op)
        if op in COMPARISONS:
            # Named after the operands otherwise, and then cast as if its booleans were such numbers.
            return TensorHandle(result.data, tl.int1)
        return _narrowed(result) if both else result

    return corrected


def _unary(compute: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def corrected(self: InterpreterBuilder, arg: TensorHandle, op: Any) -> TensorHandle:
        result = compute(self, _wide(arg), op)
        return _narrowed(result) if _is_bfloat16(arg) else result

    return corrected


def _dot(compute: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def corrected(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return compute(self, _wide(a), _wide(b), *rest)

    return corrected


def _fma(compute: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def corrected(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if _is_bfloat16(z):
            raise NotImplementedError("tl.fma of bfloat16 is not interpreted as devices compute it: cast to float32")
        return compute(self, x, y, z)

    return corrected


def _clip(compute: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def corrected(
        self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Any
    ) -> TensorHandle:
        if op is np.clip and _is_bfloat16(lhs):
            return _narrowed(compute(self, _wide(lhs), _wide(rhs), _wide(other), op))
        return compute(self, lhs, rhs, other, op)

    return corrected


def _reduced(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction or a scan along an axis, in float32 where it is of bfloat16."""

    def narrowed(result: tl.tensor) -> tl.tensor:
        if result.dtype != tl.float32:  # the positions of maxima
            return result
        return tl.tensor(_narrowed(result.handle), result.type.with_element_ty(tl.bfloat16))

    def corrected(self: ReduceOps | ScanOps, input: tl.tensor, **kwargs: Any) -> Any:
        if not _is_bfloat16(input.handle):
            return reduce(self, input, **kwargs)
        result = reduce(self, tl.tensor(_wide(input.handle), input.type.with_element_ty(tl.float32)), **kwargs)
        return narrowed(result) if isinstance(result, tl.tensor) else [narrowed(each) for each in result]

    return corrected


def _maximum(_: object) -> Callable[..., TensorHandle]:
    # Triton 3.6 lets NaN win, which on devices only `propagate_nan` does.
    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)


def _minimum(_: object) -> Callable[..., TensorHandle]:
    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)


def _constant(_: object) -> Callable[..., TensorHandle]:
    # Triton 3.6 has none, which a constant beside a bfloat16 tensor asks for.
    return lambda self, value: _narrowed(self.get_fp32(value))


class Correction(NamedTuple):
    """A function or method of the interpreter that is replaced."""

    owner: ModuleType | type
    name: str
    parameters: str | None
    """Those that it has in Triton 3.6 and 3.9; none where one of these lacks it."""
    corrected: Callable[[Any], Callable[..., Any]]
    """What makes the corrected form from the interpreter's."""


CORRECTIONS = [
    Correction(interpreter, "_implicit_cvt", "arg", _float_arguments),
    Correction(interpreter, "_convert_float", "input, input_dtype, output_dtype, rounding_mode", _nearest),
    Correction(InterpreterBuilder, "cast_impl", "self, src, dst_type", _cast),
    Correction(InterpreterBuilder, "binary_op", "self, lhs, rhs, op", _binary),
    Correction(InterpreterBuilder, "unary_op", "self, arg, op", _unary),
    Correction(InterpreterBuilder, "ternary_op", "self, lhs, rhs, other, op", _clip),
    Correction(InterpreterBuilder, "create_dot", "self, a, b, d, input_precision, max_num_imprecise_acc", _dot),
    Correction(InterpreterBuilder, "create_fma", "self, x, y, z", _fma),
    Correction(InterpreterBuilder, "create_maxnumf", "self, lhs, rhs", _maximum),
    Correction(InterpreterBuilder, "create_minnumf", "self, lhs, rhs", _minimum),
    Correction(InterpreterBuilder, "get_bf16", None, _constant),
    Correction(ReduceOps, "min_max", "self, input, val_reduce_op, idx_reduce_op", _reduced),
    Correction(ReduceOps, "sum", "self, input", _reduced),
    Correction(ScanOps, "cumsum", "self, input", _reduced),
    Correction(ScanOps, "cumprod", "self, input", _reduced),
]
