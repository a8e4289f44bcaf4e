"""The recipes and example data that ship with tunekit: list them, find one by name, copy one to edit.

A shipped recipe's name is its path without the suffix: `sft/quickstart` is `recipes/sft/quickstart.yaml`. The first
comment line of the file is its description. In a wheel the two folders lie inside the package; in a checkout they lie
at the top, where people look for them.
"""

import difflib
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePath

from tunekit.errors import DataError, RecipeError

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that comes with tunekit."""

    name: str
    """Path below the recipe folder, without the suffix: `sft/quickstart`."""

    description: str
    """The first comment line of the file."""

    path: Path
    """Where the file lies."""


def recipe_root() -> Path:
    """The folder of the shipped recipes: in the package when installed from a wheel, else at the checkout's top."""
    installed = _PACKAGE / "_recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def example_root() -> Path:
    """The folder of the shipped example data: in the package, or `examples/data` of a checkout."""
    installed = _PACKAGE / "_examples"
    return installed if installed.is_dir() else _PACKAGE.parent / "examples" / "data"


def list_recipes() -> list[ShippedRecipe]:
    """The shipped recipes by name."""
    root = recipe_root()
    return [
        ShippedRecipe(path.relative_to(root).with_suffix("").as_posix(), _description(path), path)
        for path in sorted(root.rglob("*.yaml"))
    ]


def recipe_table() -> str:
    """The shipped recipes as a table in Markdown, with links from their folder; it stands in `recipes/README.md`."""
    lines = ["| recipe | what it does |", "|:--|:--|"]
    for recipe in list_recipes():
        lines.append(f"| [{recipe.name}]({recipe.name}.yaml) | {recipe.description} |")
    return "\n".join(lines) + "\n"


def find_recipe(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        RecipeError: There is none of that name.
    """
    names = {recipe.name: recipe.path for recipe in list_recipes()}
    if name in names:
        return names[name]
    near = near_names(name, list(names))
    hint = "`tunekit recipes` lists them"
    raise RecipeError(
        f"{name}: there is no shipped recipe of this name",
        hint=f"did you mean {near}? {hint}" if near else hint,
    )


def recipe_text(name: str) -> str:
    """The YAML text of a shipped recipe, with its comments.

    Raises:
        RecipeError: There is none of that name.
    """
    return find_recipe(name).read_text(encoding="utf-8")


def copy_recipe(name: str, dest: Path | None = None) -> Path:
    """Copy a shipped recipe to edit, and say where the copy is.

    Args:
        name: A shipped recipe's name.
        dest: The new file, or a folder to put it in. Left out: the working directory.

    Raises:
        RecipeError: There is no such recipe, or the copy would overwrite a file or cannot be written.
    """
    source = find_recipe(name)
    target = dest if dest is not None else Path(source.name)
    if target.is_dir():
        target = target / source.name
    if target.exists():
        raise RecipeError(f"{target}: exists already", hint="name another file to copy to")
    if not target.parent.is_dir():
        raise RecipeError(f"{target}: there is no folder {target.parent}", hint="create it first")
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise RecipeError(f"{target}: cannot be written: {error.strerror}") from error
    return target


def list_examples() -> list[str]:
    """The files of shipped example data by name; `example:NAME` stands for one in a recipe."""
    return sorted(path.name for path in example_root().iterdir() if path.is_file() and path.suffix != ".py")


def find_example(name: str) -> Path:
    """The file of a shipped example dataset, for data paths such as `example:pirate.jsonl`.

    Raises:
        DataError: There is none of that name.
    """
    names = list_examples()
    if name in names:
        return example_root() / name
    near = near_names(name, names)
    raise DataError(
        f"example:{name}: no such file ships with tunekit",
        hint=f"did you mean {near}?" if near else f"there are {', '.join(names)}",
    )


def near_names(name: str, names: list[str]) -> str:
    """Up to three of `names` that `name` may have meant, quoted and joined by "or"; empty when none is near.

    Folders and suffixes do not count: `quickstart.yaml` is near `sft/quickstart`.
    """
    stems = {other: PurePath(other).stem for other in names}
    likely = difflib.get_close_matches(PurePath(name).stem, set(stems.values()), n=3, cutoff=0.7)
    near = [other for stem in likely for other in names if stems[other] == stem]
    return " or ".join(f"'{other}'" for other in near[:3])


def _description(path: Path) -> str:
    """The first comment line of a recipe."""
    with path.open(encoding="utf-8") as lines:
        return next((line.lstrip("# ").rstrip() for line in lines if line.startswith("#")), "")
