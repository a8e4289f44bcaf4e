"""Tiny models of random weights of every type that transformers has, by rules on the names of configuration fields.

`tiny_models.yaml` holds the sizes; what is above them in a class's own defaults is brought down to them, in nested
configurations too. A tiny model computes what the published ones compute, so that a loss or a gradient of it can stand
for theirs.
"""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tunekit.models.load import complete_outputs

VOCAB_SIZE = 259
"""Entries of the tokenizer of `tests/tiny.py`: one a byte, and three of ChatML."""

EOS, PAD = 256, 257
"""Its ids of `<|im_end|>` and `<|endoftext|>`."""


@cache
def _sizes() -> dict[str, Any]:
    text = (Path(__file__).parent / "tiny_models.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


MULTIMODAL = frozenset(
    name
    for name, architecture in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name) != architecture
)
"""Types whose checkpoints hold vision or audio towers that `AutoModelForCausalLM` does not load."""


def auto_class(model_type: str) -> type:
    """The auto class that builds all of a published checkpoint of a type."""
    return AutoModelForMultimodalLM if model_type in MULTIMODAL else AutoModelForCausalLM


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration of a type with tiny sizes.

    Args:
        model_type: A type that transformers knows.
        changes: Fields that are to have another value.
    """
    return CONFIG_MAPPING[model_type](**{**_tiny_fields(model_type), **changes})


def _tiny_fields(model_type: str) -> dict[str, Any]:
    config_class = CONFIG_MAPPING[model_type]
    tiny = {}
    for field in dataclasses.fields(config_class):
        value = _tiny_value(field.name, field.default)
        if value is not None:
            tiny[field.name] = value
    for name, spec in config_class.sub_configs_defaults.items():
        below = spec.model_type if spec.config_class is AutoConfig else spec.config_class.model_type
        if below in CONFIG_MAPPING:
            stated = {
                key: value if (small := _tiny_value(key, value)) is None else small
                for key, value in spec.init_kwargs.items()
            }
            tiny[name] = {**_tiny_fields(below), **stated, "model_type": below}
    return _merged(tiny, _sizes()["types"].get(model_type, {}))


def _tiny_value(name: str, default: Any) -> Any:
    """The value that a field is given; None where it keeps its own. Nothing is dropped out: runs are compared."""
    small = _sizes()["small"]
    if name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        return {"eos_token_id": EOS, "pad_token_id": PAD}.get(name)
    if name.endswith(("token_id", "token_index")):
        # Ids of pictures and the like: any that the rows have nowhere.
        return 200 + len(name) if isinstance(default, int) and default >= VOCAB_SIZE else None
    if "drop" in name and isinstance(default, float):
        return 0.0
    if name not in small or isinstance(default, bool):
        return None
    if default is None or default is dataclasses.MISSING:
        return small[name] if name in _sizes()["left_out"] else None
    return small[name] if isinstance(default, int | float) and default > small[name] else None


def _merged(sizes: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Sizes with those of a type in their place, nested ones too."""
    both = dict(sizes)
    for name, value in own.items():
        before = both.get(name)
        same = isinstance(value, dict) and isinstance(before, dict) and "model_type" not in value
        both[name] = _merged(before, value) if same else value
    return both


def tiny_model(model_type: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a causal language model of random float32 weights, in training mode.

    Norms, biases and gates are random too: what is one or zero at first would hide what it scales.

    Raises:
        ValueError: The type is not made tiny by the rules.
    """
    config = tiny_config(model_type, **changes)
    with torch.device("meta"):
        num = auto_class(model_type).from_config(config).num_parameters()
    if num > 20_000_000 and model_type not in _sizes()["large"]:
        raise ValueError(f"{model_type}: {num:,} parameters with tiny sizes")
    torch.manual_seed(seed)
    model: PreTrainedModel = auto_class(model_type).from_config(config, dtype=torch.float32)
    complete_outputs(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * noise)
    return model.train()
