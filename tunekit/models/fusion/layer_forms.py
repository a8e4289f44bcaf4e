"""Layers in which an add to the residual stream is followed by a norm: their forms, and both in one call.

Every layer adds what its attention gives to the stream, and most normalise the sum for the feed-forward block. The
norm, which is fused already, takes both and gives the sum back. The add at a layer's end is followed by the next
layer's norm, which is another module's: it stays.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tunekit.models.fusion.attention import CACHES
from tunekit.models.fusion.norm_forms import norm_rule
from tunekit.models.fusion.proof import Fusion, Kept, Trial, is_fused, random_rows, stand_in
from tunekit.models.fusion.structure import Structure, read_structure, structure_of


def _plain(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    residual = hidden_states
    hidden_states = self.norm(hidden_states)
    hidden_states, _ = self.attention(hidden_states=hidden_states, **given)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.block(self.middle_norm(hidden_states))
    return residual + hidden_states


def _scaled(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    residual = hidden_states
    hidden_states = self.norm(hidden_states)
    hidden_states, _ = self.attention(hidden_states=hidden_states, **given)
    hidden_states = residual + hidden_states * self.scale
    residual = hidden_states
    hidden_states = self.block(self.middle_norm(hidden_states))
    return cast(Tensor, residual + hidden_states * self.scale)


def _with_both_ends(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    residual = hidden_states
    hidden_states = self.norm(hidden_states)
    hidden_states, _ = self.attention(hidden_states=hidden_states, **given)
    hidden_states = residual + self.behind_attention(hidden_states)
    residual = hidden_states
    hidden_states = self.block(self.middle_norm(hidden_states))
    return cast(Tensor, residual + self.behind_block(hidden_states))


def _normed_behind(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    residual = hidden_states
    hidden_states, _ = self.attention(hidden_states=hidden_states, **given)
    hidden_states = residual + self.norm(hidden_states)
    residual = hidden_states
    return cast(Tensor, residual + self.last_norm(self.block(hidden_states)))


FORMS: tuple[Structure, ...] = tuple(map(read_structure, (_plain, _scaled, _with_both_ends)))
"""Layers with an add that a norm follows; at both ends may be norms (Gemma 2 and 3) or dropout (Phi 3)."""

WITHOUT = read_structure(_normed_behind)
"""Layers whose norms come before their adds (OLMo 2 and 3)."""


@dataclass(frozen=True)
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
    behind_attention: str | None
    behind_block: str | None
    scale: str | None
    parameters: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    dropped: tuple[str, ...]
    checkpoints: bool


def layer_rule(module: nn.Module) -> Fusion | Kept | None:
    """Layers in which a norm follows an add."""
    structure = structure_of(module)
    if structure is None:
        return None
    if structure.operations == WITHOUT.operations:
        return Kept("a layer whose norms come before its adds: no add is followed by a norm within it")
    names = next((bound for form in FORMS if (bound := structure.bind(form)) is not None), None)
    if names is None:
        return None
    if "**" not in structure.passes[0]:
        return Kept("a layer that does not hand all on to its attention")
    settings = _settings(type(module), structure, names)
    middle = module.get_submodule(settings.middle_norm)
    part = norm_rule(middle)
    if not isinstance(part, Fusion) or not is_fused(middle):
        return Kept(f"the norm behind its add, {settings.middle_norm}, is not fused")
    outer = [name for name in (settings.norm, settings.behind_attention, settings.behind_block) if name]
    sizes = (part.settings, part.sizes, tuple(type(module.get_submodule(name)) for name in outer))
    parts = ((settings.middle_norm, part),)
    return Fusion("residual add + RMSNorm", forward, settings, _trial(module, settings), sizes, parts)


def _settings(owner: type[nn.Module], structure: Structure, names: dict[str, str]) -> Layer:
    """Return the form of a layer whose attributes have these names."""
    extra = list(inspect.signature(inspect.unwrap(owner.forward)).parameters.values())[2:]
    named = [parameter for parameter in extra if parameter.kind is not parameter.VAR_KEYWORD]
    return Layer(
        norm=names["norm"],
        attention=names["attention"],
        middle_norm=names["middle_norm"],
        block=names["block"],
        behind_attention=names.get("behind_attention"),
        behind_block=names.get("behind_block"),
        scale=names.get("scale"),
        parameters=tuple(parameter.name for parameter in named if parameter.kind is parameter.POSITIONAL_OR_KEYWORD),
        defaults=tuple(
            (parameter.name, parameter.default) for parameter in named if parameter.default is not parameter.empty
        ),
        dropped=tuple(parameter.name for parameter in named if parameter.name not in structure.passes[0]),
        # Earlier versions of transformers checkpoint the call of a layer, which stays as it is.
        checkpoints=issubclass(owner, GradientCheckpointingLayer)
        and "__init_subclass__" in vars(GradientCheckpointingLayer),
    )


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


def _trial(module: nn.Module, how: Layer) -> Callable[[torch.Generator, torch.device, torch.dtype], Trial]:
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
