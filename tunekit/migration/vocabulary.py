"""Keys of other tools about a model's context, vocabulary and chat template -> fields of `model`."""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from tunekit.estimates.models.model_config import known_models, text_config
from tunekit.migration.draft import Draft, UnfitError, carried, names, number, text
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.migration.table import tool_table
from tunekit.recipe.chat_templates import named_template
from tunekit.recipe.sections.model import RopeScaling, SpecialTokens

_TYPES = ("linear", "yarn", "llama3", "longrope")

_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4}
"""Values that LLaMA-Factory and ms-swift take for those of Llama 3.1."""


def rope(draft: Draft, entry: Entry) -> Fate:
    """Scaled rotary embeddings: transformers' mapping, or a kind by its name, whose factor follows from the length."""
    stated = _stated(draft, entry)
    kind = stated.get("rope_type", stated.get("type"))
    if kind not in _TYPES:
        why = "unsupported kind of scaling" if kind != "dynamic" else "its frequencies depend on the rows seen before"
        raise UnfitError(f"{why}: {kind}; model.rope_scaling takes {', '.join(_TYPES)}")
    if "factor" not in stated:
        factor = _factor(draft)
        if factor is None:
            raise UnfitError("its factor follows from the model's positions: set model.rope_scaling.factor")
        stated = {**stated, "factor": factor, **(_LLAMA3 if kind == "llama3" else {})}
    fields = {"rope_type": kind, **stated}
    known = {name: value for name, value in fields.items() if name in RopeScaling.model_fields}
    for name, value in known.items():
        target = f"model.rope_scaling.{name}"
        if target not in draft.values:
            draft.put(target, value if isinstance(value, str | list) else number(value), entry.key)
    leaf = entry.key.rpartition(".")[2]
    name = "rope_type" if leaf in ("type", "rope_scaling", "rope_parameters") else leaf
    if name not in known:
        return Fate("decided", "follows from the model")
    return carried(f"model.rope_scaling.{name}", known[name])


def tokens(draft: Draft, entry: Entry) -> Fate:
    """Tokens to add as ordinary ones: listed, or in a text with commas."""
    return _added(draft, entry, "model.add_tokens")


def special_tokens(draft: Draft, entry: Entry) -> Fate:
    """Special tokens to add: listed, or in a text with commas; ms-swift's may be in a file, a token a line."""
    listed = []
    for token in names(entry.value):
        if token.endswith(".txt") and not Path(token).is_file():
            raise UnfitError(f"no file '{token}': list its tokens in model.add_special_tokens")
        listed += Path(token).read_text(encoding="utf-8").split() if token.endswith(".txt") else [token]
    return _added(draft, replace(entry, value=listed), "model.add_special_tokens")


def role(draft: Draft, entry: Entry) -> Fate:
    """A special token by its role, or further ones."""
    parts = entry.key.split(".")
    name = parts[1].partition("[")[0] if len(parts) > 1 else ""
    if name == "pad_token":
        return Fate("decided", "padding is always masked from the loss")
    if name in SpecialTokens.model_fields:
        return draft.carry(entry, f"model.special_tokens.{name}", text(entry.value))
    if name == "additional_special_tokens":
        return _added(draft, entry, "model.add_special_tokens")
    return Fate("different", "the tokenizer's own special tokens are used")


def same_template(draft: Draft, entry: Entry, tool: str) -> Fate | None:
    """Carry over a template by its name, if one of tunekit's writes conversations alike; None where none does."""
    name = str(tool_table(tool).words["same_templates"].get(text(entry.value), ""))
    template, end = named_template(name), draft.get("special_tokens.eos_token")
    if template is None or (end is not None and template.end not in (None, end)):
        return None
    return draft.carry(entry, "model.chat_template", template.name)


def _added(draft: Draft, entry: Entry, target: str) -> Fate:
    """Add to a list of the recipe: entries of a list come one by one."""
    before = draft.values.get(target, [])
    listed = list(dict.fromkeys([*before, *names(entry.value)]))
    return draft.carry(entry, target, listed)


def _stated(draft: Draft, entry: Entry) -> Mapping[str, Any]:
    """The mapping that a key is in or holds."""
    parts = entry.key.split(".")
    depth = next(at for at, part in enumerate(parts, 1) if part.startswith("rope_"))
    value = draft.get(".".join(parts[:depth]))
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UnfitError(f"is not JSON: {error}") from None
    return value if isinstance(value, dict) else {"rope_type": value}


def _factor(draft: Draft) -> int | None:
    """Length by the positions of a well-known model without scaling of its own; None where either is not known."""
    model, length = draft.values.get("model.path"), draft.values.get("data.max_length")
    keys = (draft.get(key) for key in ("model_name_or_path", "model", "base_model"))
    entry = known_models().get(model or next((str(name) for name in keys if name), ""))
    lengths = (draft.get(key) for key in ("max_model_len", "cutoff_len", "max_length"))
    length = length or next((value for value in lengths if value), None)
    if entry is None or length is None or "rope_scaling" in text_config(entry.config):
        return None
    positions: int = text_config(entry.config)["max_position_embeddings"]
    return max(1, ceil(number(length) / positions))
