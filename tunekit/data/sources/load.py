"""From the data section of a recipe to valid rows.

A source is a local file, several of them (a folder or a pattern), a file that ships with tunekit (`example:NAME`) or
a dataset of the hub; `sources` tells which from its name. Its format is recognised from its columns, every row is
checked, and all that is wrong is told together, each fault with its place. Rows that come out of here can be trained
on.
"""

import glob
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import unquote

from tunekit.data.formats.row_formats import Learner, check_mapping, counted, listed, nearest
from tunekit.data.media.kinds import MEDIA_SUFFIXES
from tunekit.data.media.pictures import PICTURE_SUFFIXES
from tunekit.data.packing.sequences import hold_out
from tunekit.data.sources import hub
from tunekit.data.sources.files import OPENERS, STREAMED, File, LocalFile, Table, kind_of
from tunekit.data.sources.reader import Reader
from tunekit.data.sources.remote import fetch, find_remote
from tunekit.data.sources.rows import Rows, Skipped, is_url, shown
from tunekit.errors import DataError
from tunekit.files import find_example
from tunekit.recipe.sections.data import CompleteSource, DataSection, DataSource

__all__ = ["Files", "LoadedData", "Rows", "find_files", "is_hub_dataset", "load_data", "load_rows", "stream_rows"]

HEAD_ROWS = 1000
"""Rows of a stream that are read before training."""


