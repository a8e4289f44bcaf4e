"""Lock of a run against a second resume or deletion: one process at a time.

Both look at what the run is at, then decide, which may take seconds, and then act. Of two that look before either has
acted, the second would act on what is no longer so: two would train in one folder, or one in a folder that is deleted.
"""

import contextlib
from collections.abc import Iterator

from filelock import FileLock, Timeout

from tunekit.errors import RunError
from tunekit.runs.disk import FULL
from tunekit.runs.run import Run

CLAIM = ".claim.lock"
"""File of a run folder that is locked meanwhile. It stays; the lock ends with its process."""


@contextlib.contextmanager
def claimed(run: Run) -> Iterator[None]:
    """Within it no other process begins to go on with a run, or deletes it.

    Raises:
        RunError: Another process does so just now, or the folder cannot be written.
    """
    claim = FileLock(run.path / CLAIM, timeout=0)
    try:
        claim.acquire()
    except Timeout:
        raise RunError(
            f"another process is about to go on with {run.name}, or deletes it", hint="look again in a moment"
        ) from None
    except OSError as error:
        # On a full disk nobody else can have it either, and runs are deleted to make room.
        if error.errno not in FULL:
            raise RunError(
                f"{run.path} cannot be written: {error.strerror}",
                hint="let it be written, or copy the run to where it can be",
            ) from error
    try:
        yield
    finally:
        claim.release()
