"""Small files of a run folder: stop and resume requests, its cluster job, and the liveness of its processes.

The folder may come from another machine, or be damaged: only regular files are read, up to a size, and their contents
are checked.

A stop request is a file: `tunekit stop` writes it, and so does every process of the run that gets a signal; then all
processes on all hosts see it. A resume leaves its request in a file, too.

A process is identified by more than its pid, which is reused, and by no clock, which may be set.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tunekit.errors import RunError, TunekitError
from tunekit.files import leads_out, parse_json, read_regular
from tunekit.planner.plan import Plan
from tunekit.probe.nodes import read_launch
from tunekit.recipe.schema import Recipe
from tunekit.runs.checkpoints.complete import CHECKPOINTS, to_disk
from tunekit.runs.events import FINAL_PHASES

RESTORE = "restore it from a copy"


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is no file, larger than a small one is, or no UTF-8 text; or is a link out of its folder.
    """
    if leads_out(path):
        raise RunError(f"{path} cannot be read: a link out of its folder", hint=RESTORE)
    try:
        return read_regular(path).decode("utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", hint=RESTORE) from error
    except UnicodeDecodeError as error:
        raise damaged(path, error) from error


def read_object(path: Path, hint: str = RESTORE, *, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON object of a file, which has some keys at least.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is damaged.
    """
    content: dict[str, Any] = _read_json(path, dict, hint)
    for key in keys:
        if key not in content:
            raise damaged(path, f"{key} is missing", hint)
    return content


def read_list(path: Path, hint: str = RESTORE) -> list[Any]:
    """Return the JSON list of a file.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is damaged.
    """
    content: list[Any] = _read_json(path, list, hint)
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


def _read_json(path: Path, kind: type, hint: str) -> Any:
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        raise damaged(path, error, hint) from error
    if not isinstance(content, kind):
        kinds: dict[type, str] = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a bool"}
        what = f"expected a JSON {kinds[kind].split()[1]}, got {kinds.get(type(content), 'a number')}"
        raise damaged(path, what, hint)
    return content


def is_blank(path: Path) -> bool:
    """Return whether a small file is empty, or holds zeros: what a power loss leaves of one that was not synced."""
    try:
        return not read_regular(path).strip(b"\0")
    except OSError:
        return False


def write_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a small file atomically.

    Args:
        path: The file.
        text: Its text.
        durable: Whether it is on the disk when this returns, whatever the power does.
    """
    draft = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
    draft.write_text(text, encoding="utf-8")
    if durable:
        to_disk(draft)
    draft.replace(path)
    if durable:
        to_disk(path.parent)


def wait_for(holds: Callable[[], bool], seconds: float, *, every: float = 0.2) -> bool:
    """Wait until something holds, at most so long, and return whether it does."""
    until = time.monotonic() + seconds
    while not (is_so := holds()) and time.monotonic() < until:
        time.sleep(every)
    return is_so


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
    """Return the state of a run whose status is not final: its phase while its processes live."""
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
        try:
            beats.append(read_object(file, keys=("rank", "pid", "identity", "host", "at", "step", "time", "since")))
        except FileNotFoundError:
            # It may end meanwhile.
            continue
        except RunError:
            if not is_blank(file):
                raise
    return beats


def _silent_seconds(folder: Path, *patterns: str) -> float:
    """Return the seconds since one of some files was last written, by the clock of the disk that they are on."""
    written = []
    for file in (file for pattern in patterns for file in folder.glob(pattern)):
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
    """Return the place of this process as torchrun, mpirun, srun or tunekit started it; alone if none of them did.

    Raises:
        PlanError: The launcher's variables are inconsistent.
    """
    launch = read_launch(environment)
    if launch is None or not launch.num_processes or not launch.num_local:
        return Place()
    return Place(launch.rank, launch.local_rank, launch.num_processes, launch.num_local)


JOB = "job.json"
"""Name of the file of a run folder that says which job it is."""

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""Slurm's names of states in which a job has no nodes, and will have some."""

ASK_SECONDS = 10
"""Seconds for Slurm to answer."""


def write_job(folder: Path, job_id: str) -> None:
    """Say which of Slurm's jobs a run is."""
    (folder / JOB).write_text(json.dumps({"scheduler": "slurm", "id": job_id}), encoding="utf-8")


def read_job(folder: Path) -> str | None:
    """Slurm's number of the job that a run is; None for one that is no job."""
    try:
        return str(read_object(folder / JOB, keys=("id",))["id"])
    except FileNotFoundError:
        return None


def state_of(job_id: str, phase: str) -> str:
    """Return the state of a run whose processes a job runs.

    Args:
        job_id: Slurm's number of the job.
        phase: What the run itself said last. After the end of a job that was interrupted, Slurm may start it again.
    """
    state = _slurm_state(job_id)
    if state is None:
        return phase
    if not state:
        return phase if phase in FINAL_PHASES else "died"
    if state in WAITING:
        return "queued"
    return "starting" if phase == "queued" else phase


def _slurm_state(job_id: str) -> str | None:
    """Slurm's name of the state of a job; empty where it is over, None where Slurm cannot be asked."""
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if completed.returncode != 0 and "Invalid job id" not in completed.stderr:
        return None
    # Slurm forgets a job some minutes after its end, and then says that its number is not valid.
    return completed.stdout.strip()


REQUEST = "stop.json"
"""File of a run folder in which somebody asks it to end, from any terminal and any host that sees the folder."""

REQUEST_BYTES = 256
"""Its size."""

COMMAND = "tunekit stop"
"""Source of a stop request that is no signal."""

WHO = {"SIGINT": "the user", COMMAND: f"`{COMMAND}`"}
"""Description of the source, where that is not the name of the signal."""

EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}
"""Exit codes after signals, as shells have them. 0 after SIGUSR1 and `tunekit stop`: they ask for nothing else."""


