"""Settings of optimizers in other tools: by keys with an optimizer's name, and by transformers' own."""

import re
from collections.abc import Callable
from typing import Any

from tunekit.migration.draft import (
    Draft,
    UnfitError,
    carried,
    is_off,
    lower,
    names,
    number,
    text,
    trainer_arg,
    truth,
    whole,
)
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.migration.table import tool_table
from tunekit.recipe.sections.section import LOW_RANK_OPTIMS

_ARGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "rank": ("rank", whole),
    "update_interval": ("update_proj_gap", whole),
    "update_proj_gap": ("update_proj_gap", whole),
    "scale": ("scale", number),
    "scale_type": ("scale_type", lower),
}
"""Arguments of GaLore and APOLLO in tools, and ours with their conversions."""

_ONLY = {"proj_type": "std", "proj": "random"}
"""Values that tunekit has alone."""

_OURS = {"galore": "galore_adamw", "apollo": "apollo_adamw", "adam_mini": "adam_mini"}
"""Optimizers that a tool has a switch for."""

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")

STOCHASTIC = "tunekit rounds bfloat16 weights stochastically"
TO_THE_NEAREST = f"the original rounds bfloat16 weights to the nearest, {STOCHASTIC}"
"""Rounding of weights by AdamW with 4-bit states."""

DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "LLaMA-Factory": {
        "galore": {"rank": 16, "update_proj_gap": 200, "scale": 2.0},
        "apollo": {"rank": 16, "update_proj_gap": 200, "scale": 32.0},
    },
    "ms-swift": {"galore": {"rank": 128, "update_proj_gap": 50, "scale": 1.0}},
}
"""Arguments that tools give GaLore and APOLLO by themselves."""


FOUR_BITS = ("adamw_torch_4bit", "ao_adamw_4bit")
"""Names of torchao's AdamW4bit in transformers, which gives its states tunekit's blocks, and in Axolotl."""


def block_words(num_values: int = 128) -> str:
    """Describe states in 4 bits of other blocks than tunekit's: by default torchao's own."""
    return f"the original's states have blocks of {num_values} values, tunekit's of 256"


def use(draft: Draft, entry: Entry) -> Fate:
    """A switch of an optimizer, on top of the AdamW that the tool names elsewhere."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    name = entry.key.removeprefix("use_")
    obstacle = _obstacle(draft, name)
    if obstacle is not None:
        raise UnfitError(obstacle)
    return draft.carry(entry, "train.optim", _OURS[name])


def _obstacle(draft: Draft, name: str) -> str | None:
    """Return why an optimizer on top of another one, or beside an adapter, has no counterpart."""
    base = draft.get("optim", "adamw_torch")
    if draft.values["adapter.type"] != "full":
        return f"{_OURS[name]} trains all weights: adapter {draft.values['adapter.type']} has none for it"
    if lower(base) not in _ADAMW:
        return f"with optim {base}: tunekit supports only {_OURS[name]}; set train.optim"
    return None


def _name(draft: Draft) -> str:
    return lower(draft.get("optim") or draft.get("optimizer") or "")


def _has_low_rank(draft: Draft) -> bool:
    return _name(draft) in LOW_RANK_OPTIMS


def named(draft: Draft, entry: Entry) -> Fate:
    """An optimizer by transformers' name, or by an older one."""
    name = lower(entry.value)
    fate = draft.carry(entry, "train.optim", tool_table("trainer").words["optimizers"].get(name, name))
    words = [fate.words]
    if name == "ao_adamw_4bit":
        words.append(block_words())
    is_pure = draft.get("bf16") == "full" or not is_off(draft.get("pure_bf16") or False)
    is_nearest = "bf16_stochastic_round=true" not in str(draft.get("optim_args")).replace(" ", "").lower()
    if name in FOUR_BITS and is_pure and is_nearest and draft.values.get("adapter.type") == "full":
        words.append(TO_THE_NEAREST)
    return fate if len(words) == 1 else Fate("different", "; ".join(words))


def argument(draft: Draft, entry: Entry) -> Fate:
    """An argument of GaLore or APOLLO, by a key that begins with its name."""
    optimizer, _, name = entry.key.partition("_")
    if is_off(draft.get(f"use_{optimizer}", False)) or _obstacle(draft, optimizer) is not None:
        return Fate("silent", f"only used with use_{optimizer}")
    if name in _ARGS:
        ours, read = _ARGS[name]
        return draft.carry(entry, f"train.optim_args.{ours}", read(entry.value))
    if name in _ONLY:
        return _only(name, entry.value)
    if name in ("target", "target_modules"):
        return _targets(draft, entry, [re.escape(one) for one in names(entry.value)])
    if is_off(entry.value):
        return Fate("silent", "is off")
    if name == "layerwise" and draft.get("gradient_accumulation_steps", 1) == 1:
        words = (
            "updates each matrix in the backward pass, without clipping; set a large train.max_grad_norm to disable "
            "clipping"
        )
        return Fate("different", words, "train.max_grad_norm")
    raise UnfitError(f"unsupported with {optimizer}_adamw")


def _only(name: str, value: Any) -> Fate:
    if lower(value) != _ONLY[name]:
        raise UnfitError(f"{value}: tunekit supports only {_ONLY[name]}")
    return Fate("silent", "is the default")


def targets(draft: Draft, entry: Entry) -> Fate:
    """Modules whose states have a low rank with an optimizer of transformers, or all."""
    if not _has_low_rank(draft):
        return Fate("silent", "only used with galore_adamw and apollo_adamw")
    return _targets(draft, entry, names(entry.value))


def _targets(draft: Draft, entry: Entry, patterns: list[str]) -> Fate:
    if entry.value in ("all-linear", "all_linear"):
        return Fate("different", "the original includes the head; tunekit updates it by AdamW")
    if patterns == ["all"]:
        return Fate("silent", "is the default")
    return draft.carry(entry, "train.optim_target_modules", patterns)


def optim_args(draft: Draft, entry: Entry) -> Fate:
    """Arguments of transformers' optimizers, as one text: of GaLore and APOLLO they are fields of the recipe."""
    is_4bit = _name(draft) in FOUR_BITS
    if is_off(entry.value) or not (is_4bit or _has_low_rank(draft)):
        return trainer_arg("optim_args")(draft, entry)
    pairs = dict(pair.split("=", 1) for pair in text(entry.value).replace(" ", "").split(",") if "=" in pair)
    if is_4bit:
        if others := pairs.keys() - {"bf16_stochastic_round"}:
            raise UnfitError(f"{min(others)}: unsupported with tunekit_adamw_4bit")
        return Fate("silent", STOCHASTIC)
    carriers: dict[str, Any] = {}
    for name, value in pairs.items():
        if name in _ONLY:
            _only(name, value)
        elif name in _ARGS:
            ours, read = _ARGS[name]
            carriers[ours] = read(value)
        else:
            raise UnfitError(f"{name}: unsupported with galore_adamw and apollo_adamw")
    for ours, value in carriers.items():
        draft.put(f"train.optim_args.{ours}", value, entry.key)
    return carried("train.optim_args", carriers)


def assume_defaults(draft: Draft) -> None:
    """Record the arguments that a tool gives GaLore or APOLLO by itself."""
    optimizer = str(draft.values.get("train.optim", "")).removesuffix("_adamw")
    if draft.get(f"use_{optimizer}"):
        defaults = DEFAULTS[draft.tool].get(optimizer, {})
        draft.assume({f"train.optim_args.{name}": value for name, value in defaults.items()})
