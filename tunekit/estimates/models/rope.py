"""Rotary embeddings of a model as its config.json has them, and as `model.rope_scaling` changes them.

Rotary embeddings turn pairs of a query's and a key's features by angles that grow with the position. Scaling slows the
turning, so that more positions lie within the angles that the model was trained on. The planner counts positions by
these functions, and a model is loaded with the same ones, so that the two cannot differ.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, NamedTuple

from tunekit.estimates.models.model_config import Config, model_types, text_config
from tunekit.recipe.sections.model import RopeScaling

_ORIGINAL = "original_max_position_embeddings"

PARAMETERS: Mapping[str, frozenset[str]] = {
    "linear": frozenset({"factor"}),
    "proportional": frozenset({"factor"}),
    "yarn": frozenset(
        {"factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    ),
    "llama3": frozenset({"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"}),
    "longrope": frozenset({"factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"}),
}
"""Parameters of each kind of scaling, by transformers' names."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""Those without a default."""

BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Kinds whose frequencies depend on the length of the longest row that is computed together."""

_OF_SCALING = frozenset({"rope_type", "type", *(name for names in PARAMETERS.values() for name in names)})

_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor")
"""Keys of a config.json that a model without rotary embeddings has not."""


class Rope(NamedTuple):
    """Rotary embeddings of the layers that see all tokens."""

    parameters: Mapping[str, Any]
    """transformers' `rope_parameters`, or those of the layers with full attention."""
    positions: int
    """Positions that they are for."""

    @property
    def kind(self) -> str:
        """Kind of their scaling; `default`: none."""
        return str(self.parameters.get("rope_type") or self.parameters.get("type") or "default")

    @property
    def own_factor(self) -> float:
        """Positions as a multiple of those before scaling, as far as the parameters tell."""
        factor, original = self.parameters.get("factor"), self.parameters.get(_ORIGINAL)
        if self.kind in ("default", "dynamic"):
            return 1
        return float(factor) if factor else self.positions / original if original else 1

    @property
    def original(self) -> int:
        """Positions before scaling."""
        stated = self.parameters.get(_ORIGINAL)
        return int(stated) if stated and self.kind != "default" else round(self.positions / self.own_factor)


def has_rope(config: Config) -> bool:
    """Return whether a config.json alone shows that a model has rotary embeddings."""
    if rules_out_rope(config):
        return False
    return config.get("model_type") in model_types().defaults or any(config.get(key) is not None for key in _KEYS)


def rules_out_rope(config: Config) -> bool:
    """Return whether a config.json states positions of another kind, or none in the layers that see all tokens."""
    stated = config.get("rope_parameters")
    if stated and not full_of(stated):
        return True
    return bool(config.get("alibi")) or config.get("position_embedding_type") in ("nope", "absolute")


def rope_of(config: Config) -> dict[str, Any]:
    """Return the rotary parameters of the layers that see all tokens, from a config.json of any age."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = dict(full_of(stated))
    original = config.get(_ORIGINAL)
    if original and parameters:
        parameters[_ORIGINAL] = original
    return parameters


def full_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of layers with full attention, where those of kinds of layers are told apart."""
    full: Mapping[str, Any] | None = parameters.get("full_attention", parameters)
    return full or {}


def are_told_apart(parameters: Mapping[str, Any]) -> bool:
    """Return whether there are parameters for each kind of layer."""
    return any(isinstance(value, Mapping) for value in parameters.values())


def scaled(rope: Rope, section: RopeScaling) -> Rope:
    """Return rotary embeddings as a recipe scales them: what it leaves out stays where the kind does.

    Of yarn, llama3 and longrope `original_max_position_embeddings` is written out, which transformers would else take
    from the new positions.
    """
    kind, is_same = kind_of(rope, section), kind_of(rope, section) == rope.kind
    parameters = {name: value for name, value in rope.parameters.items() if is_same or name not in _OF_SCALING}
    parameters.pop("type", None)
    own = stated(section)
    original = section.original_max_position_embeddings or rope.original
    parameters |= {**own, "rope_type": kind, _ORIGINAL: original}
    if _ORIGINAL not in PARAMETERS[kind]:
        del parameters[_ORIGINAL]
    return Rope(parameters, round(section.factor * _unit(rope, section)))


