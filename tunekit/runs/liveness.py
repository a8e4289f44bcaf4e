"""Liveness of a run's processes, from the files in its folder: seen from any terminal, on any host."""

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunekit.runs.process_id import is_alive
from tunekit.runs.small_files import damaged, read_object

RANKS = "ranks"
"""Folder of a run folder with what its processes say."""

SILENT_SECONDS = 120
"""Seconds of silence after which a run on another host counts as gone. It sends heartbeats every few seconds, which
network file systems may show a minute late."""

SETTLE_SECONDS = 30
"""Seconds for a supervisor to report the end of the processes that it started."""

DIED, STUCK = "died", "stuck"
"""States of a run whose process is gone, and of one whose process is alive but waits for others that are gone."""


def state_of_processes(folder: Path, status: Mapping[str, Any]) -> str:
    """Return the state of a run whose status is not final: its phase, as long as its processes live."""
    phase = str(status["phase"])
    beats = beats_in(folder)
    if status["host"] != os.uname().nodename:
        return DIED if _silent_seconds(folder, "status.json", f"{RANKS}/rank-*.json") > SILENT_SECONDS else phase
    own = is_alive(status["pid"], status["identity"])
    here = [beat for beat in beats if beat["host"] == status["host"]]
    elsewhere = len(here) < len(beats)
    working = any(is_alive(beat["pid"], beat["identity"]) for beat in here)
    if not own:
        # Those that it started end with it, in a moment.
        return phase if working else DIED
    if working or elsewhere or not beats or phase == "starting":
        return phase
    return STUCK if _silent_seconds(folder, f"{RANKS}/rank-*.json") > SETTLE_SECONDS else phase


def beats_in(folder: Path) -> list[dict[str, Any]]:
    """Return the last heartbeats of the processes of a run."""
    beats = []
    for file in (folder / RANKS).glob("rank-*.json"):
        # It may end meanwhile.
        with contextlib.suppress(FileNotFoundError):
            beats.append(_beat(file))
    return beats


def _beat(file: Path) -> dict[str, Any]:
    beat = read_object(file)
    for key in ("rank", "pid", "identity", "host", "at", "step", "time", "since"):
        if key not in beat:
            raise damaged(file, f"it has no {key}")
    return beat


def _silent_seconds(folder: Path, *patterns: str) -> float:
    """Return the seconds since one of some files was last written, by the clock of the disk that they are on."""
    files = [file for pattern in patterns for file in folder.glob(pattern)]
    written = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            written.append(file.stat().st_mtime)
    return _now(folder) - max(written, default=0.0)


def _now(folder: Path) -> float:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
            file.write(b"\n")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        # It is somebody else's, or on a full disk.
        return time.time()
