"""Diagnosis of a run that ended early, from the files that its processes wrote.

Nothing is guessed from a log. An error says of itself of which kind it is and which changes of the recipe mend it (see
`tunekit.errors`); a run that wrote none was ended from outside, or its machine was.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunekit import errors
from tunekit.errors import TunekitError, kind_named
from tunekit.process.processes import LOG
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.record import errors_of
from tunekit.runs.run import Run
from tunekit.runs.small_files import DIED, STUCK
from tunekit.training.checkpointing.resume import effects_of

Cause = Literal["memory", "non_finite", "rows", "package", "model", "disk", "hung", "lost", "killed", "defect", "other"]
"""Cause of a failure: `hung`, where a process made no progress; `lost`, where others were waited for in vain; `killed`,
where processes died without an error; `defect`, an unexpected exception of tunekit, of a library or of the user's own
functions."""

CAUSES: tuple[tuple[type[TunekitError], Cause], ...] = (
    (errors.MemoryShortError, "memory"),
    (errors.NonFiniteError, "non_finite"),
    (errors.DiskError, "disk"),
    (errors.StandstillError, "hung"),
    (errors.ExchangeError, "lost"),
    (errors.HostLostError, "lost"),
    (errors.DataWorkerError, "rows"),
    (errors.DataError, "rows"),
    (errors.DependencyError, "package"),
    (errors.ModelError, "model"),
)
"""Cause of each kind of error; the first that matches counts."""

REPEATED: tuple[Cause, ...] = ("memory", "non_finite", "rows")
"""Causes that come again at the same place where nothing is changed."""

KILLED = re.compile("was (killed|ended) by SIG[A-Z]|without an error message|no word of why")
"""Exit reasons of processes that were killed, as this and earlier versions word them."""

TAIL_BYTES = 8192
"""Of a log that is shown."""


@dataclass(frozen=True)
class Diagnosis:
    """Reason that a run ended early.

    Attributes:
        cause: What it comes down to.
        what: What went wrong and where, in words.
        hint: What to do about it; None where nobody knows.
        rank: The process that failed first; None where none told.
        changes: Changes of the recipe that mend it, each as `key=value`; none where they are not known, or where
            nothing of the recipe is at fault.
        can_go_on: Whether it can be resumed from a checkpoint, with these changes if there are any, and would not
            fail there again.
        trace: Where in a program it failed, as a traceback or as the stacks of processes; None where that says nothing.
        log: The end of what the libraries said.
    """

    cause: Cause
    what: str
    hint: str | None
    rank: int | None
    changes: tuple[str, ...]
    can_go_on: bool
    trace: str | None
    log: str


def diagnose_run(run: Run) -> Diagnosis | None:
    """Diagnose a run that ended early or hangs; None for one that is well, or was stopped."""
    state, status = run.state, run.status()
    if state not in ("failed", DIED, STUCK):
        return None
    error = next(iter(errors_of(run)), None)
    log = _tail(_log_of(run, None if error is None else error["rank"]))
    if error is None:
        cause, what = _without_word(run, state, status)
        return Diagnosis(cause, what, None, None, (), _can_go_on(run, ()), None, log)
    changes, cause = tuple(error.get("changes", ())), _cause_of(error["kind"])
    return Diagnosis(
        cause=cause,
        what=error["problem"] if error["traceback"] is None else f"{error['kind']}: {error['problem']}",
        hint=error["hint"],
        rank=error["rank"],
        changes=changes,
        can_go_on=(bool(changes) or cause not in REPEATED) and _can_go_on(run, changes),
        trace=error["traceback"] or _stacks_of(run),
        log=log,
    )


def _cause_of(kind: str) -> Cause:
    error_class = kind_named(kind)
    if error_class is None:
        return "package" if kind in (ModuleNotFoundError.__name__, ImportError.__name__) else "defect"
    return next((cause for error, cause in CAUSES if issubclass(error_class, error)), "other")


def _without_word(run: Run, state: str, status: dict[str, Any]) -> tuple[Cause, str]:
    """Return the cause for a run whose processes wrote no error, and its description."""
    where = f"in step {status['step'] + 1}" if status["phase"] == "training" else f"while {status['phase']}"
    if state == STUCK:
        return (
            "hung",
            f"{where}: the training processes have exited, and process {status['pid']} is still waiting for them",
        )
    if state == DIED:
        return "killed", (
            f"{where}: process {status['pid']} on {status['host']} exited without an error message: it was killed, "
            "host memory ran out, or the machine went down"
        )
    reason = str(status["exit_reason"])
    return "killed" if KILLED.search(reason) else "other", reason


def _can_go_on(run: Run, changes: Sequence[str]) -> bool:
    if newest_complete(run.path).path is None or run.plan.layout.why_not_resumed is not None:
        return False
    try:
        return all(effect.effect == "takes effect" for effect in effects_of(run, changes))
    except TunekitError:
        return False


def _stacks_of(run: Run) -> str | None:
    """Return the stacks of all processes where one hung; None where none did."""
    files = sorted((run.path / "stacks").glob("rank-*.txt"))
    return "\n".join(f"{file.stem}:\n{_tail(file)}" for file in files) or None


def _log_of(run: Run, rank: int | None) -> Path:
    own = run.path / ("log.txt" if not rank else f"log-{rank}.txt")
    launcher = run.path / LOG
    return launcher if rank is None and launcher.is_file() and launcher.stat().st_size else own


def _tail(path: Path) -> str:
    """The last lines of a file."""
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - TAIL_BYTES))
        text = stream.read().decode("utf-8", errors="replace")
    return text if size <= TAIL_BYTES else text.partition("\n")[2]
