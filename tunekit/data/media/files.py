"""Files of media that rows name or hold, found and kept before training, and read again in it.

A picture or an audio clip is a file beside the data, a data URL, or bytes as columns of media hold them. A row holds
the digest of its file: a run reads the file that was looked at, or says that it changed. Bytes are written to the cache
once, so that every medium is a file.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote_to_bytes

from tunekit.data.formats.row_formats import BadRow, described, shortened
from tunekit.data.sources.rows import cache_folder, is_url
from tunekit.errors import DataError

MAX_FILE_BYTES = 256 * 2**20
"""Bytes of the largest file that is read."""

_Looked = TypeVar("_Looked")

Look = Callable[[bytes, str, str], _Looked]
"""Looks at the bytes of a medium, under the name that messages have for it, and at its path."""


def find_file(
    value: object, where: str, folder: Path | None, store: Path | None, look: Look[_Looked], *, noun: str, example: str
) -> _Looked:
    """Find a medium, and look at it.

    Args:
        value: A path, a data URL, or `{path, bytes}` as columns of media hold them.
        where: Its place in the row, for messages.
        folder: Folder that paths start from and stay in; None where the rows are not from a local file.
        store: Folder for data URLs, beside which nothing is read then; None for the cache.
        look: Looks at its bytes.
        noun: Its kind, for messages.
        example: A data URL of the kind, cut short.

    Raises:
        BadRow: There is no such file, it is too large, or lies outside the folder.
    """

    def of_bytes(raw: bytes) -> _Looked:
        return _from_bytes(raw, where, store or cache_folder() / f"{noun}s".replace(" ", "-"), look, noun)

    if isinstance(value, Mapping):
        raw = value.get("bytes")
        if isinstance(raw, bytes):
            return of_bytes(raw)
        value = value.get("path") or value.get("url")
    if isinstance(value, bytes):
        return of_bytes(value)
    if not isinstance(value, str) or not value:
        raise BadRow(f"{where} must be a path, a data URL or {a(noun)}, got {described(value)}")
    if value.startswith("data:"):
        return of_bytes(_decoded(value, where))
    if store is not None:
        raise BadRow(f"{where}: '{shortened(value)}' is not a data URL; send the {noun} as {example}")
    name = value.removeprefix("file://")
    if is_url(name):
        raise BadRow(f"{where}: '{shortened(name)}' is a URL; download the {noun} and name its file")
    return _from_file(name, where, folder, look, noun)


def read_file(path: str, digest: str, noun: str) -> bytes:
    """Return the bytes of a medium that was looked at.

    Args:
        path: Its file.
        digest: SHA-256 that it had.
        noun: Its kind, for messages.

    Raises:
        DataError: It cannot be read, or changed.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        problem = f"{path}: cannot read the {noun}: {error.strerror}"
        raise DataError(problem, hint="restore the file") from error
    if hashlib.sha256(raw).hexdigest() != digest:
        raise DataError(
            f"{path}: the {noun} changed since the rows were prepared",
            hint="restore it, or start a new run with the current rows",
        )
    return raw


def a(noun: str) -> str:
    """Return a noun with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def own_name(path: str, digest: str) -> str:
    """Return the name of the file of a medium; empty if it stood in the row."""
    name = Path(path).name
    return "" if name == digest else name


def _from_file(name: str, where: str, folder: Path | None, look: Look[_Looked], noun: str) -> _Looked:
    if folder is None:
        problem = f"{where}: '{shortened(name)}' is a path, but the rows come from another machine"
        raise BadRow(f"{problem}; download the {noun}s and set data.image_folder, or put them into the rows as bytes")
    root = Path(os.path.realpath(folder))
    path = Path(os.path.realpath(root / Path(name).expanduser()))
    if not path.is_relative_to(root):
        raise BadRow(f"{where}: '{shortened(name)}' is outside of {root}; set data.image_folder to a folder around it")
    if not path.exists():
        raise BadRow(f"{where}: no {noun} '{shortened(name)}' in {root}")
    if not path.is_file():
        raise BadRow(f"{where}: '{shortened(name)}' is not a regular file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise BadRow(f"{where}: '{shortened(name)}' is larger than {MAX_FILE_BYTES // 2**20} MiB")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadRow(f"{where}: cannot read '{shortened(name)}': {error.strerror}") from None
    return look(raw, f"{where}: '{shortened(name)}'", str(path))


def _from_bytes(raw: bytes, where: str, store: Path, look: Look[_Looked], noun: str) -> _Looked:
    """A medium that stands in the row; its bytes go to a folder by their digest."""
    digest = hashlib.sha256(raw).hexdigest()
    path = store / digest[:2] / digest
    medium = look(raw, where, str(path))
    if not path.is_file() or path.stat().st_size != len(raw):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{digest}-{os.getpid()}")
            draft.write_bytes(raw)
            draft.replace(path)
        except OSError as error:
            problem = f"cannot store {noun}s in {path.parent}: {error.strerror}"
            raise DataError(problem, hint="free some space, or set XDG_CACHE_HOME") from error
    return medium


def _decoded(url: str, where: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise BadRow(f"{where} is a data URL without a comma")
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error:
        raise BadRow(f"{where} is a data URL without base64 encoding") from None
