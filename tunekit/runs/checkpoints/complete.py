"""Complete checkpoints of a run, and which of them are kept.

The libraries write many files, from several processes, into a folder `.saving-N`. The last file is a manifest with the
size and the SHA-256 of each, and then the folder is renamed to `checkpoint-N`, atomically. So a visible checkpoint was
written completely, and one that has changed since does not match its manifest: it is renamed to `checkpoint-N.bad`, and
neither resumed from nor deleted.

Also the command that starts a run over, for runs without a checkpoint.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from tunekit.errors import RunError, TunekitError
from tunekit.estimates.facts import Facts
from tunekit.files import read_regular
from tunekit.recipe.load import reload_recipe


def command_anew(folder: Path, changes: Sequence[str] = (), *, in_place: bool = False) -> str:
    """Return the command, ready to be pasted into a shell.

    Args:
        folder: The run's folder.
        changes: Changes of its recipe, each as `key=value`.
        in_place: Whether the run has saved nothing and may begin again in the folder that its recipe names.
    """
    file = folder / "recipe.yaml"
    words = ["tunekit", "train", str(file)]
    try:
        names_folder = reload_recipe(file).output.dir is not None
    except TunekitError:
        names_folder = True
    if names_folder:
        words.append("--resume" if in_place and not changes else "output.dir=null")
    return shlex.join([*words, *changes])


CHECKPOINTS = "checkpoints"
"""Folder of a run folder that they are in."""

MANIFEST = "manifest.json"
"""File of a checkpoint that is written last."""

FORMAT = 1
"""Number of what a manifest says and a checkpoint holds."""

READ = COPIES = ("recipe.yaml", "plan.yaml", "fingerprints.json")
"""Files of the run folder of which a checkpoint holds a copy, as they were then. They are small, and decide how a run
goes on."""

READERS = 8
"""Files that are read at once to check them."""


class Written(Facts):
    """A file as it was written."""

    size: int
    """In bytes."""
    sha256: str


class Best(Facts):
    """The best evaluation so far."""

    metric: str
    value: float
    step: int


class Patience(Facts):
    """Progress of early stopping."""

    counter: int
    """Evaluations in a row that were no improvement."""
    since: int
    """Step of the last improvement."""
    step: int
    """Step of the last evaluation that was counted."""


class Manifest(Facts):
    """Manifest of a checkpoint: its kind and its files."""

    format: int
    step: int
    num_processes: int
    strategy: str
    dtype: str
    """Type of the products. A gradient scaler belongs to float16."""
    recipe: str
    """SHA-256 of the recipe."""
    made_of: str | None
    """SHA-256 of the fingerprints of model, tokenizer and rows; None in runs that were made without."""
    versions: Mapping[str, str]
    """Of tunekit and of the libraries that wrote it."""
    best: Best | None
    patience: Patience | None = None
    """None where the run trains to the end."""
    files: Mapping[str, Written]
    """All but the manifest, by their paths in the folder."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint, and what was passed over.

    Attributes:
        step: Its step; 0 where there is none.
        path: Its folder.
        skipped: Newer ones, each with what is wrong.
        best: The best evaluation as it tells it.
        patience: The progress of early stopping as it tells it.
    """

    step: int = 0
    path: Path | None = None
    skipped: tuple[str, ...] = ()
    best: Best | None = None
    patience: Patience | None = None


def draft_of(run_folder: Path, step: int) -> Path:
    """The folder in which a checkpoint is made, as a folder of the name that it will have."""
    return run_folder / CHECKPOINTS / f".saving-{step}"


def is_being_made(run_folder: Path) -> bool:
    """Return whether the files of a checkpoint are being written, or an interrupted save has left some."""
    return any((run_folder / CHECKPOINTS).glob(".saving-*"))


def checkpoint_of(run_folder: Path, step: int) -> Path:
    """The folder that it is then."""
    return run_folder / CHECKPOINTS / f"checkpoint-{step}"


def files_in(folder: Path) -> list[str]:
    """Paths of the files of a checkpoint without its manifest, in their order."""
    names = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in names if name != MANIFEST)


def to_disk(path: Path) -> None:
    """Sync a file or a folder to its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_written(file: Path) -> Written:
    """Return the digest and size of a file, by reading it."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return Written(size=stream.tell(), sha256=digest.hexdigest())


def publish(run_folder: Path, manifest: Manifest) -> Path:
    """Write the manifest of a checkpoint whose files are on disk, and make it visible: in the main process only.

    An existing checkpoint of the same step is only removed then.
    """
    draft, to = draft_of(run_folder, manifest.step), checkpoint_of(run_folder, manifest.step)
    target = draft / to.name
    sketch = target / f".{MANIFEST}"
    sketch.write_text(json.dumps(manifest.model_dump(mode="json"), indent=2), encoding="utf-8")
    to_disk(sketch)
    sketch.replace(target / MANIFEST)
    for folder in (*(path for path in target.rglob("*") if path.is_dir()), target):
        to_disk(folder)
    _sync_run(run_folder)
    _take_name(target, to, to.with_name(f".replaced-{manifest.step}"))
    draft.rmdir()
    return to


def _sync_run(run_folder: Path) -> None:
    """Sync what a resume needs besides the checkpoint: recipe, plan, fingerprints, prepared rows, events."""
    files = [path for pattern in ("*", "*/*") for path in run_folder.glob(pattern) if path.is_file()]
    for path in (*files, *{file.parent for file in files}):
        # A status may be replaced meanwhile.
        with contextlib.suppress(FileNotFoundError):
            to_disk(path)
    # The folders of runs may be as new, or somebody else's.
    for folder in (run_folder.parent, run_folder.parent.parent):
        with contextlib.suppress(PermissionError):
            to_disk(folder)


def publish_result(draft: Path, to: Path) -> None:
    """Make the result of a run visible, once all of it is on disk: in the main process only."""
    for path in (*draft.rglob("*"), draft):
        to_disk(path)
    _take_name(draft, to, to.with_name(f".replaced-{to.name}"))


def _take_name(draft: Path, to: Path, before: Path) -> None:
    """Rename a folder. An existing one of that name is renamed to `before` first, and deleted afterwards."""
    if to.exists():
        # One that was cut off here may have left a part of what it replaced.
        shutil.rmtree(before, ignore_errors=True)
        to.rename(before)
    draft.rename(to)
    to_disk(to.parent)
    shutil.rmtree(before, ignore_errors=True)


def clear_drafts(run_folder: Path) -> None:
    """Delete the remains of interrupted saves, and restore checkpoints that they were about to replace."""
    checkpoints = run_folder / CHECKPOINTS
    for folder in checkpoints.glob(".replaced-*"):
        newer = checkpoints / folder.name.replace(".replaced-", "checkpoint-")
        if not newer.exists():
            folder.rename(newer)
    for pattern in (".replaced-*", ".saving-*", ".superseded-*"):
        for folder in checkpoints.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def newest_complete(run_folder: Path) -> Newest:
    """Return the newest checkpoint of a run whose files exist with their sizes; of READ the contents are checked."""
    return _newest(run_folder, contents=False)


def take_newest(run_folder: Path) -> Newest:
    """Return the newest checkpoint of a run with intact contents, and rename damaged ones.

    Raises:
        RunError: There are checkpoints, but none is complete.
    """
    clear_drafts(run_folder)
    newest = _newest(run_folder, contents=True)
    if newest.path is None and newest.skipped:
        problem = f"{run_folder} has no complete checkpoint: {'; '.join(newest.skipped)}"
        raise RunError(problem, hint=f"start over: {command_anew(run_folder)}")
    return newest


def manifest_of(folder: Path) -> Manifest:
    """The manifest of a whole checkpoint."""
    return Manifest.model_validate_json(read_regular(folder / MANIFEST))


def whole_in(run_folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the checkpoints that are there in full, by the sizes of their files; the newest first."""
    return [(step, folder) for step, folder in _found(run_folder) if fault_of(folder, contents=False) is None]


