"""Pictures, checked by their headers before training, and decoded in it. A picture's size comes from its header."""

import base64
import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tunekit.data.formats.row_formats import BadRow
from tunekit.data.media.files import own_name, read_file
from tunekit.errors import DataError
from tunekit.recipe.sections.data import MediaKind

MAX_PIXELS = 100_000_000
"""Pixels of the largest picture that is opened, 10,000 x 10,000: processors shrink all of them to a few million."""

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

    kind: ClassVar[MediaKind] = "image"
    path: str
    width: int
    height: int
    digest: str

    def to_row(self) -> dict[str, Any]:
        """Return it as a row holds it."""
        return {"kind": self.kind, "path": self.path, "size": [self.width, self.height], "digest": self.digest}

    @property
    def name(self) -> str:
        """The name of its file; empty if the picture stood in the row."""
        return own_name(self.path, self.digest)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, on which its tokens depend."""
        return self.width, self.height

    @property
    def words(self) -> str:
        """The picture in a few words: `image cat.png 640x480`."""
        return " ".join(filter(None, ("image", self.name, f"{self.width}x{self.height}")))

    @classmethod
    def of_row(cls, value: Mapping[str, Any]) -> "Picture":
        """Return the picture that a row holds."""
        width, height = value["size"]
        return cls(value["path"], width, height, value["digest"])


def read_picture(picture: Picture) -> Any:
    """Read the pixels of a picture: a PIL image, upright, in RGB.

    Raises:
        DataError: It is not the one that was looked at, or cannot be decoded.
    """
    from PIL import Image, ImageOps

    raw = read_file(picture.path, picture.digest, "image")
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
    return _small(read_picture(picture))


def _small(image: Any) -> bytes:
    file = io.BytesIO()
    image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    image.save(file, "JPEG", quality=80)
    return file.getvalue()


def thumbnail(picture: Picture) -> str:
    """Return a small copy of a picture as a data URL.

    Raises:
        DataError: As for `small_copy`.
    """
    return thumbnail_of(read_picture(picture))


def thumbnail_of(image: Any) -> str:
    """Return a small copy of a PIL image, which shrinks, as a data URL."""
    return "data:image/jpeg;base64," + base64.b64encode(_small(image)).decode()


def look_at_picture(raw: bytes, what: str, path: str) -> Picture:
    """Return the picture of some bytes, by its header; what follows is checked as far as that costs no decoding.

    Args:
        raw: The bytes.
        what: The picture, for messages.
        path: Its file.

    Raises:
        BadRow: It is damaged, animated or too large.
    """
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
