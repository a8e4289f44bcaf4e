"""Kinds of media that rows may have: how each is marked in texts, named in rows, found and looked at.

A row's texts have a mark where each medium stands, and its column `__media__` has them in this order, of all kinds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tunekit.data.formats.row_formats import Row, counted
from tunekit.data.media.clips import CLIP_SUFFIXES, Clip, look_at_clip, read_clip
from tunekit.data.media.files import Look, find_file
from tunekit.data.media.pictures import PICTURE_SUFFIXES, Picture, look_at_picture, read_picture
from tunekit.data.media.videos import VIDEO_SUFFIXES, Video, blank_frames, look_at_video, read_frames
from tunekit.probe.processors import sample_rate_of
from tunekit.recipe.sections.data import MediaKind

Medium = Picture | Clip | Video


@dataclass(frozen=True)
class Kind:
    """A kind of media.

    Attributes:
        mark: Stands for a medium in a text: a character that texts do not have.
        written: Mark in datasets that have a column of media.
        columns: Names of such a column.
        parts: Types of parts of a content, which are keys of parts without a type too.
        values: Keys by which a part has its medium, besides those of all kinds.
        noun: Name in messages.
        title: Name of all of them in reports.
        example: A data URL, cut short.
        look: Looks at the bytes of one.
    """

    mark: str
    written: str
    columns: tuple[str, ...]
    parts: tuple[str, ...]
    values: tuple[str, ...]
    noun: str
    title: str
    example: str
    look: Look[Medium]


KINDS: dict[MediaKind, Kind] = {
    "image": Kind(
        # Unicode's OBJECT REPLACEMENT CHARACTER.
        mark="\ufffc",
        written="<image>",
        columns=("images", "image"),
        parts=("image", "image_url"),
        values=("image", "image_url"),
        noun="image",
        title="pictures",
        example="data:image/png;base64,...",
        look=look_at_picture,
    ),
    "audio": Kind(
        # INTERLINEAR ANNOTATION TERMINATOR, beside it.
        mark="\ufffb",
        written="<audio>",
        columns=("audios", "audio"),
        parts=("audio", "audio_url", "input_audio"),
        values=("audio", "audio_url", "input_audio"),
        noun="audio clip",
        title="audio",
        example="data:audio/wav;base64,...",
        look=look_at_clip,
    ),
    "video": Kind(
        # INTERLINEAR ANNOTATION SEPARATOR, before both.
        mark="\ufffa",
        written="<video>",
        columns=("videos", "video"),
        parts=("video", "video_url"),
        values=("video", "video_url"),
        noun="video",
        title="videos",
        example="data:video/mp4;base64,...",
        look=look_at_video,
    ),
}

_CLASSES: dict[MediaKind, type[Medium]] = {"image": Picture, "audio": Clip, "video": Video}

COLUMN = "__media__"
"""Column of the media of a row, which no file has."""

MARKS: dict[str, MediaKind] = {kind.mark: name for name, kind in KINDS.items()}
"""Kinds by their marks."""


MEDIA_SUFFIXES = (*PICTURE_SUFFIXES, *CLIP_SUFFIXES, *VIDEO_SUFFIXES)
"""Suffixes of files of media, of all kinds."""

MEDIA_COLUMNS = tuple(column for kind in KINDS.values() for column in kind.columns)
"""Names of columns of media, of all kinds."""


def counts_of(num_media: Mapping[MediaKind, int]) -> str:
    """Return numbers of media in words, such as `7 images`."""
    return ", ".join(counted(num_media[kind], KINDS[kind].noun) for kind in KINDS if num_media.get(kind))


def nouns_of(kinds: Iterable[MediaKind]) -> str:
    """Return the names of kinds in the plural, such as `images`."""
    present = set(kinds)
    return " and ".join(f"{kind.noun}s" for name, kind in KINDS.items() if name in present)


def kinds_in(rows: Iterable[Row]) -> tuple[MediaKind, ...]:
    """Return the kinds of media that some rows have."""
    present = {medium["kind"] for row in rows for medium in row.get(COLUMN) or ()}
    return tuple(kind for kind in KINDS if kind in present)


def medium_of(value: Mapping[str, Any]) -> Medium:
    """Return a medium that a row holds."""
    return _CLASSES[value["kind"]].of_row(value)


def media_of(row: Row) -> list[Medium]:
    """Return the media of a row, in the order of their marks."""
    return [medium_of(value) for value in row.get(COLUMN) or ()]


def num_values_in(features: Mapping[str, Any]) -> int:
    """Return the number of values of pixels, of pictures and videos, among what a processor makes of media."""
    return sum(features[name].numel() for name in ("pixel_values", "pixel_values_videos") if name in features)


def pictures_in(row: Row) -> list[Picture]:
    """Return the pictures of a row, in the order of their marks."""
    return [medium for medium in media_of(row) if isinstance(medium, Picture)]


def read_medium(medium: Medium, processor: Any) -> Any:
    """Read a medium as a processor takes it: a PIL image, samples `(samples,)` at its sample rate, or, of a video, a
    function that returns frames by their numbers.

    Args:
        medium: The medium.
        processor: The processor.

    Raises:
        DataError: It is not the one that was looked at, or cannot be decoded.
    """
    if isinstance(medium, Video):
        return partial(read_frames, medium)
    return read_clip(medium, sample_rate_of(processor)) if isinstance(medium, Clip) else read_picture(medium)


def blank_medium(medium: Medium, processor: Any) -> Any:
    """Return a medium of the size of another one, without content."""
    if isinstance(medium, Clip):
        import numpy as np

        return np.zeros(medium.num_samples(sample_rate_of(processor)), dtype=np.float32)
    if isinstance(medium, Video):
        return partial(blank_frames, medium)
    from PIL import Image

    return Image.new("RGB", medium.size)


def find_medium(kind: MediaKind, value: object, where: str, folder: Path | None, store: Path | None = None) -> Medium:
    """Find and check a medium.

    Args:
        kind: Its kind.
        value: A path, a data URL, or `{path, bytes}` as columns of media hold them.
        where: Its place in the row, for messages.
        folder: Folder that paths start from and stay in; None where the rows are not from a local file.
        store: Folder for data URLs, beside which nothing is read then; None for the cache.

    Raises:
        BadRow: There is no such medium, it is damaged or too large, or lies outside the folder.
    """
    of = KINDS[kind]
    return find_file(value, where, folder, store, of.look, noun=of.noun, example=of.example)