@dataclass(frozen=True)
class LoadedData:
    """The rows of a recipe.

    Attributes:
        train: Rows to train on, a source after the other; the first rows of each where they are streamed.
        eval: Rows to evaluate on.
        notes: What was found and decided on the way, a sentence each.
    """

    train: tuple[Rows, ...]
    eval: tuple[Rows, ...]
    notes: list[str]

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Bad rows that were left out, as `data.max_bad_rows` allows."""
        # Rows held out of a source carry what was skipped in it a second time.
        return tuple(dict.fromkeys(bad for rows in (*self.train, *self.eval) for bad in rows.skipped))


def load_data(section: DataSection, learner: Learner | None = None) -> LoadedData:
    """Read and check the rows of a recipe.

    Args:
        section: The sources, and how they are read.
        learner: The method that is to learn from them; None takes rows of every format.

    Raises:
        DataError: A source cannot be found or read, a row is not valid, or the method does not learn from such rows.
    """
    if section.streaming:
        train = tuple(_head(source, learner, section.max_bad_rows) for source in section.sources)
    else:
        train = tuple(
            load_rows(source, learner, default_split="train", max_bad_rows=section.max_bad_rows)
            for source in section.sources
        )
    notes = [note for rows in train for note in rows.notes]
    if section.eval_size is not None:
        parted = [hold_out(rows, section.eval_size) for rows in train]
        notes += (
            f"{train_rows.source}: {len(held_out):,} of {counted(len(train_rows) + len(held_out), 'row')} "
            f"held out for evaluation by content hash (data.eval_size={section.eval_size:g}); "
            f"{len(train_rows):,} to train on"
            for train_rows, held_out in parted
        )
        return LoadedData(
            tuple(train_rows for train_rows, _ in parted), tuple(held_out for _, held_out in parted), notes
        )
    evaluated = tuple(
        load_rows(source, learner, default_split="eval", max_bad_rows=section.max_bad_rows)
        for source in section.eval_sources
    )
    notes += (note for rows in evaluated for note in rows.notes)
    return LoadedData(train, evaluated, notes)


def _head(source: CompleteSource, learner: Learner | None, max_bad_rows: int) -> Rows:
    """The first rows of a stream."""
    head = next(stream_rows(source, learner, max_bad_rows=max_bad_rows, num_rows=HEAD_ROWS), None)
    if head is None:
        raise DataError(f"{source.key}: '{shown(source.path)}' has no rows to train on")
    note = f"{head.source}: streamed; only the first rows are shown, the others are read during training"
    return replace(head, notes=(*head.notes, note))


def load_rows(
    source: CompleteSource,
    learner: Learner | None = None,
    *,
    default_split: Literal["train", "eval"],
    max_bad_rows: int = 0,
) -> Rows:
    """Read and check the rows of one source.

    Args:
        source: The source.
        learner: The method that is to learn from them; None takes rows of every format.
        default_split: What is wanted of a hub dataset where the source names no split.
        max_bad_rows: So many bad rows are left out.

    Raises:
        DataError: The source cannot be found or read, or rows are not valid; the message names the first of them.
        RecipeError: There is no such function.
    """
    check_mapping(source.columns)
    files = find_files(source, key=source.key)
    reader = Reader(source, max_bad_rows, learner)
    first = source.max_samples if source.sampling == "first" else None
    for name, table, folder in _tables(source, files, default_split):
        remaining = None if first is None else first - reader.num_held
        deque(islice(reader.read(name, table, folder), remaining), maxlen=0)
        if first is not None and reader.num_held >= first:
            break
    rows = reader.rows(is_text=files is not None and files.kind == ".txt")
    if source.max_samples is not None and source.sampling == "random":
        rows = _sample(rows, source.max_samples)
    return rows if files is None else replace(rows, notes=rows.notes + files.notes)


SAMPLING_SEED = 42
"""Seed of the random samples of rows, the same in every run."""


def _sample(rows: Rows, num_rows: int) -> Rows:
    """Some of the rows at random, in their order; all of them if they are no more."""
    if len(rows) <= num_rows:
        return rows
    chosen = rows.select(sorted(random.Random(SAMPLING_SEED).sample(range(len(rows)), num_rows)))
    return replace(chosen, notes=(*rows.notes, f"{rows.source}: {num_rows:,} of {len(rows):,} rows, a random sample"))


def stream_rows(
    source: CompleteSource, learner: Learner | None = None, *, max_bad_rows: int, num_rows: int
) -> Iterator[Rows]:
    """The rows of one source in batches, read as they come and kept nowhere.

    Args:
        source: The source.
        learner: The method that is to learn from them; None takes rows of every format.
        max_bad_rows: So many bad rows are left out; each batch has those so far.
        num_rows: Rows of a batch.

    Raises:
        DataError: The source cannot be found or read on, or rows are not valid.
    """
    check_mapping(source.columns)
    reader = Reader(source, max_bad_rows, learner)
    files = find_files(source, key=source.key, streaming=True)
    num_taken = 0
    for name, table, folder in _tables(source, files, "train", streaming=True):
        remaining = None if source.max_samples is None else source.max_samples - num_taken
        for _ in islice(reader.read(name, table, folder), remaining):
            num_taken += 1
            if reader.num_held == num_rows:
                yield reader.take()
        remainder = reader.take()
        if len(remainder):
            yield remainder
        if num_taken == source.max_samples:
            return


def _tables(
    source: CompleteSource, files: "Files | None", default_split: Literal["train", "eval"], *, streaming: bool = False
) -> Iterator[tuple[str, Table, Path | None]]:
    """The name and the rows of each file of a source, or of a dataset of the hub, and the folder of its pictures."""
    if files is None:
        table = hub.open_hub(source, key=source.key, default_split=default_split, streaming=streaming)
        yield source.path, table, image_folder(source)
        return
    for file in files.found:
        yield file.name, OPENERS[files.kind](file), image_folder(source, file)


def image_folder(source: CompleteSource, file: File | None = None) -> Path | None:
    """Return the folder that paths of pictures start from; None where the rows come from another machine.

    Args:
        source: The source.
        file: One of its files; None for a dataset of the hub.

    Raises:
        DataError: The recipe names a folder that is not there.
    """
    if source.image_folder is not None:
        folder = Path(source.image_folder).expanduser()
        if not folder.is_dir():
            raise DataError(f"data.image_folder: no folder '{source.image_folder}'")
        return folder
    return file.path.parent if isinstance(file, LocalFile) and not is_url(source.path) else None


EXAMPLE_PREFIX = "example:"
"""Marks a file that ships with tunekit."""


@dataclass(frozen=True)
class Files:
    """The files of a source: one or more, of one kind, in the order in which they are read."""

    found: tuple[File, ...]
    kind: str
    notes: tuple[str, ...] = ()


def find_files(source: DataSource, *, key: str, streaming: bool = False) -> Files | None:
    """The files that a source names, or None if it names a dataset of the hub.

    Args:
        source: The source as the recipe gives it.
        key: The recipe's key of the source, for messages.
        streaming: Leave files on other machines where they are, to be read as they come, instead of fetching them.

    Raises:
        DataError: It names a file that is not there, files of several kinds, or a kind of file that is not read; or
            a file on another machine cannot be had.
        DependencyError: The package that speaks the protocol of a URL is not installed.
    """
    name = source.path
    path = _local_path(name, key)
    if path is None:
        _refuse_hub_parts(source, key, f"'{shown(name)}' is a URL")
        return _remote(name, shown(name), key, streaming=streaming)
    what = f"'{name}' matches"
    notes: tuple[str, ...] = ()
    if name.startswith(EXAMPLE_PREFIX):
        files = [LocalFile(find_example(name.removeprefix(EXAMPLE_PREFIX)), name)]
    elif path.is_dir():
        files, notes = _in_folder(path, name, key)
        what = f"folder '{name}' has"
    elif not path.exists() and any(sign in name for sign in "*?["):
        files = _fitting(path, name, key)
    elif not _looks_like_file(name) and not path.exists():
        return None
    else:
        files = [LocalFile(path, name)]
    kind = _one_kind({file.name: _check_file(file.path, file.name, key) for file in files}, what, key)
    _refuse_hub_parts(source, key, f"'{name}' is {'a file' if files[0].name == name else 'read from files'}")
    return Files(tuple(files), kind, notes)


def is_hub_dataset(name: str) -> bool:
    """Return whether a source's name is that of a dataset on the hub."""
    return not (is_url(name) or name.startswith(EXAMPLE_PREFIX) or _looks_like_file(name) or Path(name).exists())


