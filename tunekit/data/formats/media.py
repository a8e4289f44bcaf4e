"""Rows with images, video or audio, which are not trained on: they are told, and refused.

Without its image a row still reads as text, with `<image>` standing in it as seven letters, and a model would learn to
talk of what it never saw. A medium stands in a column of its own, in a key of a message, or among the parts of its
content. A text that merely talks of `<image>`, as code does, has no such column and is a text like any other.
"""

from collections.abc import Mapping
from functools import lru_cache
from re import findall

from tunekit.data.formats.row_formats import BadRow, Row, shortened

_COLUMNS = {
    **dict.fromkeys(("image", "images", "img", "imgs", "pixel_values"), "image"),
    **dict.fromkeys(("video", "videos", "pixel_values_videos"), "video"),
    **dict.fromkeys(("audio", "audios", "input_features"), "audio"),
}
"""Columns and keys of messages that hold media, with the kind of each."""

_PLURALS = {"image": "images", "video": "videos", "audio": "audio"}


class HoldsMediaError(BadRow):
    """A row with an image, a video or audio; where one is, there are mostly more."""


def check_no_media(row: Mapping[str, object]) -> None:
    """Check that a row is text alone.

    Raises:
        HoldsMediaError: It is not.
    """
    for column, content in row.items():
        kind = media_kind(column)
        if kind is None or content is None:
            continue
        if column.lower() in _COLUMNS and _holds_something(content):
            raise _refusal(
                f"the column {shortened(column)} holds {_PLURALS[kind]}",
                "take the column out to train on the text alone",
            )
        if any(_says(value, f"<{kind}>") for name, value in row.items() if name != column):
            raise _refusal(
                f"<{kind}> stands in the text for what the column {shortened(column)} names",
                "take both out to train on the text alone",
            )


def check_no_media_keys(message: Row, where: str) -> None:
    """Check that a message has no key that holds media.

    Raises:
        HoldsMediaError: It has one.
    """
    for key, content in message.items():
        if key.lower() in _COLUMNS and _holds_something(content):
            kind = _PLURALS[_COLUMNS[key.lower()]]
            raise _refusal(f"{where}.{shortened(key)} holds {kind}", "take the key out to train on the text alone")


def check_no_media_parts(parts: list[object], where: str) -> None:
    """Check that no part of a message's content is an image, a video or audio.

    Args:
        parts: The content, as OpenAI and transformers write it: [{type: image_url, ...}, {type: text, ...}].
        where: Its place in the row.

    Raises:
        HoldsMediaError: One is.
    """
    for i, part in enumerate(parts):
        if not isinstance(part, dict):
            continue
        names = [part["type"]] if isinstance(part.get("type"), str) else list(part)
        kind = next((kind for name in names if isinstance(name, str) and (kind := media_kind(name))), None)
        if kind is not None:
            raise _refusal(
                f"{where}[{i}] is of type {kind}", "write the content as a string to train on the text alone"
            )


@lru_cache(maxsize=4096)
def media_kind(name: str) -> str | None:
    """The medium that a column, a key or a part is named after: `image` for `image_url`; None for most."""
    lowered = name[:200].lower()
    words = findall("[a-z]+", lowered)
    return _COLUMNS.get(lowered) or next((_COLUMNS[word] for word in words if word in _COLUMNS), None)


def _refusal(what: str, remedy: str) -> HoldsMediaError:
    return HoldsMediaError(f"{what}, and only text is trained on; {remedy}")


def _holds_something(held: object) -> bool:
    """Return whether a value could be a medium: not empty, neither a number nor a flag."""
    if isinstance(held, bool | int | float):
        return False
    return any(item is not None for item in held) if isinstance(held, list) else bool(held)


def _says(value: object, placeholder: str) -> bool:
    """Return whether a placeholder occurs in the texts of a value."""
    if isinstance(value, str):
        return placeholder in value
    if isinstance(value, dict):
        return any(_says(text_item, placeholder) for text_item in value.values())
    return isinstance(value, list) and any(_says(item, placeholder) for item in value)
