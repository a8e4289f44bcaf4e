"""The code that comes with a model: at which commit it is, and whether it is still what it was.

transformers runs it where `trust_remote_code` allows that. On the hub it can change under a name, so it must be named
by its commit; in a folder its files are remembered by what is in them.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tunekit.errors import ModelError
from tunekit.recipe.sections.model import ModelSection

COMMIT = re.compile(r"[0-9a-f]{40}")
"""A commit of the hub in full."""

_NAMING = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json")
"""Files that name classes of a model's own."""


def is_folder(section: ModelSection) -> bool:
    """Return whether a model is a local folder, or should be by its name, rather than one of the hub."""
    path = section.path
    return path == "pico" or Path(path).is_dir() or path.startswith((".", "/", "~")) or path.count("/") > 1


def code_of(section: ModelSection) -> dict[str, str]:
    """The code that may be run of a model's folder: SHA-256 of each file by its path there.

    Raises:
        ModelError: A part of the code lies in another repository, of which nobody knows the commit.
    """
    folder = Path(section.path)
    if not section.trust_remote_code or not folder.is_dir():
        return {}
    refuse_others_code(folder, section.path)
    files = sorted(folder.rglob("*.py"))
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def refuse_others_code(folder: Path, path: str) -> None:
    """Refuse a model that runs code of which the commit is not the model's.

    Args:
        folder: Its small files.
        path: What the recipe calls it.

    Raises:
        ModelError: It does.
    """
    for name in _NAMING:
        if (folder / name).is_file():
            _check_classes(json.loads((folder / name).read_text(encoding="utf-8")).get("auto_map"), path)


def _check_classes(classes: Any, path: str) -> None:
    named = classes.values() if isinstance(classes, dict) else [classes]
    for name in (class_name for item in named for class_name in (item if isinstance(item, list) else [item])):
        if isinstance(name, str) and "--" in name:
            raise ModelError(
                f"model.path: {path!r} runs code of another repository, {name.partition('--')[0]}, at no commit",
                hint="copy that code beside the model, and name it in auto_map without the repository",
            )


def check_code(section: ModelSection, known: dict[str, str]) -> None:
    """See that the code of a model's folder is what it was when a run was made.

    Raises:
        ModelError: A file is another, is gone, or is new. It is named.
    """
    code = code_of(section)
    changed = sorted(name for name in {*known, *code} if known.get(name) != code.get(name))
    if changed:
        raise ModelError(
            f"{Path(section.path) / changed[0]}: the code that comes with the model changed since the run was made",
            hint="read it; a new run takes it as it is: tunekit train",
        )