def _refuse_hub_parts(source: DataSource, key: str, why: str) -> None:
    for part, setting in (("name", source.name), ("split", source.split), ("revision", source.revision)):
        if setting is not None:
            raise DataError(f"{key}.{part}: only for Hub datasets, but {why}", hint="remove it")


def _local_path(name: str, key: str) -> Path | None:
    """Return the path of a source on this machine; None for a URL of another one."""
    if not is_url(name):
        return Path(name).expanduser()
    protocol, _, rest_of_url = name.partition("://")
    if protocol != "file":
        return None
    if not rest_of_url.startswith("/"):
        problem = f"{key}.path: '{name}' is not an absolute file URL"
        raise DataError(problem, hint="write file:///..., or the path alone")
    return Path(unquote(rest_of_url))


def _remote(url: str, name: str, key: str, *, streaming: bool) -> Files:
    """The files that a URL names; what can be told from the URL alone is checked before any server is asked."""
    if "::" in name:
        problem = f"{key}.path: '{name}': files inside archives (::) are unsupported"
        raise DataError(problem, hint="extract the archive first")
    if not any(sign in name for sign in "*?["):
        if not PurePosixPath(name).suffix:
            raise DataError(
                f"{key}.path: '{name}': the URL has no file suffix",
                hint=f"supported: {_KINDS}; for a folder that can be listed, use a pattern: "
                f"'{name.rstrip('/')}/*.jsonl'",
            )
        _known_kind(name, name, key)
    hub_file = find_remote(url, key=key)
    kind = _one_kind({file.name: _known_kind(file.name, file.name, key) for file in hub_file}, f"'{name}' matches", key)
    if not streaming:
        return Files(tuple(LocalFile(fetch(file, key=key), file.name) for file in hub_file), kind)
    if kind not in STREAMED:
        problem = f"{key}.path: '{name}': {kind} files cannot be streamed"
        raise DataError(problem, hint="convert it to .jsonl or .parquet, or unset data.streaming")
    return Files(tuple(hub_file), kind)


