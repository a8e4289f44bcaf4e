"""Files and folders that the fields of a recipe may name on the machine that it runs on.

Whoever lets others write recipes, such as a page in a browser, can say by these which are theirs to use. A name may
also be one of the hub, a URL or a shipped example: what it is depends on the disk, and is not asked here.
"""

from collections.abc import Iterator
from typing import Any

from tunekit.recipe.fields import expands_env, is_free_mapping
from tunekit.recipe.reading.source_locations import Key, dotted
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.section import Section


def named_paths(recipe: Recipe) -> list[tuple[str, str]]:
    """Every text of a recipe that may name a file or a folder, with its dotted key."""
    return [(dotted(key), text) for key, text in _texts(recipe, ())]


def _texts(section: Section, key: Key) -> Iterator[tuple[Key, str]]:
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), (*key, name)
        if expands_env(field) or is_free_mapping(field):
            yield from _strings(value, here)
        for position, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(item, Section):
                yield from _texts(item, here if position is None else (*here, position))


def _strings(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    """The texts in a plain value, however deep."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, (*key, name))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _strings(item, (*key, position))
