"""Exports that are being made: by whom they were begun does not matter, every browser sees how far they are.

What was made lies on the disk with the figures of its check, in `export.json`; only the work itself is the server's.
"""

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tunekit
from webui import work
from webui.failures import in_words

MAX_SHOWN = 8
"""Exports of a run that are listed."""


@dataclass(frozen=True)
class Progress:
    """Progress of an export.

    Attributes:
        phase: What is done: `waiting`, `loading`, `writing`, `checking`; `done` or `failed` at the end.
        error: Why it failed.
        folder: Where it is, once it is done.
    """

    phase: str
    error: tunekit.TunekitError | None = None
    folder: str | None = None

    @property
    def is_over(self) -> bool:
        """True if nothing more happens."""
        return self.phase in ("done", "failed")


_lock = threading.Lock()
_progress: dict[Path, Progress] = {}


def progress_of(run: tunekit.Run) -> Progress | None:
    """Return the progress of the newest export of a run on this server; None where there is none."""
    with _lock:
        return _progress.get(run.path)


def begin(run: tunekit.Run, dest: Path | None, *, kind: str, dtype: str, checkpoint: str | None) -> None:
    """Export a run, and come back at once.

    Raises:
        TunekitError: Another export of it is being made.
    """
    with _lock:
        now = _progress.get(run.path)
        if now is not None and not now.is_over:
            raise tunekit.TunekitError(f"{run.name} is already being exported", hint="wait until that export finishes")
        _progress[run.path] = Progress("waiting")

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "export" and event["phase"] != "done":
            _set(run, Progress(event["phase"]))

    def export() -> None:
        try:
            exported = work.call(
                "export",
                str(run.path),
                None if dest is None else str(dest),
                kind=kind,
                dtype=dtype,
                checkpoint=checkpoint,
                on_event=on_event,
            )
        except Exception as error:  # noqa: BLE001  (pages wait for its end, whichever it is)
            _set(run, Progress("failed", in_words(error)))
        else:
            _set(run, Progress("done", folder=exported.folder))

    threading.Thread(target=export, name="export", daemon=True).start()


def _set(run: tunekit.Run, progress: Progress) -> None:
    with _lock:
        _progress[run.path] = progress


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
