"""Inputs that a caller held in memory, kept in the folder of the run.

They are files in the user's cache folder, named by their content, which the recipe names. A run gets its own name for
each, in `inputs/`: no second copy, and still there when the cache is cleared. Of rows its recipe names that file;
functions are named by their module, which the processes of the run look for there.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunekit.data.sources.in_memory import RowData, write_rows
from tunekit.errors import RecipeError
from tunekit.recipe.function_source import functions_folder, is_written
from tunekit.recipe.load import dump_recipe, sets
from tunekit.recipe.reading.parse import leaves, to_inline_yaml
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.data import DataSource, Sources
from tunekit.recipe.sections.section import FUNCTION_PATTERN
from tunekit.runs.run import INPUTS, Run

_NAME = re.compile(r"[a-z_]+-[0-9a-f]{16}\.jsonl")


def rows_as_overrides(
    source: str | Path | Mapping[str, Any] | Recipe,
    overrides: list[str],
    *,
    train_dataset: RowData | None,
    eval_dataset: RowData | None,
) -> list[str]:
    """Write rows to files, and return the overrides of a recipe that name them.

    Args:
        source: The recipe.
        overrides: Overrides so far, which may unset what the recipe names.
        train_dataset: Rows for `data.train`.
        eval_dataset: Rows for `data.eval`.

    Raises:
        TunekitError: The recipe names rows as well, or rows cannot be written.
    """
    datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    words = []
    for name, data in datasets.items():
        if data is None:
            continue
        key = ("data", name.removesuffix("_dataset"))
        dotted = ".".join(key)
        if sets(source, overrides, key):
            raise RecipeError(
                f"{dotted}: given as well as {name}", hint=f"remove one; the override {dotted}=null unsets it"
            )
        words.append(f"{dotted}={to_inline_yaml(str(write_rows(data, name)))}")
    return words


def keep_inputs(run: Run, earlier: Run | None = None) -> None:
    """Give a run its own files of inputs that were held in memory, and have its recipe name those of rows.

    Args:
        run: The run.
        earlier: The run that it repeats.
    """
    folder = (run.path / INPUTS).resolve()

    def keep(path: str) -> str:
        file = Path(path)
        if not _NAME.fullmatch(file.name):
            return path
        _link(file, folder)
        return str(folder / file.name)

    recipe = run.recipe
    changed = _with_paths(recipe, keep)
    if changed != recipe:
        (run.path / "recipe.yaml").write_text(dump_recipe(changed), encoding="utf-8")
    places = (functions_folder(), *([] if earlier is None else [earlier.path / INPUTS]), Path.cwd())
    for name in _modules(recipe):
        file = next((place / name for place in places if (place / name).is_file()), None)
        if file is not None:
            _link(file, folder)


def _modules(recipe: Recipe) -> Iterator[str]:
    """Yield the files of modules that were written for the functions of a recipe."""
    for _, value in leaves(recipe.model_dump()):
        if isinstance(value, str) and re.fullmatch(FUNCTION_PATTERN, value):
            module = value.partition(":")[0]
            if is_written(module):
                yield f"{module}.py"


def with_inputs_of(recipe: Recipe, stored: Recipe) -> Recipe:
    """Return a recipe that names the files of a run where its own have the same content."""
    paths: dict[str, str] = {}

    def note(path: str) -> str:
        if _NAME.fullmatch(Path(path).name):
            paths[Path(path).name] = path
        return path

    _with_paths(stored, note)
    return _with_paths(recipe, lambda path: paths.get(Path(path).name, path))


def _with_paths(recipe: Recipe, change: Callable[[str], str]) -> Recipe:
    """Return a recipe with other paths of its inputs."""

    def changed(sources: Sources) -> Sources:
        if isinstance(sources, list):
            return [_with_path(source, change) for source in sources]
        return _with_path(sources, change)

    evaluated = None if recipe.data.eval is None else changed(recipe.data.eval)
    data = recipe.data.model_copy(update={"train": changed(recipe.data.train), "eval": evaluated})
    return recipe.model_copy(update={"data": data})


def _with_path(source: DataSource, change: Callable[[str], str]) -> DataSource:
    return source.model_copy(update={"path": change(source.path)})


def _link(source: Path, folder: Path) -> None:
    """Give a file a second name in a folder, or copy it there where that is on another disk."""
    path = folder / source.name
    if path.exists():
        return
    folder.mkdir(exist_ok=True)
    try:
        os.link(source, path)
    except OSError:
        shutil.copy2(source, path)
