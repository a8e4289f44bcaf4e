"""Compilation of functions that libraries decorate with `torch.compile` while they are imported.

PEFT imports bitsandbytes (0.50) wherever that is installed, and bitsandbytes compiles functions of 8-bit optimizers and
4-bit weights: torch's compiler is imported for them, which takes half a second on a CPU, in runs that use neither.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch


@contextmanager
def compiled_later() -> Iterator[None]:
    """Let functions that are given to `torch.compile` within be compiled by it when they are first called."""
    usual = torch.compile

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compile_later, **options)
        return usual(model, **options) if isinstance(model, torch.nn.Module) else _deferred(usual, model, options)

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = usual


def _deferred(usual: Callable[..., Any], function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    compiled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(usual(function, **options))
        return compiled[0](*args, **kwargs)

    return call
