"""Architecture of a model from its config.json, with the defaults that transformers uses for omitted keys.

Published configurations leave out what equals the defaults of their configuration class: Gemma 3's do not say how many
heads there are. The defaults are written down in `model_types.yaml`, beside this file, for the types whose tensors
`tunekit.estimates.models.architectures` knows; the tests compare them with transformers.

Well-known models by their hub names, so that a plan for them needs no network: `models.yaml`, beside this file.

It holds what their config.json says of shapes. The tensors are made from that, and their number is compared with the
published one of each entry by a test.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tunekit.errors import ModelError
from tunekit.files import read_table

Config = Mapping[str, Any]
"""A config.json, or the part of one that describes the decoder."""


class ModelTypes(BaseModel):
    """Facts of types of models, by transformers' names: `model_types.yaml`, beside this file, says them and whence."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    defaults: dict[str, dict[str, Any]]
    """Defaults of configuration classes, of the types whose tensors can be derived from a config.json."""
    vision_defaults: dict[str, Any]
    """Those of a vision tower."""
    full_attention_every: dict[str, int]
    """Of types with sliding attention: of so many layers one sees all tokens."""
    router_aux_loss_coef: dict[str, float]
    """Default coefficients of the routers' auxiliary loss."""
    carry_state: frozenset[str]
    """Types with layers that carry a state from token to token."""
    traced: frozenset[str]
    """Types whose activations were compared with a trace."""
    traced_with_pictures: frozenset[str]
    """Types of text decoders that were compared so within models of pictures."""
    fused: frozenset[str]
    """Types whose layers tunekit's kernels compute wholly."""
    embeddings: frozenset[str]
    """Last names of modules that are embedding tables."""
    heads: frozenset[str]
    """Last names of modules that are heads."""
    without_heads: frozenset[str]
    """Types without attention, which have no heads."""
    refused: dict[str, str]
    """Types that are not trained, with the reason."""
    read_past: dict[str, frozenset[str]]
    """Of types whose code reads weights past their modules: last names of these, which get no adapter and no 4 bits."""
    unquantized_linears: dict[str, tuple[str, ...]]
    """Of types with linear layers that are never quantized: the ends of their names."""
    without_gradient: frozenset[str]
    """Last names of modules that give the loss no gradient."""
    projectors: frozenset[str]
    """Names of modules that project what a tower gives to the text decoder's width."""
    shares_layers: frozenset[str]
    """Types with a layer that stands at several places."""
    rope_types: dict[str, str]
    """Of types whose configuration takes a single kind of RoPE scaling: that kind."""
    without_adapters: dict[str, str]
    """Types that no adapter is trained of, with the reason."""
    stored_transposed: frozenset[str]
    """Types whose linear layers have their weights inputs first."""
    not_quantized: dict[str, str]
    """Types that are not trained in 4 bits, with the reason."""
    unquantized_experts: frozenset[str]
    """Types whose experts stay in 16 bits with QLoRA."""
    former_linears: dict[str, dict[str, str]]
    """Of types whose experts PEFT adapts: what became of the linear layers that they once had, by their last names."""


@cache
def model_types() -> ModelTypes:
    """The table of types."""
    return ModelTypes.model_validate(read_table(Path(__file__).with_name("model_types.yaml")))


def read_past_of(model_type: str) -> frozenset[str]:
    """Last names of modules of a type whose weights its code reads past them."""
    return model_types().read_past.get(model_type, frozenset())


WITH_VISION = frozenset({"gemma3"})
"""Types with a vision tower besides the decoder that transformers loads as causal language models, tower and all."""


def is_known(config: Config) -> bool:
    """Return whether the tensors of a model can be derived from this config.json."""
    others_known = "text_config" not in config or config.get("model_type") in WITH_VISION
    return others_known and text_config(config).get("model_type") in model_types().defaults