def stated(section: RopeScaling) -> dict[str, Any]:
    """Return the parameters that a recipe gives, but for the kind."""
    parameters = {
        "factor": section.factor,
        _ORIGINAL: section.original_max_position_embeddings,
        "attention_factor": section.attention_factor,
        "beta_fast": section.beta_fast,
        "beta_slow": section.beta_slow,
        "mscale": section.mscale,
        "mscale_all_dim": section.mscale_all_dim,
        "low_freq_factor": section.low_freq_factor,
        "high_freq_factor": section.high_freq_factor,
        "short_factor": section.short_factor,
        "long_factor": section.long_factor,
    }
    return {name: value for name, value in parameters.items() if value is not None}


def section_of(config: Config) -> RopeScaling | None:
    """Return the scaling that a config.json states, as a recipe has it; None where it states none."""
    text = text_config(config)
    parameters = rope_of(text)
    rope = Rope(parameters, text.get("max_position_embeddings") or 0)
    if rope.kind not in PARAMETERS or not rope.positions:
        return None
    fields = {name: value for name, value in parameters.items() if name in RopeScaling.model_fields}
    named = {"rope_type": None if rope.kind == "proportional" else rope.kind, "factor": rope.own_factor}
    return RopeScaling(**{_ORIGINAL: rope.original, **fields, **named})


def kind_of(rope: Rope, section: RopeScaling) -> str:
    """Return the kind of scaling that a recipe means."""
    own = rope.kind if rope.kind in PARAMETERS else "yarn"
    return section.rope_type or own


def _unit(rope: Rope, section: RopeScaling) -> float:
    """Positions for a factor of 1: the model's own ones by its factor where the kind stays, as Llama 3.1 has twice as
    many as its factor says.
    """
    if section.original_max_position_embeddings is not None:
        return section.original_max_position_embeddings
    return rope.positions / rope.own_factor if kind_of(rope, section) == rope.kind else rope.original


def faults(rope: Rope, section: RopeScaling, model_type: str) -> Iterator[tuple[str, str, str]]:
    """Yield what a recipe cannot have of a model: the field, what is wrong, and the remedy."""
    kind = kind_of(rope, section)
    only = model_types().rope_types.get(model_type, kind)
    if kind != only:
        yield "rope_type", f"{kind} is unsupported by the code of {model_type} models", f"set it to {only}"
    own = stated(section)
    unused = sorted(set(own) - PARAMETERS[kind] - {_ORIGINAL})
    if unused:
        yield unused[0], f"is not a parameter of {kind} scaling", "unset it, or set another rope_type"
    if rope.kind == "proportional" != kind:
        yield "rope_type", f"{kind} does not apply to proportional rotary embeddings", "unset it"
    missing = [name for name in NEEDED.get(kind, ()) if name not in own]
    if kind == rope.kind == "llama3":
        missing = [name for name in missing if name not in rope.parameters]
    if missing:
        why = "the model's factors are for its own length" if kind == rope.kind else "they have no default"
        yield "rope_type", f"{kind} needs {' and '.join(missing)}: {why}", "set them, or rope_type=yarn"
    if rope.kind in PARAMETERS and kind == rope.kind and section.factor < rope.own_factor:
        what = f"{section.factor:g} would shorten the context: the model's factor is {rope.own_factor:g}"
        yield "factor", what, "set a larger one"


def factor_for(rope: Rope, section: RopeScaling | None, length: int, model_type: str) -> int | None:
    """Return the smallest whole factor with which a model takes a length; None where a factor alone does not do."""
    section = section or RopeScaling(factor=1)
    if any(faults(rope, section.model_copy(update={"factor": max(1, rope.own_factor)}), model_type)):
        return None
    return ceil(length / _unit(rope, section))
