"""Paths of inputs in a recipe file: relative to the working directory, or else to the folder of the file.

A recipe and its rows are often copied together, and used from elsewhere. What the working directory has comes first, as
on a command line; a path that only the recipe's folder has leads there, and a note says so. What a run writes stays
below the working directory.
"""

import glob
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tunekit.files import SHIPPED_MODELS
from tunekit.recipe import schema
from tunekit.recipe.chat_templates import named_template
from tunekit.recipe.reading import parse
from tunekit.recipe.reading.parse import Key, dotted
from tunekit.recipe.schema import holders_along
from tunekit.recipe.sections.section import TAG

_WITH_INPUTS = ("model", "data", "method")
"""Sections whose paths name what a run reads; those of the others name what it writes."""


def find_in_folder(values: dict[str, Any], folder: Path, commanded: Collection[Key]) -> tuple[Any, list[str]]:
    """Find the inputs that a recipe file names by relative paths: in the working directory, or in the file's folder.

    Args:
        values: The recipe's values, with variables expanded.
        folder: The folder of the file.
        commanded: Keys that the command line sets: their paths are those of the working directory.

    Returns:
        The values, with paths that lead into the folder where only that has the file, and notes of these paths.
    """
    notes: list[str] = []

    def in_folder(value: Any, key: Key) -> Any:
        is_own = key[0] in _WITH_INPUTS and not any(key[: len(above)] == above for above in commanded)
        if not isinstance(value, str) or not is_own or not takes_path(key, values):
            return value
        is_name = named_template(value) is not None if key[-1] == "chat_template" else value in SHIPPED_MODELS
        if is_name or not value or "://" in value or Path(value).is_absolute():
            return value
        here, there = _matches(Path(value)), _matches(folder / value)
        if there and not here:
            notes.append(f"{dotted(key)}: {value} is in the recipe's folder, {folder}")
            return str(folder / value)
        if there and [path.resolve() for path in there] != [path.resolve() for path in here]:
            notes.append(f"{dotted(key)}: {value} of the working directory, not that of the recipe's folder, {folder}")
        return value

    return parse.mapped(values, in_folder), notes


def _matches(path: Path) -> list[Path]:
    """Return the files and folders that a path or a pattern names."""
    try:
        return [path] if path.exists() else sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207
    except OSError:  # longer than a file's name may be
        return []


def takes_path(key: Key, values: dict[str, Any]) -> bool:
    """Return whether a field takes a path, in the variants that the values choose."""
    path = holders_along(key, values)
    is_path = len(path) == len(key) and all(schema.expands_env(holder.field) for holder in path[-1])
    at: Any = values
    for part, holders in zip(key, path, strict=False):
        # A section whose tag names another variant, or none, does not have the field.
        is_path = is_path and (isinstance(part, int) or schema.tag_of(holders[0].section) in (None, at.get(TAG)))
        at = at[part]
    return is_path
