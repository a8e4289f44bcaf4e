"""Dispatch of kernels: Triton on an accelerator, plain torch elsewhere.

Triton comes with torch's builds for accelerators. Where it is missing, the kernels can be imported nevertheless: their
operations are computed by torch, on every device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheels of it on macOS and Windows, and none needed on a CPU
    triton = tl = None

__all__ = ["dense_rows", "jit", "num_multiprocessors", "tl", "triton", "uses_triton", "without_autocast"]

interprets = False
"""True if tensors on a CPU go through the kernels too. Set by tests, which run them in Triton's interpreter."""


def jit(function: Callable[..., Any]) -> Any:
    """A Triton kernel, or what is left of it without Triton: a function that is never called."""
    return function if triton is None else triton.jit(function)


def uses_triton(tensor: torch.Tensor) -> bool:
    """Return whether the operations on a tensor run in Triton. On `meta` they do, to be compiled without an
    accelerator.
    """
    return triton is not None and (tensor.is_cuda or tensor.is_meta or interprets)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """As (rows, columns) with neighbouring columns side by side; a copy only where there is no such view."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def num_multiprocessors(x: torch.Tensor) -> int:
    """Of the device that a tensor is on; as many as an H100 has where there is none, but only shapes."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Products in the types that are given, also in a backward pass that is called under autocast."""
    # torch.amp.is_autocast_available cannot be compiled before torch 2.12.
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