def _in_folder(folder: Path, name: str, key: str) -> tuple[list[LocalFile], tuple[str, ...]]:
    """All files of a folder that can be read, and a note of others but pictures; hidden and deeper ones are left."""
    inside = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    readable = [path for path in inside if kind_of(path.name) is not None]
    if not readable:
        hint = f"supported: {_KINDS}"
        if any(path.suffix.lower() in PICTURE_SUFFIXES for path in inside):
            hint = "add a metadata.csv with the columns file_name and text: the name and the caption of each image"
        raise DataError(f"{key}.path: no supported files in folder '{name}'", hint=hint)
    unreadable = [path.name for path in inside if path not in readable and path.suffix.lower() not in MEDIA_SUFFIXES]
    notes = (f"{name}: files of unsupported formats ignored: {listed(unreadable)}",) if unreadable else ()
    return [LocalFile(path, f"{name.rstrip('/')}/{path.name}") for path in readable], notes


def _fitting(pattern: Path, name: str, key: str) -> list[LocalFile]:
    """All files that fit a pattern."""
    # Path.glob raises for patterns such as a**b, and takes hidden files along.
    matches = glob.glob(str(pattern), recursive=True)  # noqa: PTH207
    paths = sorted(path for path in map(Path, matches) if not path.is_dir())
    if not paths:
        raise DataError(f"{key}.path: no file matches '{name}'")
    return [LocalFile(path, str(path)) for path in paths]


def _one_kind(kind_by_name: Mapping[str, str], what: str, key: str) -> str:
    """The kind that all files have."""
    examples: dict[str, str] = {}
    for name, kind in kind_by_name.items():
        examples.setdefault(kind, name.rpartition("/")[2])
    if len(examples) > 1:
        problem = f"{key}.path: {what} files of several formats: {listed(examples.values())}"
        raise DataError(problem, hint=f"select one format with a pattern: '*{next(iter(examples))}'")
    return next(iter(examples))


def _looks_like_file(name: str) -> bool:
    """Return whether a name that is no existing file was meant as a file rather than as a dataset of the hub."""
    if kind_of(name) is not None or hub.NAME.fullmatch(name) is None:
        return True
    # A dot in a hub name is common behind its owner (org/v1.5) and unknown without one (chats.xlsx).
    return "/" not in name and "." in name


_KINDS = f"{listed(OPENERS)}; text formats also as .gz or .zst"


def _check_file(path: Path, name: str, key: str) -> str:
    """The kind of a file that can be read; refuse any other."""
    if not path.exists():
        places = "the working directory" + " or the recipe's folder" * key.startswith("data.")
        there = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, there)
        if not path.parent.is_dir():
            where = "" if path.is_absolute() else f" in {places}"
            raise DataError(f"{key}.path: no file '{name}'", hint=f"folder '{path.parent}' does not exist{where}")
        where = places if path.parent == Path() else str(path.parent)
        problem = f"{key}.path: no file '{name}' in {where}"
        raise DataError(problem, hint=f"did you mean '{path.with_name(near)}'?" if near else None)
    kind = _known_kind(path.name, name, key)
    if not path.is_file():
        raise DataError(f"{key}.path: '{name}' is not a regular file")
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{key}.path: cannot read '{name}': {error.strerror}") from error
    if path.stat().st_size == 0:
        raise DataError(f"{key}.path: '{name}' is empty")
    return kind


def _known_kind(file: str, name: str, key: str) -> str:
    """The kind of a file that is read, by what it is called."""
    file_kind = kind_of(file)
    if file_kind is not None:
        return file_kind
    suffix = PurePosixPath(file).suffix
    kind = f"unsupported suffix '{suffix}'" if suffix else "the file has no suffix"
    if suffix.lower() in (".gz", ".zst"):
        kind = f"only text formats may be compressed, with a name ending in .jsonl{suffix} or similar"
    raise DataError(f"{key}.path: '{name}': {kind}", hint=f"supported: {_KINDS}")