def superseded(run_folder: Path, limit: int, best: Best | None) -> list[Path]:
    """Checkpoints that are not kept: whole ones beyond the newest `limit`, but for the best."""
    whole = whole_in(run_folder)
    return [folder for step, folder in whole[limit:] if best is None or step != best.step]


def delete_superseded(run_folder: Path, limit: int, best: Best | None) -> list[str]:
    """Delete superseded checkpoints, and return messages of failures."""
    problems = []
    for folder in superseded(run_folder, limit, best):
        try:
            # What is deleted in part is none that was damaged.
            renamed = folder.rename(folder.with_name(folder.name.replace("checkpoint-", ".superseded-")))
            shutil.rmtree(renamed)
        except OSError as error:
            problems.append(f"cannot delete superseded {folder.name}: {error.strerror}")
    return problems


def fault_of(folder: Path, *, contents: bool) -> str | None:
    """Return the fault of a checkpoint, if any.

    Args:
        folder: The checkpoint.
        contents: Whether every file is read and compared, which takes as long as reading it, and not its size alone. Of
            READ it always is.
    """
    manifest = _examined(folder, contents=contents)
    return manifest if isinstance(manifest, str) else None


def _examined(folder: Path, *, contents: bool) -> Manifest | str:
    """Return the manifest of a checkpoint, or its fault."""
    if folder.is_symlink():
        return "is a link to another folder"
    try:
        manifest = manifest_of(folder)
    except FileNotFoundError:
        return "not fully written"
    except (ValidationError, UnicodeDecodeError):
        return f"{MANIFEST} is damaged"
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    if manifest.format != FORMAT:
        return f"{MANIFEST} has format {manifest.format} of another tunekit version"
    if checkpoint_of(folder.parent.parent, manifest.step).name != folder.name:
        return f"{MANIFEST} is for step {manifest.step}"
    fault = next(chain(_faults_of_files(folder, manifest), _missing_state(manifest)), None)
    names = [name for name in manifest.files if contents or name in READ]
    return fault or _fault_of_contents(folder, manifest, names) or manifest


