"""Tests of the kernels: in Triton's interpreter, and by what compilers make of them. Neither needs an accelerator."""

import importlib
import pkgutil
from types import ModuleType

import tunekit.kernels


def kernel_modules() -> list[ModuleType]:
    """The modules of `tunekit.kernels`."""
    names = [module.name for module in pkgutil.iter_modules(tunekit.kernels.__path__, "tunekit.kernels.")]
    return [importlib.import_module(name) for name in names]
