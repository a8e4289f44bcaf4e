"""Exports of runs: the work, and what lies on the disk with the figures of its check, in `export.json`."""

import json
from pathlib import Path
from typing import Any

import tunekit
from webui.jobs import Jobs, Progress

MAX_SHOWN = 8
"""Exports of a run that are listed."""


def _progress_in(event: dict[str, Any]) -> Progress | None:
    """Phases are `loading`, `writing`, `checking`, `converting` and `pushing`."""
    return Progress(event["phase"]) if event["event"] == "export" and event["phase"] != "done" else None


_jobs = Jobs("export", "exported", _progress_in)


def progress_of(run: tunekit.Run) -> Progress | None:
    """Return the progress of the newest export of a run on this server; None where there is none."""
    return _jobs.progress_of(run)


def begin(run: tunekit.Run, dest: Path | None, **options: Any) -> None:
    """Export a run, and come back at once.

    Args:
        run: The run.
        dest: The folder; None: one in the folder of the run.
        options: Further arguments of `tunekit.export`.

    Raises:
        TunekitError: Another export of it is being made.
    """
    _jobs.begin(run, None if dest is None else str(dest), **options)


def exports_in(run: tunekit.Run, also: str | None = None) -> list[tuple[Path, dict[str, Any]]]:
    """The exports in the folder of a run, the newest first, each with what its `export.json` says.

    Args:
        run: The run.
        also: Another folder with one.
    """
    folders = {
        path.parent
        for path in (run.path / "export").glob("*/export.json")
        if path.is_file() and not path.parent.is_symlink()
    }
    if also is not None and (Path(also) / "export.json").is_file():
        folders.add(Path(also))
    export_folders = []
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[:MAX_SHOWN]:
        try:
            export_folders.append((folder, json.loads((folder / "export.json").read_text(encoding="utf-8"))))
        except (OSError, ValueError, RecursionError):
            continue  # It is being deleted, or was damaged: it is no export then.
    return export_folders