def complete(config: Config) -> dict[str, Any]:
    """A config.json with what it omits, which is then as transformers has it by default.

    Raises:
        ModelError: The type is not known here.
    """
    types = model_types()
    if not is_known(config):
        known_types = ", ".join([*types.defaults, *sorted(WITH_VISION)])
        raise ModelError(
            f"cannot derive the tensors of a {config.get('model_type')!r} model from config.json alone",
            hint=f"provide its safetensors files; supported without them: {known_types}",
        )
    decoder = text_config(config)
    text = {**types.defaults[decoder["model_type"]], **decoder}
    if "text_config" not in config:
        return text
    vision = {**types.vision_defaults, **(config.get("vision_config") or {})}
    defaults = {"tie_word_embeddings": True, "mm_tokens_per_image": 256}
    return {**defaults, **config, "text_config": text, "vision_config": vision}


def text_config(config: Config) -> Config:
    """Return the decoder's part of config.json: the whole, unless it describes other parts besides."""
    nested: Config | None = config.get("text_config")
    return config if nested is None else nested


def mlp_width_of(config: Config) -> int:
    """Width of the gated MLP that a token goes through, that of all its experts taken together."""
    if not num_experts_of(config):
        return number(config, "intermediate_size")
    inner = _first_count(config, "moe_intermediate_size", "intermediate_size")
    return inner * (num_experts_per_token_of(config) + _first_count(config, "n_shared_experts"))


def sliding_window_of(config: Config) -> int | None:
    """Tokens that a layer with a sliding window looks back; None where no layer has one."""
    return None if config.get("use_sliding_window") is False else _first_count(config, "sliding_window") or None


def layer_types_of(config: Config) -> tuple[str, ...]:
    """Return the attention of each layer by transformers' names: as config.json says, or as its type alternates by
    default.
    """
    if config.get("layer_types"):
        return tuple(config["layer_types"])
    full_every = model_types().full_attention_every.get(config.get("model_type", ""))
    if full_every is None:
        return ()
    every = config.get("sliding_window_pattern") or full_every
    layers = range(1, number(config, "num_hidden_layers") + 1)
    return tuple("sliding_attention" if layer % every else "full_attention" for layer in layers)


def num_experts_of(config: Config) -> int:
    """Number of routed experts in a layer that has them; 0 in a dense model."""
    return _first_count(config, "num_local_experts", "num_experts", "n_routed_experts")


def num_experts_per_token_of(config: Config) -> int:
    """Number of routed experts that a token goes through."""
    return _first_count(config, "num_experts_per_tok")


def _first_count(config: Config, *names: str) -> int:
    """The first of some numbers that is there; 0 where none is, or none is a single number."""
    return next((config[name] for name in names if isinstance(config.get(name), int) and config[name] > 0), 0)


def router_aux_loss_coef_of(config: Config) -> float | None:
    """Coefficient of the routers' auxiliary loss by config.json; None where the model's code has none."""
    default = model_types().router_aux_loss_coef.get(config.get("model_type", ""))
    coefficient = config.get("router_aux_loss_coef")
    return default if coefficient is None or default is None else float(coefficient)


def head_dim_of(config: Config) -> int:
    """Size of a head of the queries."""
    if config.get("kv_lora_rank"):
        return number(config, "qk_nope_head_dim") + number(config, "qk_rope_head_dim")
    return config.get("head_dim") or number(config, "hidden_size") // number(config, "num_attention_heads")


def number(config: Config, name: str) -> int:
    """A positive number of config.json.

    Raises:
        ModelError: It is none.
    """
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        model_type = config.get("model_type")
        raise ModelError(
            f"config.json: {name} of a {model_type!r} model must be a positive integer, got {value!r}",
            hint="fix config.json",
        )
    return value


@dataclass(frozen=True)
class KnownModel:
    """Row of the table for one hub name."""

    config: Mapping[str, Any]
    """Its config.json as far as shapes go."""
    num_params: int
    """The published number of parameters."""
    source: str
    """Publication of that number."""
    has_chat_template: bool


@cache
def known_models() -> dict[str, KnownModel]:
    """The table by hub name."""
    table = read_table(Path(__file__).with_name("models.yaml"))
    published = {name: method for method, names in table["published_as"].items() for name in names}

    def config_of(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
        method = published.get(name)
        return config if method is None else {**config, "quantization_config": {"quant_method": method}}

    return {
        name: KnownModel(
            config_of(name, entry["config"]), entry["num_params"], table["sources"][entry["source"]], kind == "chat"
        )
        for entry in table["models"]
        for kind in ("base", "chat")
        for name in entry.get(kind, ())
    }
