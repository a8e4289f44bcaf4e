"""Files that browsers send: kept in the workspace, under a name of their own, where they are rows that can be read."""

import os
import re
import shutil
from pathlib import Path

import tunekit
from webui.site import Site

FOLDER = "uploads"
"""Folder of uploads."""

_UNUSUAL = re.compile(r"[^\w.\- ]+")


def save_upload(site: Site, path: str | Path) -> Path:
    """Take a file that the server has received into the workspace, and return where it lies.

    Args:
        site: The workspace.
        path: Where the server keeps it for now, under the name that it had.

    Raises:
        TunekitError: The pages only show, it is too large, or no file of rows.
    """
    received = Path(path)
    if site.read_only:
        raise tunekit.TunekitError("uploads are disabled", hint="start `tunekit ui` without --read-only")
    if not received.name.lower().endswith(tunekit.DATA_SUFFIXES):
        known_suffixes = ", ".join(tunekit.DATA_SUFFIXES)
        raise tunekit.TunekitError(f"{received.name}: unsupported file type", hint=f"supported: {known_suffixes}")
    size = received.stat().st_size
    if size > site.max_upload_bytes:
        limit = tunekit.gib(site.max_upload_bytes)
        raise tunekit.TunekitError(f"{received.name}: {tunekit.gib(size)} exceeds the upload limit of {limit}")
    name = _UNUSUAL.sub("_", received.name).lstrip(". ")
    folder = site.inside(FOLDER)
    folder.mkdir(exist_ok=True)
    suffixes = next(suffix for suffix in tunekit.DATA_SUFFIXES if name.lower().endswith(suffix))
    stem, ending = name[: -len(suffixes)] or "rows", name[-len(suffixes) :]
    for number in range(1, 1000):
        target = folder / (f"{stem}{ending}" if number == 1 else f"{stem}-{number}{ending}")
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "wb") as target_file, received.open("rb") as source:
            shutil.copyfileobj(source, target_file)
        return target
    raise tunekit.TunekitError(f"{name}: too many files of this name in {FOLDER}", hint="rename it")
