"""Pictures that rows name or hold, checked by their headers before training.

A picture is a file beside the data, a data URL, or bytes as columns of images hold them. Its size comes from its
header, and a row holds the digest of its file: a run reads the picture that was looked at, or says that it changed.
Bytes are written to the cache once, so that every picture is a file.
"""

import base64
import binascii
import hashlib
import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from tunekit.data.formats.row_formats import BadRow, described, shortened
from tunekit.data.sources.rows import cache_folder, is_url
from tunekit.errors import DataError

MAX_PIXELS = 100_000_000
"""Pixels of the largest picture that is opened, 10,000 x 10,000: processors shrink all of them to a few million."""

MAX_FILE_BYTES = 256 * 2**20
"""Bytes of the largest file that is read."""

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""Suffixes of files of pictures."""

THUMBNAIL_PIXELS = 160
"""Longest side of a thumbnail."""

_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)
"""EXIF's tag of the orientation, and its values that exchange width and height."""


@dataclass(frozen=True)
class Picture:
    """A picture that was looked at.

    Attributes:
        path: Its file.
        width: Its width as it is shown, in pixels.
        height: Its height.
        digest: SHA-256 of the file.
    """

    path: str
    width: int
    height: int
    digest: str

    def to_row(self) -> dict[str, Any]:
        """Return it as a row holds it."""
        return {"path": self.path, "size": [self.width, self.height], "digest": self.digest}

    @property
    def name(self) -> str:
        """The name of its file; empty if the picture stood in the row."""
        name = Path(self.path).name
        return "" if name == self.digest else name

    @classmethod
    def of_row(cls, value: Mapping[str, Any]) -> "Picture":
        """Return the picture that a row holds."""
        width, height = value["size"]
        return cls(value["path"], width, height, value["digest"])


def pictures_of(row: Mapping[str, Any]) -> list[Picture]:
    """Return the pictures of a row, in the order of their marks."""
    return [Picture.of_row(value) for value in row.get("images") or ()]


def find_picture(value: object, where: str, folder: Path | None, store: Path | None = None) -> Picture:
    """Find and check a picture.

    Args:
        value: A path, a data URL, or `{path, bytes}` as columns of images hold them.
        where: Its place in the row, for messages.
        folder: Folder that paths start from and stay in; None where the rows are not from a local file.
        store: Folder for data URLs, beside which nothing is read then; None for the cache.

    Raises:
        BadRow: There is no such picture, it is damaged, animated or too large, or lies outside the folder.
    """
    if isinstance(value, Mapping):
        raw = value.get("bytes")
        if isinstance(raw, bytes):
            return _from_bytes(raw, where, store)
        value = value.get("path") or value.get("url")
    if isinstance(value, bytes):
        return _from_bytes(value, where, store)
    if not isinstance(value, str) or not value:
        raise BadRow(f"{where} must be a path, a data URL or an image, got {described(value)}")
    if value.startswith("data:"):
        return _from_bytes(_decoded(value, where), where, store)
    if store is not None:
        raise BadRow(f"{where}: '{shortened(value)}' is not a data URL; send the image as data:image/png;base64,...")
    name = value.removeprefix("file://")
    if is_url(name):
        raise BadRow(f"{where}: '{shortened(name)}' is a URL; download the image and name its file")
    return _from_file(name, where, folder)


