"""Forms of norms, gated blocks and decoder layers, and the kernels in their place.

A form is written in `forms.yaml` as a model's author writes it: as the forward of a module, with names of our own. A
module has the form if its forward computes the same (`tunekit.models.fusion.structure`), whatever it calls things. What
computes instead is the `forward` of a form's settings: by that name fused methods are pickled.

Root mean square norms.

Gated feed-forward blocks, `down(activation(gate(x)) * up(x))`, with a kernel for what is between. Projections with
low-rank updates are read, and those of gate and up are added by the kernel; others are called as modules, whatever they
are (`tunekit.models.fusion.lora_layers`).

Layers in which an add to the residual stream is followed by a norm, with both in one call. Every layer adds what its
attention gives to the stream, and most normalise the sum for the feed-forward block. The norm, which is fused already,
takes both and gives the sum back. The add at a layer's end is followed by the next layer's norm, which is another
module's: it stays.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from tunekit.files import read_table
from tunekit.kernels.glu import Activation, glu_lora, glu_packed
from tunekit.kernels.rms_norm import Casting, rms_norm
from tunekit.models.fusion.lora_layers import num_outputs, project, project_parts
from tunekit.models.fusion.proof import Fusion, Kept, MakeTrial, Trial, is_fused, random_rows, stand_in, whole_shape
from tunekit.models.fusion.structure import Structure, parse_structure, structure_of


def _table() -> dict[str, Any]:
    table: dict[str, Any] = read_table(Path(__file__).with_suffix(".yaml"))
    return table


@functools.cache
def _form(source: str) -> Structure:
    return parse_structure(source, {"torch": torch, "functional": functional})


def _bound(structure: Structure | None, sources: Sequence[str]) -> dict[str, str] | None:
    """The module's names of the attributes of the first form that it has; None where it has none of them."""
    bound = (structure.bind(_form(source)) for source in sources) if structure is not None else ()
    return next((names for names in bound if names is not None), None)


CACHES = ("past_key_values", "cache")
"""Names of the cache of keys and values, the second one since transformers 5.24."""


