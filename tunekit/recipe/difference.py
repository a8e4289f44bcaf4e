"""In what recipes differ, by dotted key."""

from collections.abc import Mapping
from typing import Any

from tunekit.recipe.reading.write import to_inline_yaml
from tunekit.recipe.schema import Recipe


def recipe_diff(*recipes: Recipe) -> dict[str, tuple[str | None, ...]]:
    """The fields in which recipes differ, each with its value in every one of them as YAML.

    None stands where a recipe has no such field, as where another method has one. Defaults count: what two recipes say
    in other words is no difference.
    """
    flat = [_flat(recipe.model_dump(mode="json")) for recipe in recipes]
    keys = dict.fromkeys(key for fields in flat for key in fields)
    differing = {key: tuple(to_inline_yaml(fields[key]) if key in fields else None for fields in flat) for key in keys}
    return {key: values for key, values in differing.items() if len(set(values)) > 1}


def _flat(fields: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat
