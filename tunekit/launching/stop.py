"""Stop and delete runs from outside.

A run to stop is sent a request, and waited for until none of its processes is left: the one that trains or supervises,
its children, and theirs, each known by its identity. Processes of other hosts count by their heartbeats.

A run to delete must have ended. Its folder first gets a hidden name, atomically, so that nobody sees a part of a run;
then its files are deleted. Remains of an interrupted deletion are removed by the next one in the same folder.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tunekit.errors import RunError, TunekitError
from tunekit.launching.remaining import Remaining
from tunekit.recipe.methods import has_teacher
from tunekit.runs import small_files
from tunekit.runs.available_actions import words_of
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.reader import last_events
from tunekit.runs.record import claimed
from tunekit.runs.run import Run, list_runs

LOOK_SECONDS = 0.2
"""Seconds between two looks at the processes."""

LEAST_SECONDS = 60
"""Minimum seconds for a run to end, besides two of its longest steps and a checkpoint."""

NOW_SECONDS = 10
"""Seconds for a run that must end at once, before its processes are killed."""

TELL_SECONDS = 5
"""Seconds between two reports of what is waited for."""


def stop_run(run: Run, *, now: bool, tell: Callable[[str], None]) -> str:
    """Stop a run, and return its end once none of its processes is left.

    Args:
        run: The run.
        now: Stop at once, without another checkpoint.
        tell: Called with descriptions of what is waited for.

    Raises:
        RunError: It does not stop in time, or waits in a scheduler's queue.
    """
    state = run.state
    remaining = Remaining(run)
    if state == "queued" and run.status().get("place_in_line") is None:
        job = small_files.read_job(run.path)
        hint = f"remove it from the queue: scancel {job}" if job is not None else None
        raise RunError(f"{run.name} is queued: it has no running process", hint=hint)
    if (state in FINAL_PHASES or state == small_files.DIED) and not remaining.look():
        reason = run.status()["exit_reason"]
        return f"{run.name} is not running: it {_past(state)}{f', {reason}' if reason else ''}"
    small_files.request(run.path, now=now)
    seconds = NOW_SECONDS if now else _patience_seconds(run)
    tell(f"stopping {run.name} {'at once' if now else f'after its step, within {seconds:.0f} s'}")
    if not _wait(remaining, seconds, tell):
        if not now:
            problem = f"{run.name} did not stop within {seconds:.0f} s: {remaining.words()}"
            raise RunError(
                problem, hint=f"it will stop as soon as it can; to stop it at once: tunekit stop {run.path} --now"
            )
        remaining.kill()
        if not _wait(remaining, NOW_SECONDS, tell):
            raise RunError(f"{run.name} cannot be stopped from here: {remaining.words()}", hint="stop it on its host")
    status = run.status()
    if status["phase"] not in FINAL_PHASES:
        # Its processes were killed before they could say so.
        status["exit_reason"] = words_of(run, small_files.Request(True, small_files.COMMAND, None, time.time()))
        run.update_status(phase="interrupted", exit_reason=status["exit_reason"])
    return f"{run.name} {_past(run.state)}: {status['exit_reason']}"


def _past(state: str) -> str:
    return {"interrupted": "was interrupted", "finished": "finished", "failed": "failed"}.get(state, state)


def _wait(left: Remaining, seconds: float, tell: Callable[[str], None]) -> bool:
    """Wait until nothing is left, at most so long; whether nothing is."""
    until, reported_at, words = time.monotonic() + seconds, time.monotonic(), ""
    while left.look():
        if time.monotonic() > until:
            return False
        if time.monotonic() - reported_at > TELL_SECONDS and left.words() != words:
            reported_at, words = time.monotonic(), left.words()
            tell(f"waiting for {words}")
        time.sleep(LOOK_SECONDS)
    return True


def _patience_seconds(run: Run) -> float:
    """Return the seconds that a run may take to end with a checkpoint, from its last steps and its last checkpoint."""
    steps = [event["step_seconds"] for event in last_events(run.path / "events.jsonl") if event["event"] == "log"]
    save = run.status().get("save_seconds", 0.0)
    together = run.plan.schedule.save_together if run.plan.schedule is not None else 1
    return float(LEAST_SECONDS + (1 + together) * max(steps, default=0.0) + 2 * save)


GONE = ".deleted-"
"""Prefix of a run's name while it is deleted."""


def delete_run(run: Run) -> None:
    """Delete a run that has ended, with its checkpoints and its model.

    Args:
        run: The run.

    Raises:
        RunError: It has not ended, another process is resuming it, another run in the same folder starts from its
            model, or its folder contains more than the run.
    """
    folder = run.path.absolute()
    doomed = folder.with_name(f"{GONE}{os.getpid()}-{folder.name}")
    with claimed(run):
        _check_over(run)
        _check_alone(folder)
        beside = [other for other in list_runs(folder.parent) if other.name != run.name]
        users = [other.name for other in beside if _starts_from(other, folder)]
        if users:
            problem = f"cannot delete {run.name}: {', '.join(users)} start{'s' * (len(users) == 1)} from its model"
            raise RunError(problem, hint=f"delete {'that run' if len(users) == 1 else 'those runs'} first")
        try:
            folder.rename(doomed)
        except OSError as error:
            problem = f"cannot delete {run.path}: {error.strerror}"
            raise RunError(problem, hint="make the folder that holds it writable") from error
    for leftover in folder.parent.glob(f"{GONE}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if doomed.exists():
        raise RunError(f"{doomed} was only partly deleted", hint="delete the rest of it")


def _check_over(run: Run) -> None:
    state = run.state
    if state not in (*FINAL_PHASES, small_files.DIED):
        raise RunError(f"{run.name} is {state}", hint=f"stop it first: tunekit stop {run.path}")
    remaining = Remaining(run)
    if remaining.look():
        problem = f"{run.name} is {state}, but still running: {remaining.words()}"
        raise RunError(problem, hint=f"stop it first: tunekit stop {run.path}")


def _check_alone(folder: Path) -> None:
    """Refuse a folder in which there is more than a run."""
    if folder.is_symlink():
        raise RunError(f"{folder} is a link", hint=f"delete its target: {folder.resolve()}")
    if Path.cwd().is_relative_to(folder.resolve()):
        raise RunError(f"{folder} is the working directory, or contains it", hint="change the directory first")
    within = next((file.parent for file in folder.glob("*/**/status.json")), None)
    if within is not None:
        raise RunError(f"{folder} contains another run: {within.name}", hint="delete or move that run first")


def _starts_from(run: Run, folder: Path) -> bool:
    """Return whether a run needs the model of the run in a folder."""
    try:
        recipe = run.recipe
        # What stands in the status tells whether the plan, which takes longer to read, has more to say.
        origin = run.plan.origin if run.status().get("comes_from") else None
    except TunekitError:
        # It cannot be read any more, and so neither be gone on with.
        return False
    models = [recipe.model.path]
    models += [recipe.method.teacher.path] if has_teacher(recipe.method) else []
    models += [origin.folder, origin.base.path] if origin is not None else []
    return any(Path(path).is_dir() and Path(path).resolve().is_relative_to(folder.resolve()) for path in models)
