"""Files that somebody else may have made: opened only where they are files, and read only where they are small.

A FIFO in the place of a file would be waited for without end, and a device or a huge file would fill the memory.
"""

import errno
import json
import os
import stat
import unicodedata
from pathlib import Path
from typing import Any, BinaryIO

import yaml

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


def read_table(path: Path) -> Any:
    """Return the data of a YAML file that comes with tunekit."""
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    return yaml.load(path.read_text(encoding="utf-8"), loader)


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a path leads into a folder, after resolving links."""
    try:
        return path.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def has_controls(text: str) -> bool:
    """Return whether a text holds control characters or line separators."""
    return any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in text)


def is_name(text: str) -> bool:
    """Return whether a text can be a file's path: file systems take no NUL and no part of more than 255 bytes."""
    return bool(text) and "\0" not in text and all(len(os.fsencode(part)) <= 255 for part in Path(text).parts)
