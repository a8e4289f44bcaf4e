"""Which checkpoints of a run are whole.

The libraries write many files, from several processes, one after another, so a folder that is there may lack some or
have half of one. Behind them all comes a manifest of ours with the size of each. Only what agrees with its manifest is
gone on from.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.planner.plan import Plan

CHECKPOINTS = "checkpoints"
"""Folder of a run folder that they are in."""

MANIFEST = "manifest.json"
"""File of a checkpoint that is written last."""


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint, and what was passed over.

    Attributes:
        step: Its step; 0 where there is none.
        path: Its folder.
        skipped: Newer ones, each with what is wrong.
    """

    step: int = 0
    path: Path | None = None
    skipped: tuple[str, ...] = ()


def complete(folder: Path, plan: Plan, *, step: int) -> None:
    """Write the manifest of a checkpoint, once every process has written its part: in the main process only."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST)
    for file in files:
        _to_disk(file)
    manifest = {
        "step": step,
        "num_processes": plan.layout.num_processes,
        "strategy": plan.layout.strategy,
        "files": {file.relative_to(folder).as_posix(): file.stat().st_size for file in files},
    }
    draft = folder / f".{MANIFEST}"
    draft.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    _to_disk(draft)
    draft.replace(folder / MANIFEST)
    _to_disk(folder)


def newest_complete(run_folder: Path) -> Newest:
    """The newest checkpoint of a run that agrees with its manifest."""
    found = ((_step_of(folder), folder) for folder in (run_folder / CHECKPOINTS).glob("checkpoint-*"))
    skipped: list[str] = []
    for step, folder in sorted(((step, folder) for step, folder in found if step is not None), reverse=True):
        fault = fault_of(folder, contents=False)
        if fault is None:
            return Newest(step, folder, tuple(skipped))
        skipped.append(f"{folder.name}: {fault}")
    return Newest(skipped=tuple(skipped))


def saved_by(folder: Path) -> tuple[str, int]:
    """The strategy and the number of processes that wrote a checkpoint."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return str(manifest["strategy"]), int(manifest["num_processes"])


def _step_of(folder: Path) -> int | None:
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else None


def fault_of(folder: Path, *, contents: bool) -> str | None:
    """What is wrong with a checkpoint, if anything is."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "not written to its end"
    except json.JSONDecodeError:
        return f"{MANIFEST} is damaged"
    for name, size in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
    return None


def _to_disk(path: Path) -> None:
    """Have a file or a folder written to its disk, and not only given to the system."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
