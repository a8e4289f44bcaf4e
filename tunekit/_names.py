"""Public names, loaded when they are first used, so that importing tunekit costs nothing.

A stub (`.pyi`) lists them with the modules that they are in, once for type checkers and for this.
"""

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def homes_of(module_file: str) -> dict[str, str]:
    """Return the modules of the names that the stub of a module lists."""
    stub = Path(module_file).with_suffix(".pyi").read_text(encoding="utf-8")
    return {name: home for home, name in re.findall(r"^from (\S+\.\S+) import (\w+)", stub, re.MULTILINE)}


def loaded(module: str, name: str, homes: Mapping[str, str]) -> Any:
    """Return the object of a public name.

    Raises:
        AttributeError: The module has no such name.
    """
    if name in homes:
        return getattr(import_module(homes[name]), name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
