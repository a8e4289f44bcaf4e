"""Changes of NeMo Automodel 0.7.0 in a worker process, without which it neither imports nor runs on a CPU.

Triton since 3.8 refuses a kernel whose autotuning key names an argument that it lacks, as one of Automodel's LoRA
kernels does. And Automodel asks CUDA for its device wherever a model is built. Each change raises where its anchor is
missing.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

CPU = torch.device("cpu")

DEVICE_TAKERS = ("instantiate_infrastructure", "apply_model_infrastructure")
"""Functions of `nemo_automodel._transformers.auto_model` that take the device to build a model on."""

ROTARY = ("nemo_automodel.components.models.gpt_oss.rope_utils", "RotaryEmbedding")
"""Rotary embedding that Automodel's own model classes share, by module and name."""


@contextmanager
def importable() -> Iterator[None]:
    """Let Automodel be imported beside any Triton: keys of autotuning that are no arguments are left out."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    import triton

    autotune = triton.autotune

    def without_other_names(configs: Any, key: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        def decorate(kernel: Any) -> Any:
            return autotune(configs, [name for name in key if name in kernel.arg_names], *args, **kwargs)(kernel)

        return decorate

    triton.autotune = without_other_names
    try:
        yield
    finally:
        triton.autotune = autotune


def run_on_cpu(architectures: Sequence[str]) -> None:
    """Have Automodel build models on the CPU of a machine without CUDA.

    Args:
        architectures: Class names of the model by its configuration, such as `Qwen3MoeForCausalLM`.

    Raises:
        AttributeError: This Automodel lacks a name that is replaced.
    """
    # Their results are replaced below, or are not used.
    vars(torch.cuda)["reset_peak_memory_stats"] = lambda *_, **__: None
    vars(torch.cuda)["current_device"] = lambda: 0
    auto_model: Any = importlib.import_module("nemo_automodel._transformers.auto_model")
    for name in DEVICE_TAKERS:
        setattr(auto_model, name, on_the_cpu(getattr(auto_model, name), "device"))
    module, name = ROTARY
    rotary: Any = getattr(importlib.import_module(module), name)
    rotary.__init__ = on_the_cpu(rotary.__init__, "device")
    registry: Any = importlib.import_module("nemo_automodel._transformers.registry")
    classes = registry.ModelRegistry.model_arch_name_to_cls
    for own in [classes[name] for name in architectures if name in classes]:
        if "initialize_weights" in vars(own):
            own.initialize_weights = on_the_cpu(own.initialize_weights, "buffer_device")


def on_the_cpu(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that is always called with the CPU as the argument of this name.

    Raises:
        AttributeError: It takes no such argument.
    """
    signature = inspect.signature(function)
    if name not in signature.parameters:
        raise AttributeError(f"{function.__qualname__} takes no argument {name!r}")

    @wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        bound.arguments[name] = CPU
        return function(*bound.args, **bound.kwargs)

    return on_cpu
