"""The wish that a run ends: a file in its folder, whoever has the wish and wherever the run's processes are.

`tunekit stop` writes it, and so does every process of the run that gets a signal: then all know of it.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Literal

from tunekit.files import parse_json
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.run import Run
from tunekit.runs.small_files import damaged, read_text

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
