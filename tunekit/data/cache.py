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
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from tunekit.data.pack import pack
from tunekit.data.rows import Rows
from tunekit.data.tokenize import LossOn, Tokenised, TokenReport, tokenize
from tunekit.errors import DataError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

ACCOUNT = "tunekit.json"
"""File of an entry that says what is in it; written last."""

ROWS = "rows"
"""Folder of an entry's sequences, in the form of `Dataset.save_to_disk`."""

LIBRARIES = ("datasets", "jinja2", "tokenizers", "transformers", "trl")
"""Packages whose version can change how rows become tokens."""


def cache_root() -> Path:
    """Folder of all entries: `tunekit/data` in the user's cache folder (XDG_CACHE_HOME on Linux)."""
    return platformdirs.user_cache_path("tunekit") / "data"


@dataclass(frozen=True)
class Entry:
    """One set of prepared rows."""

    path: Path
    source: str
    """The rows' source as the recipe names it."""
    report: TokenReport
    """What became of the rows."""
    num_sequences: int
    """Sequences to train on, packed where the recipe asks for it."""
    size_bytes: int

    def dataset(self) -> "datasets.Dataset":
        """The sequences, memory-mapped."""
        from datasets import load_from_disk

        return load_from_disk(str(self.path / ROWS))

    def link_into(self, folder: Path) -> None:
        """Give a run its own name for the sequences: no second copy, and still there when the cache is cleared."""
        shutil.copytree(self.path / ROWS, folder, copy_function=_link)


def prepare_rows(
    rows: Rows, tokenizer: "PreTrainedTokenizerBase", *, max_length: int, loss_on: LossOn, packing: bool
) -> Entry:
    """The sequences of one source: found in the cache, or tokenised, masked and, where asked for, packed.

    Raises:
        DataError: No token would be trained on, or the rows do not fit the chat template.
    """

    def make() -> Tokenised:
        made = tokenize(rows, tokenizer, max_length=max_length, loss_on=loss_on)
        return replace(made, dataset=pack(made.dataset, max_length)) if packing else made

    key = key_of(rows, tokenizer, max_length=max_length, loss_on=loss_on, packing=packing)
    return cached(key, rows.source, make)


def key_of(rows: Rows, tokenizer: "PreTrainedTokenizerBase", *, max_length: int, loss_on: str, packing: bool) -> str:
    """Name of the entry for these rows, prepared in this way by this code."""
    made_of = {
        "source": rows.source,
        "format": rows.format,
        "rows": _digest_rows(rows),
        "tokenizer": _digest_tokenizer(tokenizer),
        "max_length": max_length,
        "loss_on": loss_on,
        "packing": packing,
        "code": _digest_files(Path(__file__).parent.glob("*.py")),
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:40]


def cached(key: str, source: str, make: Callable[[], Tokenised]) -> Entry:
    """The entry of this name, made first if it is not there yet.

    Args:
        key: Name of the entry, from `key_of`.
        source: Where the rows came from.
        make: Makes the sequences; called only if they are not there.
    """
    place = cache_root() / key
    entry = _read(place)
    if entry is None:
        _store(place, source, make())
        entry = _read(place)
    if entry is None:
        raise DataError(f"the prepared rows cannot be kept in {place}", hint="look at the disk, or set XDG_CACHE_HOME")
    return entry


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
    account: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for name, size in account["files"].items():
        if not (place / name).is_file() or (place / name).stat().st_size != size:
            return None
    report = TokenReport(**{**account["report"], "notes": tuple(account["report"]["notes"])})
    return Entry(place, account["source"], report, account["num_sequences"], sum(account["files"].values()))


def _store(place: Path, source: str, made: Tokenised) -> None:
    """Write an entry beside its place and move it there, unless another writer was faster."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.parent / f".{place.name}-{uuid.uuid4().hex}"
    try:
        made.dataset.save_to_disk(str(draft / ROWS))
        files = {file.relative_to(draft).as_posix(): file.stat().st_size for file in _files(draft)}
        account = {
            "source": source,
            "report": asdict(made.report),
            "num_sequences": len(made.dataset),
            "files": files,
        }
        (draft / ACCOUNT).write_text(json.dumps(account), encoding="utf-8")
        # Whole, another writer's entry is as good; only one that is damaged makes way.
        if place.is_dir() and _read(place) is None:
            shutil.rmtree(place, ignore_errors=True)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _digest_rows(rows: Rows) -> str:
    digest = hashlib.sha256()
    for row in rows.rows:
        digest.update(json.dumps(row, ensure_ascii=False).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _digest_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Digest of all that a tokenizer saves: vocabulary, merges, special tokens and chat template."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return _digest_files(_files(Path(folder)))


def _digest_files(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()


def _link(source: str, target: str) -> None:
    """Give a file a second name, or copy it where it lies on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
