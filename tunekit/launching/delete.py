"""Deleting a run: of one that is over, from the disk, and of nothing else.

Its folder first gets a name that no list shows, in one step, so that nobody sees a part of a run; then its files go.
What an earlier deletion has left, because it was cut off, goes with the next one beside it.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tunekit.errors import RunError, TunekitError
from tunekit.launching.stop import words_of_what_lives
from tunekit.recipe.methods import has_teacher
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.liveness import DIED
from tunekit.runs.lock import claimed
from tunekit.runs.run import Run, list_runs

GONE = ".deleted-"
"""Prefix of a run's name while it is deleted."""


def delete_run(run: Run) -> None:
    """Delete a run that is over, with its checkpoints and its model.

    Args:
        run: The run. It is none any more afterwards.

    Raises:
        RunError: It is not over, another process is about to go on with it, another run beside it starts from its
            model, or its folder is not a run's alone.
    """
    folder = run.path.absolute()
    doomed = folder.with_name(f"{GONE}{os.getpid()}-{folder.name}")
    with claimed(run):
        _check_over(run)
        _check_alone(folder)
        beside = [other for other in list_runs(folder.parent) if other.name != run.name]
        users = [other.name for other in beside if _starts_from(other, folder)]
        if users:
            raise RunError(
                f"{run.name} cannot be deleted: {', '.join(users)} start{'s' * (len(users) == 1)} from its model",
                hint="delete what starts from it first",
            )
        try:
            folder.rename(doomed)
        except OSError as error:
            raise RunError(
                f"{run.path} cannot be deleted: {error.strerror}", hint="let its folder be written"
            ) from error
    for leftover in folder.parent.glob(f"{GONE}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if doomed.exists():
        raise RunError(f"{doomed} cannot be deleted wholly", hint="delete what is left of it")


def _check_over(run: Run) -> None:
    state = run.state
    if state not in (*FINAL_PHASES, DIED):
        raise RunError(f"{run.name} is {state}", hint=f"stop it first: tunekit stop {run.path}")
    alive = words_of_what_lives(run)
    if alive is not None:
        raise RunError(f"{run.name} is {state}, and {alive} lives", hint=f"end it first: tunekit stop {run.path}")


def _check_alone(folder: Path) -> None:
    """Refuse a folder in which there is more than a run."""
    if folder.is_symlink():
        raise RunError(f"{folder} is a link", hint=f"delete the folder that it leads to: {folder.resolve()}")
    if Path.cwd().is_relative_to(folder.resolve()):
        raise RunError(f"{folder} is the working directory, or holds it", hint="go elsewhere first")
    within = next((file.parent for file in folder.glob("*/**/status.json")), None)
    if within is not None:
        raise RunError(f"{folder} has another run in it: {within.name}", hint="delete that one first, or move it")


def _starts_from(run: Run, folder: Path) -> bool:
    """Return whether a run needs the model of the run in a folder."""
    try:
        models = list(_models(run))
    except TunekitError:
        # It cannot be read any more, and so neither be gone on with.
        return False
    return any(Path(path).is_dir() and Path(path).resolve().is_relative_to(folder.resolve()) for path in models)


def _models(run: Run) -> Iterator[str]:
    recipe = run.recipe
    yield recipe.model.path
    if has_teacher(recipe.method):
        yield recipe.method.teacher.path
    # What stands in the status tells whether the plan, which takes longer to read, has more to say.
    origin = run.plan.origin if run.status().get("comes_from") else None
    if origin is not None:
        yield from (origin.folder, origin.base.path)
