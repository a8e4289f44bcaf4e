"""Dispatch of kernels: Triton on an accelerator, plain torch elsewhere.

Triton comes with torch's builds for accelerators. Where it is missing, the kernels can be imported nevertheless: their
operations are computed by torch, on every device.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheels of it on macOS and Windows, and none needed on a CPU
    triton = tl = None

__all__ = ["jit", "tl", "triton", "uses_triton"]

interprets = False
"""True if tensors on a CPU go through the kernels too. Set by tests, which run them in Triton's interpreter."""


def jit(function: Callable[..., Any]) -> Any:
    """A Triton kernel, or what is left of it without Triton: a function that is never called."""
    return function if triton is None else triton.jit(function)


def uses_triton(tensor: "torch.Tensor") -> bool:
    """Return whether the operations on a tensor run in Triton. On `meta` they do, to be compiled without an
    accelerator.
    """
    return triton is not None and (tensor.is_cuda or tensor.is_meta or interprets)
