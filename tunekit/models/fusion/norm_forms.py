"""Root mean square norms: the forms in which models write them, and the kernel in their place.

A form is written as a model's author writes it: as the forward of a module, with names of our own. A module has the
form if its forward computes the same (`tunekit.models.fusion.structure`), whatever it calls things.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tunekit.kernels.rms_norm import Casting, rms_norm
from tunekit.models.fusion.proof import Fusion, Kept, Trial, random_rows, stand_in, whole_shape
from tunekit.models.fusion.structure import read_structure, structure_of


def _llama_norm(self: Any, x: Tensor) -> Tensor:
    x_type = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return cast(Tensor, self.weight * x.to(x_type))


def _llama4_norm(self: Any, x: Tensor) -> Tensor:
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + self.eps)
    return cast(Tensor, n.type_as(x) * self.weight)


def _olmo_norm(self: Any, x: Tensor) -> Tensor:
    x_type = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return cast(Tensor, (self.weight * x).to(x_type))


def _nemotron_norm(self: Any, x: Tensor) -> Tensor:
    x_type = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return cast(Tensor, (self.weight.to(torch.float32) * x).to(x_type))


def _moshi_norm(self: Any, x: Tensor) -> Tensor:
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + self.eps)
    return cast(Tensor, (n * self.weight.float()).type_as(x))


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + self.eps)
    return cast(Tensor, (n * (1.0 + self.weight.float())).type_as(x))


def _gemma4_norm(self: Any, x: Tensor) -> Tensor:
    n = x.float()
    n = n * torch.pow(n.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
    return cast(Tensor, (n * self.weight.float()).type_as(x))


def _gemma4_norm_without_scale(self: Any, x: Tensor) -> Tensor:
    n = x.float()
    n = n * torch.pow(n.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
    return n.type_as(x)


def _bare_norm(self: Any, x: Tensor) -> Tensor:
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + self.eps)
    return n.type_as(x)


@dataclass(frozen=True)
class Norm:
    """Form of a normalization. `weight` is its attribute's name, None where there is none."""

    weight: str | None
    eps: float
    offset: float
    casting: Casting


FORMS: tuple[tuple[Callable[[Any, Tensor], Tensor], str, float, Casting], ...] = (
    (_llama_norm, "RMSNorm", 0.0, "llama"),
    (_llama4_norm, "RMSNorm", 0.0, "llama"),
    (_olmo_norm, "RMSNorm (rounded once)", 0.0, "float32"),
    (_nemotron_norm, "RMSNorm (rounded once)", 0.0, "float32"),
    (_moshi_norm, "RMSNorm (rounded once)", 0.0, "float32"),
    (_gemma4_norm, "RMSNorm (rounded once)", 0.0, "float32"),
    (_gemma_norm, "RMSNorm (1 + weight)", 1.0, "gemma"),
    (_bare_norm, "RMSNorm (no weight)", 0.0, "float32"),
    (_gemma4_norm_without_scale, "RMSNorm (no weight)", 0.0, "float32"),
)
"""Forms, what they are called, what is added to the weight, and where they round."""

STRUCTURES = tuple(read_structure(form) for form, *_ in FORMS)


def norm_rule(module: nn.Module) -> Fusion | Kept | None:
    """Root mean square norms, of the last dimension."""
    structure = structure_of(module)
    for form, (_, words, offset, casting) in zip(STRUCTURES, FORMS, strict=True):
        names = structure.bind(form) if structure is not None else None
        if names is None:
            continue
        weight = names.get("weight")
        eps = vars(module).get(names["eps"])
        if not isinstance(eps, float | int) or (weight is not None and weight not in module._parameters):
            return Kept("its epsilon is no number, or its weight no parameter")
        shape = None if weight is None else tuple(whole_shape(module.get_parameter(weight)))
        if shape is not None and len(shape) != 1:
            return Kept("its weight is no vector")
        width = 128 if shape is None else shape[0]
        return Fusion(words, forward, Norm(weight, float(eps), offset, casting), _norm_trial(module, width), shape)
    return None


def _norm_trial(module: nn.Module, width: int) -> Callable[[torch.Generator, torch.device, torch.dtype], Trial]:
    def make(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Trial:
        x = random_rows(width, device=device, dtype=dtype, generator=generator)
        return Trial(stand_in(module, generator=generator).to(device, dtype), (x,), {})

    return make


def forward(self: Any, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """The norm of its input, or of its sum with the residual stream, and that sum."""
    how: Norm = self.fused_as
    weight = None if how.weight is None else getattr(self, how.weight)
    return rms_norm(hidden_states, weight, eps=how.eps, offset=how.offset, casting=how.casting, residual=residual)
