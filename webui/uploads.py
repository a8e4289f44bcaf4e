"""Files that browsers send: kept in the workspace, under a name of their own, where they are rows that can be read."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import tunekit
from tunekit import frontend
from webui.archives import rows_among, unpack
from webui.site import Site

FOLDER = "uploads"
"""Folder of uploads."""

_UNUSUAL = re.compile(r"[^\w.\- ]+")


SUFFIXES = (*frontend.DATA_SUFFIXES, ".zip", *frontend.PICTURE_SUFFIXES)
"""Suffixes of files that may be sent."""


def save_uploads(site: Site, paths: Sequence[str | Path]) -> Path:
    """Take files that the server has received into the workspace, and return the rows among them.

    Args:
        site: The workspace.
        paths: Where the server keeps them for now, under the names that they had: a file of rows, a zip of pictures
            with their rows, or pictures and their rows.

    Raises:
        TunekitError: The pages only show, a file is too large or of no use, or there are not one file's rows.
    """
    files = [Path(path) for path in paths]
    if site.read_only:
        raise tunekit.TunekitError("uploads are disabled", hint="start `tunekit ui` without --read-only")
    for file in files:
        _check(site, file)
    is_archive = [file.name.lower().endswith(".zip") for file in files]
    folder = site.inside(FOLDER)
    if len(files) == 1 and is_archive[0]:
        folder.mkdir(exist_ok=True)
        target = _free(folder, _safe(files[0].name)[: -len(".zip")] or "pictures", "")
        try:
            return rows_among(unpack(files[0], target, max_bytes=site.max_upload_bytes), files[0].name)
        except tunekit.TunekitError:
            shutil.rmtree(target, ignore_errors=True)
            raise
    if any(is_archive):
        raise tunekit.TunekitError("a zip file together with other files", hint="upload it alone")
    if len(files) == 1 and not files[0].name.lower().endswith(frontend.PICTURE_SUFFIXES):
        folder.mkdir(exist_ok=True)
        return _save_rows(folder, files[0])
    if len({file.name for file in files}) < len(files):
        raise tunekit.TunekitError("two files have the same name", hint="upload a zip of their folder")
    rows = rows_among(files, files[0].name)
    folder.mkdir(exist_ok=True)
    target = _free(folder, _stem(_safe(rows.name)), "")
    target.mkdir()
    # Rows name their pictures, so these keep their names.
    for file in files:
        shutil.copyfile(file, target / file.name)
    return target / rows.name


def place_of_good_rows(site: Site, path: str) -> Path:
    """Return a new file beside one of the workspace, where what its rows name is found too."""
    file = site.inside(path)
    return _free(file.parent, f"{_stem(file.name)}-good", ".jsonl")


def _check(site: Site, file: Path) -> None:
    if not file.name.lower().endswith(SUFFIXES):
        known_suffixes = ", ".join(SUFFIXES)
        raise tunekit.TunekitError(f"{file.name}: unsupported file type", hint=f"supported: {known_suffixes}")
    size = file.stat().st_size
    if size > site.max_upload_bytes:
        limit = frontend.gib(site.max_upload_bytes)
        raise tunekit.TunekitError(f"{file.name}: {frontend.gib(size)} exceeds the upload limit of {limit}")


def _save_rows(folder: Path, received: Path) -> Path:
    name = _safe(received.name)
    stem = _stem(name)
    target = _free(folder, stem or "rows", name[len(stem) :])
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "wb") as target_file, received.open("rb") as source:
        shutil.copyfileobj(source, target_file)
    return target


def _safe(name: str) -> str:
    return _UNUSUAL.sub("_", name).lstrip(". ")


def _stem(name: str) -> str:
    suffix = next(suffix for suffix in frontend.DATA_SUFFIXES if name.lower().endswith(suffix))
    return name[: -len(suffix)]


def _free(folder: Path, stem: str, ending: str) -> Path:
    """Return a path in a folder that is not there yet."""
    for number in range(1, 1000):
        target = folder / (f"{stem}{ending}" if number == 1 else f"{stem}-{number}{ending}")
        if not target.exists() and not target.is_symlink():
            return target
    raise tunekit.TunekitError(f"{stem}{ending}: too many files of this name in {FOLDER}", hint="rename it")
