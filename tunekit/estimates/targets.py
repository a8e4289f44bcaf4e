"""PEFT's rules for which modules an adapter section means, and with which rank: by their names alone.

A list matches the ends of names, part by part; a regular expression matches a whole name. A layer's number is the first
number in a name. A pattern of ranks matches the end of a name, at a dot.
"""

import re
from collections.abc import Iterable, Mapping

from tunekit.recipe.sections.adapters import ALL_LINEAR, LoraAdapter, layer_of


def is_targeted(adapter: LoraAdapter, name: str) -> bool:
    """Return whether a linear layer gets an adapter, as far as that depends on its name."""
    if is_any_of(name, adapter.exclude_modules or ()):
        return False
    targets = adapter.target_modules
    if adapter.target_regex is not None:
        return re.fullmatch(adapter.target_regex, name) is not None
    if targets != ALL_LINEAR and name in targets:
        return True
    is_named = targets == ALL_LINEAR or is_any_of(name, targets)
    return is_named and (adapter.layers_to_transform is None or layer_of(name) in adapter.layers_to_transform)


def is_any_of(name: str, endings: Iterable[str]) -> bool:
    """Return whether a module's name is one of several, or ends in one of them behind a dot."""
    return any(f".{name}".endswith(f".{ending}") for ending in endings)


def pattern_of(patterns: Iterable[str], name: str) -> str | None:
    """Return the first of several patterns that matches the end of a module's name."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", name)), None)


def rank_of(adapter: LoraAdapter, name: str) -> int:
    """Return the rank of a module's adapter."""
    patterns: Mapping[str, int] = adapter.rank_pattern or {}
    pattern = pattern_of(patterns, name)
    return adapter.rank if pattern is None else patterns[pattern]
