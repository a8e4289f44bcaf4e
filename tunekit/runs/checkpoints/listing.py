"""List of a run's checkpoints, and lookup of one by its name or for its weights alone."""

import os
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tunekit.errors import RunError
from tunekit.files import is_name
from tunekit.runs.checkpoints import complete
from tunekit.runs.reader import EventReader
from tunekit.runs.run import Run

NAME = re.compile(r"checkpoint-(\d+)(\.bad(-\d+)?)?")
"""A checkpoint's name, and the one that it has once it turned out damaged."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model_fsdp_0/*")
"""Files of a checkpoint with its weights, whole or in parts."""


@dataclass(frozen=True)
class Found:
    """A checkpoint.

    Attributes:
        step: Its step.
        path: Its folder.
        skipped: Newer ones that were passed over, each with what is wrong.
    """

    step: int
    path: Path
    skipped: tuple[str, ...] = ()


def steps_of(folder: Path) -> int:
    """The step of a checkpoint by its name; -1 for a folder that is none."""
    match = NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def named(run: Run, name: str, *, weights_only: bool) -> Found:
    """Find a checkpoint of a run by its step, its name or its path.

    Raises:
        RunError: It does not exist, is not this run's, or is damaged.
    """
    root = (run.path / complete.CHECKPOINTS).resolve()
    whole = [folder for folder in sorted(root.glob("checkpoint-*"), key=steps_of) if folder.suffix == ""]
    names = ", ".join(folder.name for folder in whole) or "none"
    hint = f"available: {names}"
    if not is_name(name):
        raise RunError(f"--from {name!r}: {run.name} has no such checkpoint", hint=hint)
    folder = root / f"checkpoint-{name}" if name.isdigit() else root / name
    if "/" in name and Path(name).is_dir():
        folder = Path(name)
    folder = folder.resolve()
    if not folder.is_dir() or not folder.is_relative_to(root) or steps_of(folder) < 0:
        raise RunError(f"--from {name}: {run.name} has no such checkpoint", hint=hint)
    fault = weights_fault(folder) if weights_only else complete.fault_of(folder, contents=True)
    if fault is None:
        return Found(steps_of(folder), run.path / complete.CHECKPOINTS / folder.relative_to(root))
    if not weights_only and weights_fault(folder) is None:
        hint = f"its weights are intact: --from {name} --weights-only starts from them with fresh states; {hint}"
    raise RunError(f"--from {name}: {fault}", hint=hint)


def newest_weights(run: Run) -> Found | None:
    """Return the newest checkpoint of a run with intact weights, whatever else of it is missing."""
    folders = sorted((run.path / complete.CHECKPOINTS).glob("checkpoint-*"), key=steps_of, reverse=True)
    whole = (folder for folder in folders if steps_of(folder) >= 0 and weights_fault(folder) is None)
    return next((Found(steps_of(folder), folder) for folder in whole), None)


def weights_fault(folder: Path) -> str | None:
    """Return the fault of a checkpoint's weights, if any. All of them are read."""
    try:
        manifest = complete.manifest_of(folder)
    except (OSError, ValueError):
        return "not fully written"
    if manifest.strategy == "automodel":
        return "NeMo Automodel's parts of weights"
    files = manifest.files
    weights = [name for name in files if any(fnmatch(name, pattern) for pattern in WEIGHTS)]
    if not weights:
        return "no weights"
    for name in weights:
        file = folder / name
        if not complete.is_inside(folder, name) or not file.is_file() or complete.as_written(file) != files[name]:
            return f"{name} is damaged"
    return None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run.

    Attributes:
        name: Its name for `tunekit resume --from`.
        path: Its folder.
        step: Its step.
        size_bytes: Size of its files on disk.
        loss: Loss of its step, or of the last logged step before; None if there is none.
        eval_loss: The same for the evaluation loss.
        is_best: Whether it is the best by the recipe's metric.
        fault: Why a run cannot resume from it; None if it is complete. The contents of large files are checked only on
            resume.
    """

    name: str
    path: Path
    step: int
    size_bytes: int
    loss: float | None
    eval_loss: float | None
    is_best: bool
    fault: str | None


def checkpoints(run: Run, history: EventReader | None = None) -> list[Checkpoint]:
    """List the checkpoints of a run, newest first, then those set aside as damaged or superseded.

    Args:
        run: The run.
        history: Its events, if they have been read already.
    """
    folders = folders_of(run)
    if history is None:
        history = EventReader(run.path / "events.jsonl")
        if folders:
            history.read()
    # The best evaluation, as the newest whole checkpoint tells it.
    best = complete.newest_complete(run.path).best
    listed = []
    for name, path in folders.items():
        step = steps_of(path)
        try:
            size_bytes = sum((path / file).lstat().st_size for file in complete.files_in(path))
        except FileNotFoundError:
            continue  # A run that is being trained has deleted it a moment ago.
        is_best = best is not None and name == f"checkpoint-{best.step}"
        fault = "set aside as damaged" if path.suffix else complete.fault_of(path, contents=False)
        if fault is not None and not os.path.lexists(path):
            continue
        listed.append(Checkpoint(name, path, step, size_bytes, *history.losses_at(step), is_best, fault))
    return listed


def folders_of(run: Run) -> dict[str, Path]:
    """The folders of a run's checkpoints by their names, the newest first, and last those that were set aside."""
    root = run.path / complete.CHECKPOINTS
    folders = [path for path in (*root.glob("checkpoint-*"), *root.glob("aside-*/checkpoint-*")) if steps_of(path) >= 0]
    folders.sort(key=lambda path: (path.parent != root, path.suffix != "", -steps_of(path)))
    return {path.relative_to(root).as_posix(): path for path in folders}
