"""Where a path leads."""

import os
import unicodedata
from pathlib import Path


def is_inside(path: Path, root: Path) -> bool:
    """Whether a path leads into a folder, wherever the links in it point to."""
    try:
        return path.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def has_controls(text: str) -> bool:
    """Whether a text holds characters that end a line, or mean something to a terminal or a script."""
    return any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in text)


def is_name(text: str) -> bool:
    """Whether a text can be the path of a file at all: file systems take no NUL and no part of more than 255 bytes."""
    return bool(text) and "\0" not in text and all(len(os.fsencode(part)) <= 255 for part in Path(text).parts)
