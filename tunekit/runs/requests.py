"""Requests to a run: to stop, and to resume.

The wish that a run ends: a file in its folder, whoever has the wish and wherever the run's processes are.

`tunekit stop` writes it, and so does every process of the run that gets a signal: then all know of it.

Request of the last resume of a run, left by the command for the processes: `resume.json`.

Check that the small files of a run can be read, before anything expensive relies on them.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Literal

from tunekit.errors import RunError
from tunekit.files import parse_json
from tunekit.runs.checkpoints.complete import CHECKPOINTS, newest_complete
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.run import Run
from tunekit.runs.small_files import damaged, read_object, read_text

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


def request(run: Run, *, now: bool, by: str = COMMAND, grace_seconds: float | None = None) -> None:
    """Ask a run to end. What was asked before stands where it is more."""
    before = requested(run)
    if before is not None:
        now, by = now or before.now, before.by
        grace_seconds = before.grace_seconds if grace_seconds is None else grace_seconds
    _write(run, json.dumps(asdict(Request(now, by, grace_seconds, time.time()))))


def requested(run: Run) -> Request | None:
    """Return the stop request to a run since it began or resumed."""
    try:
        text = read_text(run.path / REQUEST).strip()
    except FileNotFoundError:
        return None
    try:
        return Request(**parse_json(text)) if text.endswith("}") else None
    except (ValueError, TypeError) as error:
        raise damaged(run.path / REQUEST, error, "delete it") from error


def stop_wish(run: Run) -> Literal["after the step", "now"] | None:
    """Return how a run that is not over was asked to stop; None where it was not."""
    request = None if run.state in FINAL_PHASES else requested(run)
    return None if request is None else "now" if request.now else "after the step"


def forget_request(run: Run) -> None:
    """Take away what an earlier attempt was asked."""
    _write(run, "")


def _write(run: Run, text: str) -> None:
    """Write the file over itself: where one was replaced, other hosts may see the old one for a minute (NFS)."""
    file = os.open(run.path / REQUEST, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(file, text.ljust(REQUEST_BYTES).encode(), 0)
    finally:
        os.close(file)


def words_of(run: Run, asked: Request, *, is_late: bool = False) -> str:
    """Describe where and by whom a run was stopped, and from where it can resume.

    Args:
        run: The run, whose processes have ended or end now.
        asked: What it was asked.
        is_late: Whether there was no time left for a checkpoint.
    """
    step, saved = run.status()["step"], newest_complete(run.path).step
    no_layout = run.plan.layout.why_not_resumed is not None
    checkpoint = f"checkpoint of step {saved}" if saved else "no checkpoint"
    if not saved and no_layout:
        checkpoint = "this layout has no checkpoints"
    elif saved < step and is_late:
        checkpoint = f"no time left for another checkpoint; {checkpoint}"
    return f"stopped by {WHO.get(asked.by, asked.by)} at step {step}, {checkpoint}"


CONTINUATION = "resume.json"
"""File of a run folder that says it."""


@dataclass(frozen=True)
class Continuation:
    """Request of a resume.

    Attributes:
        step: The step of the checkpoint.
        changes: What is otherwise than before, a phrase each.
        weights: The checkpoint, below the run folder, of which only the weights are taken, while there is no newer one.
    """

    step: int = 0
    changes: tuple[str, ...] = ()
    weights: str | None = None


def write_continuation(run: Run, continuation: Continuation) -> None:
    """Leave it to the processes; they find this one or the one before."""
    draft = run.path / f".{CONTINUATION}"
    draft.write_text(json.dumps(asdict(continuation), indent=2), encoding="utf-8")
    draft.replace(run.path / CONTINUATION)


def read_continuation(run: Run) -> Continuation:
    """Read the request of the last resume of a run; empty if there was none.

    Raises:
        RunError: The file is damaged, or names something outside the run.
    """
    try:
        content = read_object(run.path / CONTINUATION, hint="remove the file")
    except FileNotFoundError:
        return Continuation()
    step, changes, weights = (content.get(name) for name in ("step", "changes", "weights"))
    if not (isinstance(step, int) and isinstance(changes, list) and isinstance(weights, str | None)):
        raise damaged(run.path / CONTINUATION, "it is no continuation", "remove the file")
    checkpoints = (run.path / CHECKPOINTS).resolve()
    if weights is not None and not (run.path / weights).resolve().is_relative_to(checkpoints):
        raise RunError(f"{run.path / CONTINUATION}: {weights} is none of its checkpoints", hint="remove the file")
    return Continuation(step, tuple(map(str, changes)), weights)


def check_readable(run: Run) -> None:
    """See that status, recipe and plan of a run can be read.

    Raises:
        RunError: One of them is gone or damaged.
    """
    name = "status.json"
    try:
        run.status()
        name = "recipe.yaml"
        read_text(run.path / name)
        name = "plan.yaml"
        _ = run.plan
    except OSError as error:
        raise RunError(
            f"{run.path / name} cannot be read: {error.strerror}", hint="the run's folder is damaged"
        ) from error
