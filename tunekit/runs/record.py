"""Record of a run: events and status, written by one of its processes for all."""

import contextlib
import json
import shutil
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunekit.errors import ExchangeError, RunError, TunekitError
from tunekit.redact import without_secrets
from tunekit.runs.disk import with_room
from tunekit.runs.events import EventLog, Listener
from tunekit.runs.rank import Place
from tunekit.runs.run import Run
from tunekit.runs.small_files import damaged, read_object

ERRORS = "errors"
"""Folder of a run folder with the errors of its processes, by rank."""

SETTLE_SECONDS = 3
"""Seconds for the others to report what they saw, once one has failed."""


class Record:
    """Writes events and status of a run in its main process, and in every process the error that ends it.

    Args:
        run: The run.
        place: Which process this is.
        listener: Called with each event after it is written.
    """

    def __init__(self, run: Run, place: Place, listener: Listener | None = None) -> None:
        self.run = run
        self.place = place
        self._log = EventLog(run.path / "events.jsonl", listener)

    def write(self, event: str, **fields: Any) -> None:
        """Write one event, in the main process."""
        if self.place.is_main:
            with_room(self.run, lambda: self._log.write(event, **fields))

    def update_status(self, **changes: Any) -> None:
        """Change the status, in the main process."""
        if self.place.is_main:
            with_room(self.run, lambda: self.run.update_status(**changes))

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.update_status(phase=phase)
        self.write("phase", phase=phase)

    def end(self, phase: str, reason: str) -> None:
        """Say how the run ended, unless it trained to the end."""
        self.update_status(phase=phase, exit_reason=reason)
        self.write("error", message=reason)
        self.write("phase", phase=phase)

    def write_error(self, error: BaseException) -> None:
        """Write the error of this process where whoever started it looks; the earliest is the one that is shown."""
        if isinstance(error, TunekitError):
            record = error.to_words() | {"traceback": None}
        else:
            record = {"kind": type(error).__name__, "problem": str(error), "hint": None, "changes": []}
            record["traceback"] = "".join(traceback.format_exception(error))
        words = {"rank": self.place.rank, "time": time.time(), **record}
        text = json.dumps(without_secrets(words), indent=2)
        with_room(self.run, lambda: self._write_error(text))

    def _write_error(self, text: str) -> None:
        folder = self.run.path / ERRORS
        folder.mkdir(exist_ok=True)
        draft = folder / f".rank-{self.place.rank}.json"
        draft.write_text(text, encoding="utf-8")
        draft.replace(folder / f"rank-{self.place.rank}.json")


@contextlib.contextmanager
def told_if_gone(run: Run) -> Iterator[None]:
    """Within it, files that cannot be read or written as the run's folder is gone are an error that says so.

    Raises:
        RunError: The folder is gone.
    """
    try:
        yield
    except OSError as error:
        if (run.path / "status.json").exists():
            raise
        what = f"{run.path} is gone: it was deleted or moved while the run went on"
        raise RunError(what, hint="train it again, and leave its folder until it has ended") from error


def forget_errors(run: Run) -> None:
    """Take away what the processes of an earlier attempt had to say."""
    shutil.rmtree(run.path / ERRORS, ignore_errors=True)


def first_error_of(run: Run) -> dict[str, Any]:
    """Return the first error of a run that has failed, after waiting for the others to report theirs."""
    until = time.monotonic() + SETTLE_SECONDS
    while errors_of(run)[0]["kind"] == ExchangeError.__name__ and time.monotonic() < until:
        time.sleep(SETTLE_SECONDS / 20)
    return errors_of(run)[0]


def errors_of(run: Run) -> list[dict[str, Any]]:
    """Return the errors of a run's processes: the earliest first, and last those that only saw another end."""
    files = (run.path / ERRORS).glob("rank-*.json")
    errors = [_error(file) for file in files]
    return sorted(errors, key=lambda words: (words["kind"] == ExchangeError.__name__, words["time"]))


def _error(file: Path) -> dict[str, Any]:
    words = read_object(file)
    for key in ("rank", "time", "kind", "problem", "hint", "traceback"):
        if key not in words:
            raise damaged(file, f"it has no {key}")
    return words
