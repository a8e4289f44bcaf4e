"""Thumbnails of pictures of sample prompts, in the run folder.

An event names pictures by their digests alone, so that whoever edits the file of events can show nothing but thumbnails
of the run folder.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunekit.files import is_inside, read_regular

MAX_PICTURES = 4
"""Pictures of a prompt that are shown, the first ones."""

MAX_SHOWN = 64
"""Thumbnails on a page."""

MAX_BYTES = 2**17
"""Bytes of a thumbnail; a JPEG of 160 by 160 pixels has fewer."""

_DIGEST = re.compile("[0-9a-f]{64}")
_JPEG = b"\xff\xd8\xff"


def thumbnail_file(run: Path, digest: str) -> Path:
    """Return the file of a thumbnail.

    Args:
        run: Folder of the run.
        digest: SHA-256 of the picture's file.
    """
    return run / "data" / "thumbnails" / f"{digest}.jpg"


def digests_of(event: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the digests of the pictures that an event names; what is none is left out."""
    values = event.get("pictures")
    digests = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
    return tuple(digest for digest in digests if _DIGEST.fullmatch(digest))[:MAX_PICTURES]


def thumbnails(run: Path, digests: Iterable[str]) -> dict[str, str]:
    """Return thumbnails as data URLs by the digests of their pictures: those of the run folder, the first ones.

    Args:
        run: Folder of the run.
        digests: Digests as events name them.
    """
    urls: dict[str, str] = {}
    for digest in dict.fromkeys(digests):
        if len(urls) == MAX_SHOWN:
            break
        file = thumbnail_file(run, digest)
        if not _DIGEST.fullmatch(digest) or not is_inside(file, run):
            continue
        try:
            content = read_regular(file, MAX_BYTES)
        except OSError:
            continue
        if content.startswith(_JPEG):
            urls[digest] = "data:image/jpeg;base64," + base64.b64encode(content).decode()
    return urls
