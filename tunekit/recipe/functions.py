"""Functions of the user's own, named in a recipe as `module:function`.

They are looked up when the recipe is loaded, so that a misspelt name costs no training. For that moment the working
directory is searched as well, as it would be by `python -m`.

`tunekit check` imports them, and reading rows calls them, before anybody has said that a recipe is to be trained. So
they are the user's own: Python's library and installed packages hold functions that run what a row tells them to.

Those that were written from a notebook or script (`function_source`) are in the user's cache folder, and in a run's
own folder, which its processes search too.
"""

import difflib
import importlib
import importlib.util
import os
import pkgutil
import shlex
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from tunekit.errors import RecipeError
from tunekit.recipe.function_source import functions_folder, is_written

TRUSTED = "TUNEKIT_TRUSTED_MODULES"
"""Variable with the installed packages, by commas, whose functions recipes may name."""

_HINT = "write my_module:my_function"
_INSTALLED = ("site-packages", "dist-packages")


def find_function(path: str, beside: Path | None = None) -> Callable[..., Any]:
    """The function that a dotted path names.

    Args:
        path: The module and the function.
        beside: Folder of the recipe. It is not searched, as processes of a run would not know it; an error names it.

    Raises:
        RecipeError: There is no such module or function, or the module cannot be imported.
    """
    name, _, attribute = path.partition(":")
    module = _import(name, beside)
    namespace = vars(module)
    if attribute not in namespace:
        candidates = [other for other, value in namespace.items() if callable(value) and not other.startswith("__")]
        raise RecipeError(f"module '{name}' has no function '{attribute}'", hint=_meant(attribute, candidates))
    function = namespace[attribute]
    if not callable(function):
        raise RecipeError(f"'{path}' is not a function but a {type(function).__name__}")
    return function  # type: ignore[no-any-return]  # callable, as just seen


def _check_own(name: str) -> None:
    """Refuse a module that is neither the user's own nor said to be trusted.

    Raises:
        RecipeError: It is Python's, or of an installed package.
    """
    top = name.partition(".")[0]
    if top == "__main__" or top in (module_name.strip() for module_name in os.environ.get(TRUSTED, "").split(",")):
        return
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        # It was made in this program, by no import.
        return
    if spec is None:
        return
    places = [Path(place) for place in (spec.origin, *(spec.submodule_search_locations or ())) if place is not None]
    library = Path(sysconfig.get_path("stdlib"))
    if spec.origin in ("built-in", "frozen") or any(
        place.is_relative_to(library) or any(part in _INSTALLED for part in place.parts) for place in places
    ):
        raise RecipeError(
            f"'{top}' is an installed module; recipes may only use functions from your own modules",
            hint=f"call it from your own function, or export {TRUSTED}={top} if you trust the recipe",
        )


def _import(name: str, beside: Path | None) -> ModuleType:
    with importable(Path.cwd(), *([functions_folder()] if is_written(name) else [])):
        _check_own(name)
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise RecipeError(f"importing '{name}' failed: {error}", hint="install the missing module") from error
            hint = _elsewhere(error.name, beside) or _meant(error.name, _modules_beside(error.name))
            raise RecipeError(f"no module '{error.name}'", hint=hint) from error
        except SyntaxError as error:
            place = f"{error.filename}:{error.lineno}"
            raise RecipeError(f"importing '{name}' failed: {place}: {error.msg}") from error
        except Exception as error:  # the module is the user's: it may raise anything
            raise RecipeError(f"importing '{name}' raised {type(error).__name__}: {error}") from error


@contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """Search folders for modules before all others, within the context."""
    paths = [str(folder) for folder in folders]
    sys.path[:0] = paths
    importlib.invalidate_caches()  # a module may have been written since the last look
    try:
        yield
    finally:
        for path in paths:
            with suppress(ValueError):  # the module may have changed the path itself
                sys.path.remove(path)


def _modules_beside(name: str) -> list[str]:
    """The modules that stand where a module was looked for, by their dotted names."""
    package, _, _ = name.rpartition(".")
    if not package:
        return [module.name for module in pkgutil.iter_modules([str(Path.cwd())])]
    folders = vars(sys.modules[package]).get("__path__", [])  # none where it is a module, not a package
    return [f"{package}.{module.name}" for module in pkgutil.iter_modules(folders)]


def _elsewhere(name: str, folder: Path | None) -> str | None:
    """Return how to import a module that a folder has; None where it has not."""
    files = (f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py"))
    if folder is None or not any((folder / file).is_file() for file in files):
        return None
    return f"it is in the recipe's folder: export PYTHONPATH={shlex.quote(str(folder.resolve()))}"


def _meant(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"available: {', '.join(known[:8])}" if known else _HINT
