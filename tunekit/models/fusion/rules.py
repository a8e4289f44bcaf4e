"""Rules of fusion: how a module computes instead, and the exchange of its forward and back."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from tunekit.models.fusion.proof import BEFORE, FUSED, SETTINGS, Trial


@dataclass(frozen=True)
class Fusion:
    """Replacement of a module's forward.

    Attributes:
        form: What it computes, in words.
        forward: The new forward, whose first parameter is the module. It finds `settings` as `module.fused_as`. It is
            called `forward` too, and is the same function for all modules of a form, so that they share compiled code.
        settings: What the forward has to know; frozen, compared by value.
        trial: Makes a stand-in for the module, and what to call it with, on a device in a type.
        sizes: Whatever else makes a proof another one, such as shapes.
        parts: Submodules by name that the forward needs fused, and how they are.
    """

    form: str
    forward: Callable[..., Any]
    settings: Hashable
    trial: Callable[[torch.Generator, torch.device, torch.dtype], Trial]
    sizes: Hashable = ()
    parts: "tuple[tuple[str, Fusion], ...]" = ()


@dataclass(frozen=True)
class Kept:
    """Reason that a module stays as it is."""

    reason: str


Rule = Callable[[nn.Module], Fusion | Kept | None]
"""Function that returns how to fuse a module, why not to, or None for one that it does not apply to."""


def replace(module: nn.Module, fusion: Fusion) -> None:
    """Give a module another forward; nothing else of it changes."""
    if "forward" in vars(module) and not is_fused(module):
        vars(module)[BEFORE] = module.forward
    vars(module)[SETTINGS] = fusion.settings
    vars(module)["forward"] = MethodType(fusion.forward, module)
    for name, part in fusion.parts:
        replace(module.get_submodule(name), part)


def is_fused(module: nn.Module) -> bool:
    """Return whether a module has one of tunekit's forwards."""
    return SETTINGS in vars(module)


def unfuse(model: nn.Module) -> None:
    """Give all modules of a model their own forwards back."""
    for module in model.modules():
        if is_fused(module):
            before = vars(module).get(BEFORE)
            for name in FUSED:
                vars(module).pop(name, None)
            if before is not None:
                vars(module)["forward"] = before