@dataclass(frozen=True)
class Norm:
    """Form of a normalization. `weight` is its attribute's name, None where there is none."""

    weight: str | None
    eps: float
    offset: float
    casting: Casting

    @staticmethod
    def forward(self: Any, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of its input, or of its sum with the residual stream, and that sum."""
        how: Norm = self.fused_as
        weight = None if how.weight is None else getattr(self, how.weight)
        return rms_norm(hidden_states, weight, eps=how.eps, offset=how.offset, casting=how.casting, residual=residual)


def norm_rule(module: nn.Module) -> Fusion | Kept | None:
    """Root mean square norms, of the last dimension."""
    structure = structure_of(module)
    for norm in _table()["norms"]:
        names = _bound(structure, norm["forms"])
        if names is None:
            continue
        weight = names.get("weight")
        eps = vars(module).get(names["eps"])
        if not isinstance(eps, float | int) or (weight is not None and weight not in module._parameters):
            return Kept("its epsilon is not a number, or its weight not a parameter")
        shape = None if weight is None else tuple(whole_shape(module.get_parameter(weight)))
        if shape is not None and len(shape) != 1:
            return Kept("its weight is not a vector")
        width = 128 if shape is None else shape[0]
        settings = Norm(weight, float(eps), norm["offset"], norm["casting"])
        return Fusion(norm["words"], Norm.forward, settings, _norm_trial(module, width), shape)
    return None


def _norm_trial(module: nn.Module, width: int) -> MakeTrial:
    def make(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Trial:
        x = random_rows(width, device=device, dtype=dtype, generator=generator)
        return Trial(stand_in(module, generator=generator).to(device, dtype), (x,), {})

    return make


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}
"""Activations of the kernel, by its names."""

TRIED_COLUMNS = 16
"""Columns of a stand-in's input: what is fused is as wide as the model's."""


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

    @staticmethod
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


def gated_rule(module: nn.Module) -> Fusion | Kept | None:
    """Blocks with a gate, in separate projections or in one."""
    names = _bound(structure_of(module), _table()["gated_blocks"])
    if names is None:
        return None
    act = getattr(module, names["act"]) if "act" in names else functional.silu
    activation = activation_of(act)
    if activation is None:
        return Kept(f"a gated block; no kernel for its activation {type(act).__name__}")
    gate = names.get("gate", names.get("gate_up", ""))
    width = num_outputs(module.get_submodule(gate))
    if width is None:
        return Kept(f"a gated block; {gate} is not a linear layer")
    settings = Gated(gate, names.get("up"), names["down"], names.get("dropout"), activation)
    words = f"gated MLP ({activation.replace('_', ' ')}{'' if settings.up else ', one projection'})"
    return Fusion(words, Gated.forward, settings, _gated_trial(module, settings, width), width)


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


def _gated_trial(module: nn.Module, how: Gated, width: int) -> MakeTrial:
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


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Form of a layer: names of its submodules, and its call.

    Attributes:
        norm: What its attention reads through.
        attention: Its attention.
        middle_norm: The norm that follows the first add.
        block: What comes behind it.
        behind_attention: What the attention's result goes through; None for nothing.
        behind_block: What the block's result goes through.
        scale: Name of the number that both results are multiplied with; None for none.
        parameters: Names of the forward's parameters behind the first, as positions give them.
        defaults: Those that have a default, with it.
        dropped: Those that the attention is not given.
        checkpoints: Whether its class's forward is what is checkpointed, so that this one has to see to it.
    """

    norm: str
    attention: str
    middle_norm: str
    block: str
    behind_attention: str | None = None
    behind_block: str | None = None
    scale: str | None = None
    parameters: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    dropped: tuple[str, ...]
    checkpoints: bool

    @staticmethod
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer, with its first add done by the norm that follows it."""
        how: Layer = self.fused_as
        arguments = {**dict(how.defaults), **dict(zip(how.parameters, args, strict=False)), **kwargs}
        for name in how.dropped:
            arguments.pop(name, None)
        if how.checkpoints and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # As transformers does: the pass that computes it again must not write to a cache.
            arguments["use_cache"] = False
            if not self._can_checkpoint_with_cache:
                arguments |= dict.fromkeys(arguments.keys() & {*CACHES}, None)
            return cast(
                Tensor, self._gradient_checkpointing_func(functools.partial(_compute, self, **arguments), hidden_states)
            )
        return _compute(self, hidden_states, **arguments)


def layer_rule(module: nn.Module) -> Fusion | Kept | None:
    """Layers in which a norm follows an add."""
    structure = structure_of(module)
    if structure is None:
        return None
    if _bound(structure, _table()["layers_without"]) is not None:
        return Kept("no norm follows an add within this layer")
    names = _bound(structure, _table()["layers"])
    if names is None:
        return None
    if "**" not in structure.passes[0]:
        return Kept("the layer does not pass all its arguments to its attention")
    settings = _settings(type(module), structure, names)
    middle = module.get_submodule(settings.middle_norm)
    part = norm_rule(middle)
    if not isinstance(part, Fusion) or not is_fused(middle):
        return Kept(f"the norm after its add, {settings.middle_norm}, is not fused")
    outer = [name for name in (settings.norm, settings.behind_attention, settings.behind_block) if name]
    sizes = (part.settings, part.sizes, tuple(type(module.get_submodule(name)) for name in outer))
    parts = ((settings.middle_norm, part),)
    return Fusion("residual add + RMSNorm", Layer.forward, settings, _layer_trial(module, settings), sizes, parts)


def _settings(owner: type[nn.Module], structure: Structure, names: dict[str, str]) -> Layer:
    """Return the form of a layer whose attributes have these names."""
    extra = list(inspect.signature(inspect.unwrap(owner.forward)).parameters.values())[2:]
    named = [parameter for parameter in extra if parameter.kind is not parameter.VAR_KEYWORD]
    return Layer(
        **names,
        parameters=tuple(parameter.name for parameter in named if parameter.kind is parameter.POSITIONAL_OR_KEYWORD),
        defaults=tuple(
            (parameter.name, parameter.default) for parameter in named if parameter.default is not parameter.empty
        ),
        dropped=tuple(parameter.name for parameter in named if parameter.name not in structure.passes[0]),
        # Earlier versions of transformers checkpoint the call of a layer, which stays as it is.
        checkpoints=issubclass(owner, GradientCheckpointingLayer)
        and "__init_subclass__" in vars(GradientCheckpointingLayer),
    )


def _compute(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    how: Layer = self.fused_as
    residual = hidden_states
    hidden_states = getattr(self, how.norm)(hidden_states)
    hidden_states, _ = getattr(self, how.attention)(hidden_states=hidden_states, **given)
    if how.behind_attention is not None:
        hidden_states = getattr(self, how.behind_attention)(hidden_states)
    if how.scale is not None:
        hidden_states = hidden_states * getattr(self, how.scale)
    hidden_states, residual = getattr(self, how.middle_norm)(hidden_states, residual=residual)
    hidden_states = getattr(self, how.block)(hidden_states)
    if how.behind_block is not None:
        hidden_states = getattr(self, how.behind_block)(hidden_states)
    if how.scale is not None:
        hidden_states = hidden_states * getattr(self, how.scale)
    return cast(Tensor, residual + hidden_states)


class _Attention(nn.Module):
    """In the place of an attention: what it gives depends on all that it is given, and by which names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.shares = {name: 1 / (2 + place) for place, name in enumerate(names)}

    def forward(self, hidden_states: Tensor, **given: float | None) -> tuple[Tensor, None]:
        return torch.tanh(hidden_states) * sum(
            self.shares.get(name, 9.0) * (value or 0.0) for name, value in given.items()
        ), None


def _layer_trial(module: nn.Module, how: Layer) -> MakeTrial:
    def make(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Trial:
        parts: dict[str, nn.Module] = {how.attention: _Attention(how.parameters), how.block: nn.Tanh()}
        for name in (how.norm, how.middle_norm, how.behind_attention, how.behind_block):
            if name is not None:
                part = module.get_submodule(name)
                plain = isinstance(part, nn.Dropout)
                parts[name] = nn.Identity() if plain else stand_in(part, generator=generator)
        copy = stand_in(module, generator=generator, **parts).to(device, dtype)
        width = _width(copy.get_submodule(how.middle_norm))
        x = random_rows(width, device=device, dtype=dtype, generator=generator)
        vars(copy)["gradient_checkpointing"] = False
        return Trial(copy, (x, *(0.25 + place / 8 for place in range(len(how.parameters)))), {"others": 0.5})

    return make


def _width(norm: nn.Module) -> int:
    weights = [parameter.shape[0] for parameter in norm.parameters()]
    return weights[0] if weights else 128
