"""Files that ship with tunekit, and files that somebody else may have made.

The recipes and example data that ship: list them, find one by name, copy one to edit. A shipped recipe's name is its
path without the suffix: `sft/quickstart` is `recipes/sft/quickstart.yaml`. The first comment line of the file is its
description. In a wheel the two folders lie inside the package; in a checkout they lie at the top, where people look for
them.

What somebody else may have made is opened only where it is a file, and read only where it is small: a FIFO in the place
of a file would be waited for without end, and a device or a huge file would fill the memory.
"""

import difflib
import errno
import json
import os
import shutil
import stat
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO

import yaml

from tunekit.errors import DataError, RecipeError

if TYPE_CHECKING:
    from jinja2 import Template

MAX_BYTES = 64 * 2**20
"""Largest small file, in bytes."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes.

    Raises:
        OSError: It is not there, cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a small file.

    Raises:
        OSError: It is not there, cannot be read, is no regular file, or is larger.
    """
    with open_regular(path) as stream:
        # `read` takes as much memory as it is allowed to before it reads.
        size = os.fstat(stream.fileno()).st_size
        content = stream.read(min(size, max_bytes) + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: It is no JSON text, or is nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


@cache
def read_table(path: Path) -> Any:
    """Return the data of a YAML file that comes with tunekit. They are read once, and nobody changes them."""
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    return yaml.load(path.read_text(encoding="utf-8"), loader)


def load_template(path: Path, **filters: Callable[..., Any]) -> "Template":
    """Return a jinja template that comes with tunekit. In `NAME.html.jinja` values are text, and are escaped.

    Args:
        path: The template, which may extend others beside it.
        filters: Filters of its own by name.
    """
    import jinja2

    is_page = path.name.endswith(".html.jinja")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent),
        autoescape=is_page,
        keep_trailing_newline=not is_page,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(filters)
    return environment.get_template(path.name)


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a path leads into a folder, after resolving links."""
    try:
        return path.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def leads_out(file: Path) -> bool:
    """Return whether a file is a link out of its folder."""
    return file.is_symlink() and not is_inside(file, file.parent)


def has_controls(text: str) -> bool:
    """Return whether a text holds control characters or line separators."""
    return any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in text)


def is_name(text: str) -> bool:
    """Return whether a text can be a file's path: file systems take no NUL and no part of more than 255 bytes."""
    return bool(text) and "\0" not in text and all(len(os.fsencode(part)) <= 255 for part in Path(text).parts)


_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that comes with tunekit."""

    name: str
    """Path below the recipe folder, without the suffix: `sft/quickstart`."""

    description: str
    """The first comment line of the file."""

    path: Path
    """Path of the file."""

    method: str = ""
    """Its `method.type`."""

    gpu_gb: int | None = None
    """Memory in GB of the smallest GPU on which it fits alone, of those in `GPU_SIZES`; None: of none of them. 0: it is
    made for a CPU. Predicted by the planner."""

    @property
    def memory(self) -> str:
        """Its `gpu_gb` in words: `CPU`, `24 GB`, or `> 141 GB`."""
        if self.gpu_gb is None:
            return f"> {GPU_SIZES[-1]} GB"
        return f"{self.gpu_gb} GB" if self.gpu_gb else "CPU"


GPU_SIZES = (8, 12, 16, 24, 32, 48, 80, 141)
"""Memory in GB of the GPUs that shipped recipes are planned for."""

PLANNED = "memory.json"
"""Method and memory of each shipped recipe, in their folder. `python -m tests.planner.golden` writes it."""


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
    planned = json.loads((root / PLANNED).read_text(encoding="utf-8"))
    names = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
    return [ShippedRecipe(name, _description(path), path, **planned.get(name, {})) for name, path in names.items()]


def recipe_table() -> str:
    """The shipped recipes as a table in Markdown, with links from their folder; it stands in `recipes/README.md`."""
    lines = ["| recipe | what it does | fits on |", "|:--|:--|--:|"]
    for recipe in list_recipes():
        lines.append(f"| [{recipe.name}]({recipe.name}.yaml) | {recipe.description} | {recipe.memory} |")
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
    raise RecipeError(f"{name}: no shipped recipe has this name", hint=f"did you mean {near}? {hint}" if near else hint)


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
        raise RecipeError(f"{target}: already exists", hint="pass another file to copy to")
    if not target.parent.is_dir():
        raise RecipeError(f"{target}: folder {target.parent} does not exist", hint="create it first")
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise RecipeError(f"{target}: cannot write the file: {error.strerror}") from error
    return target


def list_examples() -> list[str]:
    """The files of shipped example data by name; `example:NAME` stands for one in a recipe."""
    return sorted(path.name for path in example_root().iterdir() if path.is_file() and path.suffix != ".py")


SHIPPED_MODELS = {name: Path(__file__).parent / "models" / name.replace("-", "_") for name in ("pico", "pico-vision")}
"""Folders of the models that ship with tunekit, by the names that stand for them as `model.path`."""

SHIPPED_MODEL_NAMES = tuple(SHIPPED_MODELS)
"""Names of the models that ship with tunekit."""


def find_example(name: str) -> Path:
    """The file of a shipped example dataset, for data paths such as `example:pirate.jsonl`.

    Raises:
        DataError: There is none of that name.
    """
    names = list_examples()
    if name in names:
        return example_root() / name
    near = near_names(name, names)
    problem = f"example:{name}: no such example file"
    raise DataError(problem, hint=f"did you mean {near}?" if near else f"available: {', '.join(names)}")


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
