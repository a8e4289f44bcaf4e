"""Versions that a run was made with: Python, the libraries, tunekit's commit, and the machine's threads.

It is written beside the fingerprints when the folder is made, so that whoever repeats the run can say what is
otherwise. The digests of recipe and plan tell whether somebody has changed them in the folder since.
"""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from tunekit.errors import RunError
from tunekit.planner.facts import Facts
from tunekit.probe.host import num_cores
from tunekit.runs.run import Run
from tunekit.runs.small_files import read_text

MADE_WITH = "made_with.json"
"""File of a run folder that says it."""

LIBRARIES = ("tunekit", "torch", "transformers", "trl", "accelerate", "peft", "deepspeed")
"""Libraries that train and write checkpoints."""

TEXTS = ("recipe.yaml", "plan.yaml")
"""Files that decide what happens in a run."""


class MadeWith(Facts):
    """Versions that a run was made with."""

    versions: Mapping[str, str]
    """Of Python, of tunekit and of the libraries that train."""
    commit: str | None
    """Commit of tunekit's own source where that is a checkout; with `+` behind it where files differ from it."""
    num_threads: int
    """Threads that a process computes with on the processor, where the plan says nothing else."""
    digests: Mapping[str, str]
    """SHA-256 of recipe and plan as the run was made."""

    def words(self) -> str:
        """Versions as people read them."""
        return ", ".join(f"{name} {number}" for name, number in self.versions.items())


def record_versions(run: Run) -> None:
    """Write down what a run is made with."""
    made_with_now = MadeWith(
        versions={"python": platform.python_version(), **versions()},
        commit=_commit(),
        num_threads=_num_threads(run),
        digests={name: _digest(run.path / name) for name in TEXTS},
    )
    (run.path / MADE_WITH).write_text(json.dumps(made_with_now.model_dump(mode="json"), indent=2), encoding="utf-8")


def made_with(run: Run) -> MadeWith | None:
    """Return the versions that a run was made with; None of a run of an earlier version, which did not record them.

    Raises:
        RunError: What was written down cannot be read.
    """
    file = run.path / MADE_WITH
    if not file.is_file():
        return None
    try:
        return MadeWith.model_validate_json(read_text(file))
    except (OSError, RunError, ValidationError) as error:
        raise RunError(f"{file} cannot be read", hint="it is damaged: delete it, or restore the folder") from error


def changed_texts(run: Run, known: MadeWith) -> list[str]:
    """Return which of recipe and plan have changed since the run was made."""
    return [name for name, digest in known.digests.items() if _digest(run.path / name) != digest]


def versions() -> dict[str, str]:
    """Versions of tunekit and of the libraries that train, as far as they are there."""
    known_versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            known_versions[name] = version(name)
    return known_versions


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _commit() -> str | None:
    """The commit that this code was taken from; None where it is no checkout, or there is no git."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + "+" * bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", "tunekit"))
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    completed = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return completed.stdout.strip()


def _num_threads(run: Run) -> int:
    planned = run.plan.environment.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    return int(planned) if planned.isdecimal() else num_cores()
