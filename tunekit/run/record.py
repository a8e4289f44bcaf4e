"""What a run says of itself: events and status, written by one of its processes for all."""

import json
import traceback
from typing import Any

from tunekit.errors import TunekitError
from tunekit.run.events import EventLog, Listener
from tunekit.run.place import Place
from tunekit.run.run import Run


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
            self._log.write(event, **fields)

    def update_status(self, **changes: Any) -> None:
        """Change the status, in the main process."""
        if self.place.is_main:
            self.run.update_status(**changes)

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
        mended = isinstance(error, TunekitError)
        words = {
            "rank": self.place.rank,
            "kind": type(error).__name__,
            "problem": error.problem if isinstance(error, TunekitError) else str(error),
            "hint": error.hint if isinstance(error, TunekitError) else None,
            "traceback": None if mended else "".join(traceback.format_exception(error)),
        }
        folder = self.run.path / "errors"
        folder.mkdir(exist_ok=True)
        (folder / f"rank-{self.place.rank}.json").write_text(json.dumps(words, indent=2), encoding="utf-8")
