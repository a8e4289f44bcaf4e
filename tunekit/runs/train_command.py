"""The command that trains a run's recipe from its beginning, where there is no checkpoint to go on from."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from tunekit.errors import TunekitError
from tunekit.recipe.load import reload_recipe


def command_anew(folder: Path, changes: Sequence[str] = (), *, in_place: bool = False) -> str:
    """Return the command, ready to be pasted into a shell.

    Args:
        folder: The run's folder.
        changes: Changes of its recipe, each as `key=value`.
        in_place: Whether the run has saved nothing and may begin again in the folder that its recipe names.
    """
    file = folder / "recipe.yaml"
    words = ["tunekit", "train", str(file)]
    if _names_folder(file):
        words.append("--resume" if in_place and not changes else "output.dir=null")
    return shlex.join([*words, *changes])


def _names_folder(recipe: Path) -> bool:
    """Return whether a recipe names the folder of its run; also where it cannot be read."""
    try:
        return reload_recipe(recipe).output.dir is not None
    except TunekitError:
        return True