def _newest(run_folder: Path, *, contents: bool) -> Newest:
    skipped: list[str] = []
    for step, folder in _found(run_folder):
        manifest = _examined(folder, contents=contents)
        if isinstance(manifest, Manifest):
            return Newest(step, folder, tuple(skipped), manifest.best, manifest.patience)
        if not os.path.lexists(folder):
            # A run that is being trained has deleted it, as there is a newer one by now.
            return _newest(run_folder, contents=contents)
        note = f"; renamed to {_set_aside(folder).name}" if contents else ""
        skipped.append(f"{folder.name}: {manifest}{note}")
    return Newest(skipped=tuple(skipped))


def _found(run_folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints by their names, the newest first."""
    folders = (run_folder / CHECKPOINTS).glob("checkpoint-*")
    matches = ((re.fullmatch(r"checkpoint-(0|[1-9]\d*)", folder.name), folder) for folder in folders)
    return sorted(((int(match[1]), folder) for match, folder in matches if match), reverse=True)


def _set_aside(folder: Path) -> Path:
    """Give a damaged checkpoint another name, and return it."""
    names = (f"{folder.name}.bad{number}" for number in ["", *(f"-{n}" for n in range(2, 1000))])
    aside = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
    folder.rename(aside)
    return aside


def _faults_of_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Files that are not there as the manifest says."""
    for name, written in manifest.files.items():
        if not is_inside(folder, name):
            yield f"{MANIFEST} lists {name!r}, which is outside its folder"
        size = _size_of(folder / name)
        if size is None:
            yield f"{name} is missing"
        elif size != written.size:
            yield f"{name} has {size:,} bytes instead of {written.size:,}"


def _size_of(file: Path) -> int | None:
    """Return the size of a file, in bytes; None if there is none, which may have been deleted a moment ago."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def is_inside(folder: Path, name: str) -> bool:
    """Return whether a name is one of a file in a folder, without a link on the way to it."""
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
        return False
    return not any((folder / part).is_symlink() for part in (path, *path.parents))


def _fault_of_contents(folder: Path, manifest: Manifest, names: Sequence[str]) -> str | None:
    """A file of these that holds something else than was written."""

    def fault(name: str) -> str | None:
        try:
            written = as_written(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return None if written == manifest.files[name] else f"{name} has changed since it was written"

    with ThreadPoolExecutor(READERS) as readers:
        return next((words for words in readers.map(fault, names) if words is not None), None)


def _missing_state(manifest: Manifest) -> Iterator[str]:
    """Yield the state required to resume that the manifest does not list, by the engines' names."""
    for state, name, pattern in _state(manifest):
        if not any(re.fullmatch(pattern.format(re.escape(name)), file) for file in manifest.files):
            yield f"{state} ({name}) is missing"


def _state(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    """Yield the state required to resume, its file, and a pattern of files that have it, with braces for the former."""
    num, strategy = manifest.num_processes, manifest.strategy
    if strategy == "automodel":
        yield "weights state", "model", r"{}/.*\.safetensors"
        yield "optimizer index", "optim/.metadata", "{}"
        yield "optimizer state", "optim", r"{}/.*\.distcp"
        return
    yield "trainer state", "trainer_state.json", "{}"
    yield "scheduler state", "scheduler.pt", "{}"
    for rank in range(num):
        yield f"random state of rank {rank}", "rng_state.pth" if num == 1 else f"rng_state_{rank}.pth", "{}"
        yield f"additional state of rank {rank}", f"carried-{rank}.pt", "{}"
        if strategy.startswith("zero"):
            part = f"zero_pp_rank_{rank}_mp_rank_00"
            if strategy == "zero3":
                yield f"weights state of rank {rank}", f"{part}_model_states.pt", "[^/]+/{}"
            yield f"optimizer state of rank {rank}", f"{part}_optim_states.pt", "[^/]+/(bf16_)?{}"
    if strategy.startswith("zero"):
        yield "name of DeepSpeed's folder", "latest", "{}"
        if strategy != "zero3":
            yield "weights state", "mp_rank_00_model_states.pt", "[^/]+/{}"
        return
    if strategy == "fsdp2":
        for what, folder in (("weights", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0")):
            yield f"{what} index", f"{folder}/.metadata", "{}"
            yield f"{what} state", folder, r"{}/.*\.distcp"
    else:
        yield "weights state", "model.safetensors", r"(adapter_)?{0}|{0}\.index\.json"
        yield "optimizer state", "optimizer.pt", "{}"
    if manifest.dtype == "float16":
        yield "gradient scaler state", "scaler.pt", "{}"