def read_picture(picture: Picture) -> Any:
    """Read the pixels of a picture: a PIL image, upright, in RGB.

    Raises:
        DataError: It is not the one that was looked at, or cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        raw = Path(picture.path).read_bytes()
    except OSError as error:
        problem = f"{picture.path}: cannot read the image: {error.strerror}"
        raise DataError(problem, hint="restore the file") from error
    if hashlib.sha256(raw).hexdigest() != picture.digest:
        raise DataError(
            f"{picture.path}: the image changed since the rows were prepared",
            hint="restore it, or start a new run with the current rows",
        )
    try:
        image = Image.open(io.BytesIO(raw))
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{picture.path}: the image is damaged: {error}", hint="replace it") from error


def small_copy(picture: Picture) -> bytes:
    """Return a small copy of a picture, a JPEG.

    Raises:
        DataError: It is not the one that was looked at, or cannot be decoded.
    """
    small, file = read_picture(picture), io.BytesIO()
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    small.save(file, "JPEG", quality=80)
    return file.getvalue()


def thumbnail(picture: Picture) -> str:
    """Return a small copy of a picture as a data URL.

    Raises:
        DataError: As for `small_copy`.
    """
    return "data:image/jpeg;base64," + base64.b64encode(small_copy(picture)).decode()


def _from_file(name: str, where: str, folder: Path | None) -> Picture:
    if folder is None:
        problem = f"{where}: '{shortened(name)}' is a path, but the rows come from another machine"
        raise BadRow(f"{problem}; download the images and set data.image_folder, or put them into the rows as bytes")
    root = Path(os.path.realpath(folder))
    path = Path(os.path.realpath(root / Path(name).expanduser()))
    if not path.is_relative_to(root):
        raise BadRow(f"{where}: '{shortened(name)}' is outside of {root}; set data.image_folder to a folder around it")
    if not path.exists():
        raise BadRow(f"{where}: no image '{shortened(name)}' in {root}")
    if not path.is_file():
        raise BadRow(f"{where}: '{shortened(name)}' is not a regular file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise BadRow(f"{where}: '{shortened(name)}' is larger than {MAX_FILE_BYTES // 2**20} MiB")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadRow(f"{where}: cannot read '{shortened(name)}': {error.strerror}") from None
    return _looked_at(raw, f"{where}: '{shortened(name)}'", str(path))


def _from_bytes(raw: bytes, where: str, store: Path | None) -> Picture:
    """A picture that stands in the row; its bytes go to a folder, or the cache, by their digest."""
    digest = hashlib.sha256(raw).hexdigest()
    path = (store or cache_folder() / "images") / digest[:2] / digest
    picture = _looked_at(raw, where, str(path))
    if not path.is_file() or path.stat().st_size != len(raw):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{digest}-{os.getpid()}")
            draft.write_bytes(raw)
            draft.replace(path)
        except OSError as error:
            problem = f"cannot store images in {path.parent}: {error.strerror}"
            raise DataError(problem, hint="free some space, or set XDG_CACHE_HOME") from error
    return picture


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


def _looked_at(raw: bytes, what: str, path: str) -> Picture:
    """The picture of some bytes, by its header; what follows is checked as far as that costs no decoding."""
    from PIL import Image, UnidentifiedImageError

    if not raw:
        raise BadRow(f"{what} is empty")
    try:
        with warnings.catch_warnings():
            # Of its own limit of pixels; ours is lower.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(raw))
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadRow(f"{what} has {width:,} x {height:,} pixels, more than {MAX_PIXELS:,}; shrink it")
            if getattr(image, "n_frames", 1) > 1:
                raise BadRow(f"{what} is animated; save one of its frames as an image")
            sideways = image.getexif().get(_ORIENTATION) in _SIDEWAYS
            is_cut = image.format == "JPEG" and not raw.rstrip(b"\0").endswith(b"\xff\xd9")
            # Only of an image that nothing was asked of yet.
            Image.open(io.BytesIO(raw)).verify()
    except UnidentifiedImageError:
        raise BadRow(f"{what} is not an image that can be read (JPEG, PNG, WebP, GIF, BMP, TIFF)") from None
    except Image.DecompressionBombError:
        raise BadRow(f"{what} has more than {MAX_PIXELS:,} pixels; shrink it") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise BadRow(f"{what} is damaged: {error}") from None
    if is_cut:
        raise BadRow(f"{what} is damaged: the file ends within the image")
    if min(width, height) < 1:
        raise BadRow(f"{what} has no pixels")
    return Picture(path, *((height, width) if sideways else (width, height)), hashlib.sha256(raw).hexdigest())
