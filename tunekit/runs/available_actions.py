"""Descriptions of a run for users: its stop, and the next possible commands. Nothing heavy is loaded."""

import shlex
from collections.abc import Sequence
from typing import Literal

from tunekit.errors import RunError
from tunekit.runs.checkpoints.complete import CHECKPOINTS, command_anew, newest_complete
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.run import Run
from tunekit.runs.small_files import WHO, Request, read_continuation, read_text, requested

TO_THE_END = "train.early_stopping_patience=null"
"""Edit of a recipe with which a run that stopped early trains further."""


def stop_wish(run: Run) -> Literal["after the step", "now"] | None:
    """Return how a run that is not over was asked to stop; None where it was not."""
    request = None if run.state in FINAL_PHASES else requested(run.path)
    return None if request is None else "now" if request.now else "after the step"


def words_of(run: Run, asked: Request, *, is_late: bool = False) -> str:
    """Describe where and by whom a run was stopped, and from where it can resume.

    Args:
        run: The run, whose processes have ended or end now.
        asked: The stop request.
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


def check_readable(run: Run) -> None:
    """Check that status, recipe and plan of a run can be read.

    Raises:
        RunError: One of them is missing or damaged.
    """
    name = "status.json"
    try:
        run.status()
        name = "recipe.yaml"
        read_text(run.path / name)
        name = "plan.yaml"
        _ = run.plan
    except OSError as error:
        problem = f"{run.path / name} cannot be read: {error.strerror}"
        raise RunError(problem, hint="the run folder is damaged") from error


ENDED_EARLY = ("failed", "interrupted", "died")
"""States of a run that ended before its last step."""


def has_checkpoints(run: Run) -> bool:
    """Return whether a run has saved anything, complete or not."""
    began = read_continuation(run.path).weights is not None
    return began or any((run.path / CHECKPOINTS).glob("checkpoint-*"))


def can_go_on(run: Run) -> bool:
    """Return whether a run has a complete checkpoint."""
    return newest_complete(run.path).path is not None


def begins_with_weights(run: Run) -> bool:
    """Return whether a run began with the weights of a checkpoint that still exists."""
    weights = read_continuation(run.path).weights
    return weights is not None and (run.path / weights).is_dir()


def prospects(run: Run) -> str | None:
    """Describe the next possible commands in a sentence; None for a run that has not ended."""
    state, name = run.state, shlex.quote(str(run.path))
    if state not in ("finished", *ENDED_EARLY):
        return None
    newest = newest_complete(run.path)
    if state == "finished":
        change = "train.max_steps=N" if run.result().get("stopped_early") is None else TO_THE_END
        return None if newest.path is None else f"`tunekit resume {name} {change}` trains further"
    anew = f"`{begin_anew(run)}` starts over"
    if newest.path is not None:
        back = "" if not newest.skipped else f" ({'; '.join(newest.skipped)})"
        num_steps = run.status()["num_steps"]
        return f"`tunekit resume {name}` resumes from step {newest.step} of {num_steps}{back}"
    if newest.skipped:
        words = "; ".join(newest.skipped)
        return f"no complete checkpoint ({words}): `tunekit resume {name} --weights-only`, or {anew}"
    if begins_with_weights(run):
        return f"`tunekit resume {name}` starts over from the weights it started with"
    return f"no checkpoint to resume from: {anew}"


def begin_anew(run: Run, changes: Sequence[str] = ()) -> str:
    """Return the command that starts a run over, with changes of its recipe or as it is."""
    return command_anew(run.path, changes, in_place=run.state != "finished" and not has_checkpoints(run))


def next_command(run: Run) -> str:
    """Return the command that completes a run that ended early, with its label."""
    no_layout = run.plan.layout.why_not_resumed is not None
    if not no_layout and (can_go_on(run) or begins_with_weights(run)):
        return f"resume with: tunekit resume {shlex.quote(str(run.path))}"
    return f"start over: {begin_anew(run)}"
