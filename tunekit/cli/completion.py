"""Completion of arguments in a shell: names of recipes and runs, and paths. `--install-completion` sets it up."""

from collections.abc import Iterable
from pathlib import Path


def recipe_names(incomplete: str) -> list[str]:
    """Return shipped recipes, and YAML files and folders on disk."""
    from tunekit.files import list_recipes

    shipped = _beginning(incomplete, (recipe.name for recipe in list_recipes()))
    return shipped + _paths(incomplete, (".yaml", ".yml"))


def run_names(incomplete: str) -> list[str]:
    """Return the runs of the working directory, newest first, and folders."""
    from tunekit.runs.run import list_runs

    return _beginning(incomplete, (run.name for run in list_runs())) + _paths(incomplete, ())


def model_names(incomplete: str) -> list[str]:
    """Return runs, shipped models and folders."""
    from tunekit.files import SHIPPED_MODELS

    return _beginning(incomplete, SHIPPED_MODELS) + run_names(incomplete)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return folders, and files with one of these suffixes, that complete a path. Hidden ones need their dot."""
    start = incomplete.rpartition("/")[2]
    prefix = incomplete.removesuffix(start)
    try:
        entries = sorted(Path(prefix or ".").expanduser().iterdir())
    except OSError:
        return []
    matching = [path for path in entries if path.name.startswith(start) and (start or not path.name.startswith("."))]
    return [
        f"{prefix}{path.name}{'/' * path.is_dir()}" for path in matching if path.is_dir() or path.suffix in suffixes
    ]
