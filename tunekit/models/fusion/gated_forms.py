"""Gated feed-forward blocks, `down(activation(gate(x)) * up(x))`: their forms, and the kernel for what is between.

Projections with low-rank updates are read, and those of gate and up are added by the kernel; others are called as
modules, whatever they are (`tunekit.models.fusion.lora_layers`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tunekit.kernels.glu import Activation, glu_lora, glu_packed
from tunekit.models.fusion.lora_layers import num_outputs, project, project_parts
from tunekit.models.fusion.proof import Fusion, Kept, Trial, random_rows, stand_in
from tunekit.models.fusion.structure import Structure, read_structure, structure_of

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}
"""Activations of the kernel, by its names."""

TRIED_COLUMNS = 16
"""Columns of a stand-in's input: what is fused is as wide as the model's."""


def _separate(self: Any, x: Tensor) -> Tensor:
    return cast(Tensor, self.down(self.act(self.gate(x)) * self.up(x)))


def _separate_by_silu(self: Any, x: Tensor) -> Tensor:
    return cast(Tensor, self.down(functional.silu(self.gate(x)) * self.up(x)))


def _separate_dropped(self: Any, x: Tensor) -> Tensor:
    return cast(Tensor, self.down(self.dropout(self.act(self.gate(x)) * self.up(x))))


def _together(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_up(x).chunk(2, dim=-1)
    return cast(Tensor, self.down(up * self.act(gate)))


def _together_by_index(self: Any, x: Tensor) -> Tensor:
    both = self.gate_up(x).chunk(2, dim=-1)
    return cast(Tensor, self.down(self.act(both[0]) * both[1]))


FORMS: tuple[Structure, ...] = tuple(
    map(read_structure, (_separate, _separate_by_silu, _separate_dropped, _together, _together_by_index))
)


@dataclass(frozen=True)
class Gated:
    """Form of a gated block: names of its submodules, and the operations between them.

    Attributes:
        gate: The gate's projection; both, where `up` is None.
        up: The other projection.
        down: The last one.
        dropout: What drops some of its input; None where nothing does.
        activation: What the gate goes through.
    """

    gate: str
    up: str | None
    down: str
    dropout: str | None
    activation: Activation


def gated_rule(module: nn.Module) -> Fusion | Kept | None:
    """Blocks with a gate, in separate projections or in one."""
    structure = structure_of(module)
    bound = (structure.bind(form) for form in FORMS) if structure is not None else ()
    names = next((binding for binding in bound if binding is not None), None)
    if names is None:
        return None
    act = getattr(module, names["act"]) if "act" in names else functional.silu
    activation = activation_of(act)
    if activation is None:
        return Kept(f"a gated block; no kernel for its activation {type(act).__name__}")
    gate = names.get("gate", names.get("gate_up", ""))
    width = num_outputs(module.get_submodule(gate))
    if width is None:
        return Kept(f"a gated block; {gate} is no linear layer")
    settings = Gated(gate, names.get("up"), names["down"], names.get("dropout"), activation)
    words = f"gated MLP ({activation.replace('_', ' ')}{'' if settings.up else ', one projection'})"
    return Fusion(words, forward, settings, _trial(module, settings, width), width)


def activation_of(act: Callable[[Tensor], Tensor]) -> Activation | None:
    """Return which of the kernel's activations a module or a function computes; None for none of them."""
    if isinstance(act, nn.Module) and next(act.parameters(), None) is not None:
        return None
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    with torch.no_grad():
        output = act(x)
        close = [
            name for name, reference in ACTIVATIONS.items() if torch.allclose(output, reference(x), rtol=0, atol=1e-6)
        ]
    return close[0] if close else None


def _trial(module: nn.Module, how: Gated, width: int) -> Callable[[torch.Generator, torch.device, torch.dtype], Trial]:
    def make(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Trial:
        def linear(num_in: int, num_out: int) -> nn.Linear:
            layer = nn.Linear(num_in, num_out, bias=False)
            layer.weight = nn.Parameter(torch.randn(num_out, num_in, generator=generator) / num_in**0.5)
            return layer

        projections = {how.gate: linear(TRIED_COLUMNS, width)}
        if how.up is not None:
            projections[how.up] = linear(TRIED_COLUMNS, width)
        projections[how.down] = linear(width if how.up is not None else width // 2, TRIED_COLUMNS)
        children = {name: part for name, part in module.named_children() if name not in projections}
        if how.dropout is not None:
            children[how.dropout] = nn.Identity()
        copy = stand_in(module, generator=generator, **projections, **children).to(device, dtype)
        return Trial(copy, (random_rows(TRIED_COLUMNS, device=device, dtype=dtype, generator=generator),), {})

    return make


def forward(self: Any, x: Tensor) -> Tensor:
    """The block, with the activation, the product and low-rank updates in one."""
    how: Gated = self.fused_as
    if how.up is None:
        (both,) = project(x, [self.get_submodule(how.gate)])
        product = glu_packed(both, activation=how.activation)
    else:
        both_parts = project_parts(x, [self.get_submodule(how.gate), self.get_submodule(how.up)])
        (gate, gate_low), (up, up_low) = both_parts
        product = glu_lora(gate, up, gate_low, up_low, activation=how.activation)
    if how.dropout is not None:
        product = getattr(self, how.dropout)(product)
    (output,) = project(product, [self.get_submodule(how.down)])
    return output
