"""Free space on the disk of a run, and the errors where it is too little."""

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tunekit.errors import DiskError
from tunekit.planner.plan import gib
from tunekit.recipe.schema import Recipe
from tunekit.runs.available_actions import next_command
from tunekit.runs.checkpoints.complete import is_being_made, newest_complete
from tunekit.runs.run import RUNS, Run

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or of a user's share of it, that is full."""


RESERVE = ".room"
"""File of a run folder that is deleted where the disk is full, so that what went wrong can be written down."""

RESERVE_BYTES = 2**18

SETTLE_SECONDS = 60
"""Seconds for a checkpoint to notice that the disk is full, and to be removed."""


def hold_room(run: Run) -> None:
    """Keep room for the last words of a run."""
    # Random, for a file system that compresses.
    (run.path / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))


def give_room(run: Run) -> None:
    """Give that room back."""
    with contextlib.suppress(OSError):
        (run.path / RESERVE).unlink(missing_ok=True)


def with_room(run: Run, write: Callable[[], None]) -> None:
    """Write something small, with the room that was kept for it if there is no other.

    A checkpoint that is written meanwhile may take that room as well. It fails then, and gives back all that it took.
    """
    try:
        write()
        return
    except OSError as error:
        if error.errno not in FULL:
            raise
    give_room(run)
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        # Asked before, since the room may come right after.
        may_get_room = is_being_made(run.path) and time.monotonic() < until
        try:
            write()
            return
        except OSError as error:
            if error.errno not in FULL or not may_get_room:
                raise
        time.sleep(0.05)


@contextlib.contextmanager
def tokenizers_errors() -> Iterator[None]:
    """Within it, what the tokenizers library cannot write is an OSError: it raises bare ones (tokenizers 0.23)."""
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)$", str(error)) if type(error) is Exception else None
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def disk_full(run: Run, where: str, error: OSError) -> DiskError:
    """Return the error for a file other than a checkpoint that could not be written."""
    give_room(run)
    return DiskError(
        f"{where}: {words_of(error)}; what a run says of itself is written to {run.path}",
        hint=f"free some on its disk, then {next_command(run)}",
    )


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written where a folder lies, or will lie."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def place_of_run(recipe: Recipe) -> Path:
    """The folder that a run of a recipe will have, or will be in."""
    return RUNS if recipe.output.dir is None else Path(recipe.output.dir)


def words_of(error: BaseException) -> str:
    """Describe the error of a file."""
    if isinstance(error, OSError):
        name = "" if error.filename is None else f"{Path(error.filename).name}: "
        return f"{name}{error.strerror or error}"
    return str(error).partition("\n")[0] or type(error).__name__


def not_saved(run: Run, what: str, why: str, needed_bytes: int | None) -> DiskError:
    """Return the error for a checkpoint or result that could not be written.

    Args:
        run: The run.
        what: What was to be written.
        why: What went wrong.
        needed_bytes: How much that is, where it is known.
    """
    give_room(run)
    try:
        free = free_bytes(run.path)
    except OSError as error:
        free, why = 0, f"{why}; {run.path}: {error.strerror}"
    needs = "" if needed_bytes is None else f"; it takes {gib(needed_bytes)}, and {gib(free)} are free"
    newest = newest_complete(run.path)
    note = f"checkpoint-{newest.step} is whole" if newest.path else "there is no checkpoint yet"
    much = gib(needed_bytes - free) if needed_bytes is not None and needed_bytes > free else "some"
    on = next_command(run)
    return DiskError(
        f"{what} could not be written: {why}{needs}; {note}",
        hint=f"free {much} on the disk of {run.path}, or keep less with train.save_total_limit, then {on}",
    )
