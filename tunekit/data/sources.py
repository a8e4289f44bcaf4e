"""Which files a source names: one, all of a folder, or those that fit a pattern; or none, but a dataset of the hub."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from tunekit.data import hub
from tunekit.data.files import OPENERS, kind_of
from tunekit.data.formats import listed
from tunekit.errors import DataError
from tunekit.recipe.library import find_example
from tunekit.recipe.schema import DataSource

EXAMPLE_PREFIX = "example:"
"""Marks a file that ships with tunekit."""


@dataclass(frozen=True)
class File:
    """A file, and its name in messages."""

    path: Path
    name: str


@dataclass(frozen=True)
class Files:
    """The files of a source: one or more, of one kind, in the order in which they are read."""

    found: tuple[File, ...]
    kind: str
    notes: tuple[str, ...] = ()


def find_files(source: DataSource, *, key: str) -> Files | None:
    """The files that a source names, or None if it names a dataset of the hub.

    Raises:
        DataError: It names a file that is not there, files of several kinds, or a kind of file that is not read.
    """
    name = source.path
    path = Path(name).expanduser()
    if name.startswith(EXAMPLE_PREFIX):
        files = _one(find_example(name.removeprefix(EXAMPLE_PREFIX)), name, key)
    elif path.is_dir():
        files = _in_folder(path, name, key)
    elif not path.exists() and any(sign in name for sign in "*?["):
        files = _fitting(path, name, key)
    elif not _looks_like_file(name) and not path.exists():
        return None
    else:
        files = _one(path, name, key)
    for part, given in (("name", source.name), ("split", source.split), ("revision", source.revision)):
        if given is not None:
            kind = "a file" if files.found[0].name == name else "read from files"
            raise DataError(f"{key}.{part}: only a hub dataset has one, and '{name}' is {kind}", hint="leave it out")
    return files


def _one(path: Path, name: str, key: str) -> Files:
    return Files((File(path, name),), kind=_check_file(path, name, key))


def _in_folder(folder: Path, name: str, key: str) -> Files:
    """All files of a folder that can be read; what lies deeper, or is hidden, is not looked at."""
    inside = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    readable = [path for path in inside if kind_of(path.name) is not None]
    if not readable:
        raise DataError(f"{key}.path: there is no file to read in the folder '{name}'", hint=f"read are {_KINDS}")
    others = [path.name for path in inside if path not in readable]
    notes = (f"{name}: left aside, as no files of rows: {listed(others)}",) if others else ()
    files = [File(path, f"{name.rstrip('/')}/{path.name}") for path in readable]
    return Files(tuple(files), kind=_one_kind(files, f"the folder '{name}' holds", key), notes=notes)


def _fitting(pattern: Path, name: str, key: str) -> Files:
    """All files that fit a pattern."""
    # Path.glob raises for patterns such as a**b, and takes hidden files along.
    found = glob.glob(str(pattern), recursive=True)  # noqa: PTH207
    paths = sorted(path for path in map(Path, found) if not path.is_dir())
    if not paths:
        raise DataError(f"{key}.path: no file fits '{name}'")
    files = [File(path, str(path)) for path in paths]
    return Files(tuple(files), kind=_one_kind(files, f"'{name}' fits", key))


def _one_kind(files: Sequence[File], what: str, key: str) -> str:
    """Check every file, and that all are of one kind."""
    kinds: dict[str, str] = {}
    for file in files:
        kinds.setdefault(_check_file(file.path, file.name, key), file.path.name)
    if len(kinds) > 1:
        raise DataError(
            f"{key}.path: {what} files of several kinds: {listed(kinds.values())}",
            hint=f"choose one kind with a pattern: '*{next(iter(kinds))}'",
        )
    return next(iter(kinds))


def _looks_like_file(name: str) -> bool:
    """Whether a name that is no existing file was meant as one rather than as a dataset of the hub."""
    if kind_of(name) is not None or hub.NAME.fullmatch(name) is None:
        return True
    # A dot in a hub name is common behind its owner (org/v1.5) and unknown without one (chats.xlsx).
    return "/" not in name and "." in name


_KINDS = f"{listed(OPENERS)}; text also as .gz or .zst"


def _check_file(path: Path, name: str, key: str) -> str:
    """The kind of a file that can be read; refuse any other."""
    if not path.exists():
        there = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, there, n=1, cutoff=0.6)
        if not path.parent.is_dir():
            raise DataError(f"{key}.path: no file '{name}'", hint=f"there is no folder '{path.parent}'")
        where = "the working directory" if path.parent == Path() else str(path.parent)
        raise DataError(
            f"{key}.path: no file '{name}' in {where}",
            hint=f"did you mean '{path.with_name(near[0])}'?" if near else None,
        )
    found = kind_of(path.name)
    if found is None:
        kind = f"the suffix '{path.suffix}' is not known" if path.suffix else "the file has no suffix"
        if path.suffix.lower() in (".gz", ".zst"):
            kind = f"only text is read compressed, and the name does not end in .jsonl{path.suffix} or the like"
        raise DataError(f"{key}.path: '{name}': {kind}", hint=f"known are {_KINDS}")
    if not path.is_file():
        raise DataError(f"{key}.path: '{name}' is not a regular file")
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{key}.path: cannot read '{name}': {error.strerror}") from error
    if path.stat().st_size == 0:
        raise DataError(f"{key}.path: '{name}' is empty")
    return found