@dataclass(frozen=True)
class Request:
    """A stop request.

    Attributes:
        now: Whether it is to end at once, rather than with a checkpoint after the step.
        by: Name of the signal, or `tunekit stop`.
        grace_seconds: After which time it will be killed; None where nobody will.
        time: When, in seconds since the epoch.
    """

    now: bool
    by: str
    grace_seconds: float | None
    time: float

    @property
    def exit_code(self) -> int:
        """That of the program that trained. For torchrun a process that was stopped is none that failed."""
        return 0 if "TORCHELASTIC_RUN_ID" in os.environ else EXIT_CODES.get(self.by, 0)


def request(folder: Path, *, now: bool, by: str = COMMAND, grace_seconds: float | None = None) -> None:
    """Request a run to stop. An earlier stronger request remains."""
    before = requested(folder)
    if before is not None:
        now, by = now or before.now, before.by
        grace_seconds = before.grace_seconds if grace_seconds is None else grace_seconds
    _write_request(folder, json.dumps(asdict(Request(now, by, grace_seconds, time.time()))))


def requested(folder: Path) -> Request | None:
    """Return the stop request to a run since it began or resumed."""
    try:
        text = read_text(folder / REQUEST).strip()
    except FileNotFoundError:
        return None
    try:
        return Request(**parse_json(text)) if text.endswith("}") else None
    except (ValueError, TypeError) as error:
        raise damaged(folder / REQUEST, error, "delete it") from error


def forget_request(folder: Path) -> None:
    """Delete the request to an earlier attempt."""
    _write_request(folder, "")


def _write_request(folder: Path, text: str) -> None:
    """Write the file over itself: where one was replaced, other hosts may see the old one for a minute (NFS)."""
    file = os.open(folder / REQUEST, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(file, text.ljust(REQUEST_BYTES).encode(), 0)
    finally:
        os.close(file)


CONTINUATION = "resume.json"
"""File of a run folder that says it."""


@dataclass(frozen=True)
class Continuation:
    """Request of a resume.

    Attributes:
        step: The step of the checkpoint.
        changes: Differences from before, a phrase each.
        weights: The checkpoint, below the run folder, to start from with its weights alone, until there is a newer one.
    """

    step: int = 0
    changes: tuple[str, ...] = ()
    weights: str | None = None


def write_continuation(folder: Path, continuation: Continuation) -> None:
    """Write the request for the processes, atomically."""
    write_whole(folder / CONTINUATION, json.dumps(asdict(continuation), indent=2), durable=True)


def read_continuation(folder: Path) -> Continuation:
    """Read the request of the last resume of a run; empty if there was none.

    Raises:
        RunError: The file is damaged, or names something outside the run.
    """
    try:
        content = read_object(folder / CONTINUATION, "remove the file")
    except FileNotFoundError:
        return Continuation()
    step, changes, weights = (content.get(name) for name in ("step", "changes", "weights"))
    if not (isinstance(step, int) and isinstance(changes, list) and isinstance(weights, str | None)):
        raise damaged(folder / CONTINUATION, "not a resume request", "remove the file")
    checkpoints = (folder / CHECKPOINTS).resolve()
    if weights is not None and not (folder / weights).resolve().is_relative_to(checkpoints):
        raise RunError(f"{folder / CONTINUATION}: {weights} is not one of its checkpoints", hint="remove the file")
    return Continuation(step, tuple(map(str, changes)), weights)
