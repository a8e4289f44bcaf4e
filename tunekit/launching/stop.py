"""Stop and delete runs from outside.

A run to stop is sent a request, and waited for until none of its processes is left: the one that trains or supervises,
its children, and theirs, each known by its identity. Processes of other hosts count by their heartbeats.

A run to delete must have ended. Its folder first gets a hidden name, atomically, so that nobody sees a part of a run;
then its files are deleted. Remains of an interrupted deletion are removed by the next one in the same folder.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tunekit.errors import RunError, TunekitError
from tunekit.process.processes import SUPERVISOR
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

SILENT_SECONDS = 20
"""Seconds of silence of another host after which its processes count as gone."""

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
    remaining = _Left(run)
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


def _wait(left: "_Left", seconds: float, tell: Callable[[str], None]) -> bool:
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


class _Left:
    """Remaining processes of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[int, str] = {}
        """Identity of each process of this host that was ever seen, by its number."""
        self._signs: dict[str, tuple[float, float]] = {}
        """Of each process of another host, the last sign of life by the disk's clock, and when it was new by ours."""
        self._elsewhere: list[dict[str, Any]] = []

    def look(self) -> bool:
        """Look again; whether anything is left."""
        status, beats = self._run.status(), small_files.beats_in(self._run.path)
        here, is_over = os.uname().nodename, status["phase"] in FINAL_PHASES
        if status["host"] == here:
            if not is_over:
                self._see(status["pid"], status["identity"], _supervised_by)
            elif not any(beat["pid"] == status["pid"] for beat in beats) and not _is_tunekit(status["pid"]):
                # A program that goes on with something else, such as a notebook.
                self._seen.pop(status["pid"], None)
        for beat in beats:
            if beat["host"] == here:
                # A program that has the run in itself may have started others before.
                since = status["started"] if beat["pid"] == status["pid"] else 0.0
                self._see(beat["pid"], beat["identity"], partial(_started_by, since=since))
        self._seen = {pid: identity for pid, identity in self._seen.items() if small_files.is_alive(pid, identity)}
        self._elsewhere = [beat for beat in beats if beat["host"] != here and self._gives_signs(beat)]
        waits_for_word = status["host"] != here and not is_over and self._run.state != small_files.DIED
        return bool(self._seen or self._elsewhere or waits_for_word)

    def kill(self) -> None:
        """End what is left on this host."""
        for pid, identity in self._seen.items():
            small_files.kill(pid, identity)

    def words(self) -> str:
        """Describe the remaining processes: what each one does, and since when."""
        status = self._run.status()
        beats = sorted(small_files.beats_in(self._run.path), key=lambda beat: int(beat["rank"]))
        descriptions = []
        for beat in beats:
            where = f" on {beat['host']}" if beat in self._elsewhere else ""
            if where or beat["pid"] in self._seen:
                words = f"rank {beat['rank']}{where} in {beat['at']} of step {beat['step']}"
                descriptions.append(f"{words} for {max(0.0, beat['time'] - beat['since']):.0f} s")
        ranks = {beat["pid"] for beat in beats}
        unranked = [str(pid) for pid in self._seen if pid not in ranks]
        if unranked:
            descriptions.append(f"process{'es' * (len(unranked) > 1)} {', '.join(unranked)}")
        return "; ".join(descriptions) or f"a status from process {status['pid']} on {status['host']}"

    def _see(self, pid: int, identity: str, others_of: Callable[[int], Iterator[psutil.Process]]) -> None:
        """Remember a process with those that it started for the run: they are nobody's when it is gone."""
        if not small_files.is_alive(pid, identity):
            return
        self._seen[pid] = identity
        for other in others_of(pid):
            child_identity = small_files.identity_of(other.pid)
            if child_identity is not None:
                self._seen.setdefault(other.pid, child_identity)

    def _gives_signs(self, beat: dict[str, Any]) -> bool:
        name = f"rank-{beat['rank']}.json"
        with contextlib.suppress(FileNotFoundError):
            written = (self._run.path / small_files.RANKS / name).stat().st_mtime
            before, since = self._signs.get(name, (0.0, 0.0))
            if written != before:
                since = time.monotonic()
            self._signs[name] = written, since
            return time.monotonic() - since < SILENT_SECONDS
        return False


def _started_by(pid: int, since: float) -> Iterator[psutil.Process]:
    """All processes that one has started since then, and these have."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from (child for child in psutil.Process(pid).children(recursive=True) if child.create_time() >= since - 1)


def _is_tunekit(pid: int) -> bool:
    """Return whether a process runs nothing but tunekit."""
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(pid).cmdline()[1:4]
        return any(Path(word).name == "tunekit" or word.startswith("tunekit.") for word in words)
    return False


def _supervised_by(pid: int) -> Iterator[psutil.Process]:
    """The processes of runs that one supervises. It may have started others besides."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            if child.environ().get(SUPERVISOR) == str(pid):
                yield child


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
    remaining = _Left(run)
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
