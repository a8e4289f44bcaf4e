"""Small files of a run's folder, and the liveness of its processes that they tell.

The small files of a run's folder, read with care: it may come from another machine, or be damaged.

A file is read only if it is one, up to a size, and what it holds is checked before anything relies on it.

Liveness of a run's processes, from the files in its folder: seen from any terminal, on any host.

Identity of a process: its number is reused after its end, and clocks are set.

Rank of this process in a run, from its launcher's variables.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tunekit.errors import RunError, TunekitError
from tunekit.files import parse_json, read_regular
from tunekit.planner.plan import Plan
from tunekit.probe.nodes import read_launch
from tunekit.recipe.schema import Recipe

RESTORE = "put it back from a copy"


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is no file, larger than a small one is, or no UTF-8 text.
    """
    try:
        return read_regular(path).decode("utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", hint=RESTORE) from error
    except UnicodeDecodeError as error:
        raise damaged(path, error) from error


def read_object(path: Path, hint: str = RESTORE) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is damaged.
    """
    content = _read_json(path, hint)
    if not isinstance(content, dict):
        raise damaged(path, f"a JSON object was expected, got {_kind(content)}", hint)
    return content


def read_list(path: Path, hint: str = RESTORE) -> list[Any]:
    """Return the JSON list of a file.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is damaged.
    """
    content = _read_json(path, hint)
    if not isinstance(content, list):
        raise damaged(path, f"a JSON list was expected, got {_kind(content)}", hint)
    return content


def read_plan(path: Path, recipe: Recipe) -> Plan:
    """Return the plan of a file, with its recipe.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is damaged.
    """
    text = read_text(path)
    try:
        return Plan.from_yaml(text, recipe)
    except TunekitError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, why: object, hint: str = RESTORE) -> RunError:
    """Return what to raise where a file is damaged."""
    words = " ".join(str(why).split())
    return RunError(f"{path} is damaged: {words[:200]}", hint=hint)


def _read_json(path: Path, hint: str) -> Any:
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise damaged(path, error, hint) from error


def _kind(value: object) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a bool"}
    return names.get(type(value), "a number")


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def identity_of(pid: int) -> str | None:
    """Return an identity that no other process of this number ever had on this host; None where there is none, or a
    zombie.

    On Linux that is the boot, and when it started since then, which no change of the clock alters.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if sys.platform != "linux":
            return f"{process.create_time():.2f}"
        # The name before the state may have spaces and brackets in it.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return f"{BOOT_ID.read_text(encoding='ascii').strip()}-{fields[19]}"
    except (psutil.Error, FileNotFoundError, ProcessLookupError):
        return None


def is_alive(pid: int, identity: str) -> bool:
    """Return whether a process of this host is alive, and still the same."""
    return identity_of(pid) == identity


def kill(pid: int, identity: str) -> None:
    """End a process of this host if it is still the same: no other, whatever happens meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        if sys.platform != "linux":
            if is_alive(pid, identity):
                os.kill(pid, signal.SIGKILL)
            return
        # What is held so keeps its number.
        descriptor = os.pidfd_open(pid)
        try:
            if is_alive(pid, identity):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


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


@dataclass(frozen=True)
class Place:
    """A process among those of its run.

    Attributes:
        rank: Its number among all.
        local_rank: Its number on its node, which is that of its device.
        num_processes: All of them.
        num_local: Those of its node.
    """

    rank: int = 0
    local_rank: int = 0
    num_processes: int = 1
    num_local: int = 1

    @property
    def is_main(self) -> bool:
        """True for the process that writes the shared files."""
        return self.rank == 0


def place_of(environment: Mapping[str, str] = os.environ) -> Place:
    """The place of a process that torchrun, mpirun, srun or tunekit started; alone where none of them did.

    Raises:
        PlanError: What the launcher says cannot be true.
    """
    launch = read_launch(environment)
    if launch is None or not launch.num_processes or not launch.num_local:
        return Place()
    return Place(launch.rank, launch.local_rank, launch.num_processes, launch.num_local)
