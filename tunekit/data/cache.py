"""Prepared rows, kept once and shared by all runs.

What an entry is made of decides its name: the rows themselves (not their file's name or date), the tokenizer with its
chat template, the settings, the code of the data path and the libraries beneath it. A changed row, template or
setting is another name, so nothing stale is ever found; an entry never changes once it is there.

An entry is written beside its place and moved there whole, so that a reader sees all of it or nothing, and of
several writers at once the first wins. Its account is written last, with the size of every file: what was cut short
by a full disk or a power cut is seen and made again.
"""

import hashlib
import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import platformdirs

from tunekit.data.sources.rows import cache_folder
from tunekit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACCOUNT = "tunekit.json"
"""File of an entry that says what is in it; written last."""

LIBRARIES = ("datasets", "jinja2", "numpy", "pyarrow", "tokenizers", "transformers", "trl")
"""Packages whose version can change how rows become tokens."""

Kind = Literal["tokens", "sequences", "log-probabilities"]
"""Contents of an entry: tokens of one source, rows for a trainer, or log-probabilities of a reference model."""


def cache_root() -> Path:
    """Folder of all entries: `tunekit/data` in the user's cache folder (XDG_CACHE_HOME on Linux)."""
    return platformdirs.user_cache_path("tunekit") / "data"


@dataclass(frozen=True)
class Entry:
    """Something prepared.

    Attributes:
        path: Its folder.
        kind: What it holds.
        source: Where the rows came from, as the recipe names it.
        account: What its maker had to say about it.
        size_bytes: What it takes on the disk.
    """

    path: Path
    kind: Kind
    source: str
    account: Mapping[str, Any]
    size_bytes: int


def key_of(kind: Kind, made_of: Mapping[str, Any]) -> str:
    """Name of the entry that is made of this by this code.

    Args:
        kind: What the entry holds.
        made_of: All that its content depends on, as values that JSON can hold.
    """
    whole = {
        "kind": kind,
        **made_of,
        "code": _digest_files(Path(__file__).parent.rglob("*.py")),
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:40]


def digest_of(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Digest of all that a tokenizer saves: vocabulary, merges, special tokens and chat template."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return _digest_files(_files(Path(folder)))


def cached(key: str, kind: Kind, source: str, make: Callable[[Path], dict[str, Any]]) -> Entry:
    """The entry of this name, made first if it is not there yet.

    Args:
        key: Name of the entry, from `key_of`.
        kind: What it holds.
        source: Where the rows came from.
        make: Fills a folder and returns its account, as values that JSON can hold; called only if it is needed.

    Raises:
        DataError: The cache cannot be written.
    """
    cache_folder()
    place = cache_root() / key
    entry = _read(place)
    if entry is None:
        _store(place, kind, source, make)
        entry = _read(place)
    if entry is None:
        raise DataError(f"the prepared rows cannot be kept in {place}", hint="look at the disk, or set XDG_CACHE_HOME")
    return entry


def found(key: str) -> Entry | None:
    """The entry of this name, if it is there."""
    return _read(cache_root() / key)


def list_entries() -> list[Entry]:
    """All whole entries, the largest first."""
    root = cache_root()
    entries = [_read(place) for place in (root.iterdir() if root.is_dir() else ())]
    return sorted((entry for entry in entries if entry is not None), key=lambda entry: -entry.size_bytes)


def clear() -> int:
    """Remove every entry, and what writers left behind; return the bytes that were freed."""
    root = cache_root()
    freed = sum(file.stat().st_size for file in _files(root))
    shutil.rmtree(root, ignore_errors=True)
    return freed


def _read(place: Path) -> Entry | None:
    """The entry at a place, if it is whole: all its files have the size that it says."""
    file = place / ACCOUNT
    if not file.is_file():
        return None
    manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for name, size in manifest["files"].items():
        if not (place / name).is_file() or (place / name).stat().st_size != size:
            return None
    return Entry(place, manifest["kind"], manifest["source"], manifest["account"], sum(manifest["files"].values()))


def _store(place: Path, kind: Kind, source: str, make: Callable[[Path], dict[str, Any]]) -> None:
    """Write an entry beside its place and move it there, unless another writer was faster."""
    draft = place.parent / f".{place.name}-{uuid.uuid4().hex}"
    try:
        draft.mkdir(parents=True)
        account = make(draft)
        files = {file.relative_to(draft).as_posix(): file.stat().st_size for file in _files(draft)}
        whole = {"kind": kind, "source": source, "account": account, "files": files}
        (draft / ACCOUNT).write_text(json.dumps(whole), encoding="utf-8")
        # Whole, another writer's entry is as good; only one that is damaged makes way.
        if place.is_dir() and _read(place) is None:
            shutil.rmtree(place, ignore_errors=True)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    except OSError as error:
        raise DataError(
            f"the prepared rows cannot be kept in {place.parent}: {error.strerror}",
            hint="free some space (`tunekit data cache` shows what is kept), or set XDG_CACHE_HOME",
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _digest_files(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()
