"""Work on the results of runs: by whom it was begun does not matter, every browser sees how far it is.

What comes of it lies on the disk; only the work itself is the server's.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr

import tunekit
from webui import work
from webui.failures import in_words


class Tab(NamedTuple):
    """A tab of a run's page that shows such work, and is asked for news with the other tabs at once.

    Attributes:
        look: Returns the values of the outputs, by the run's name and what a browser has seen.
        outputs: The outputs, first what a browser has seen.
    """

    look: Callable[[str, str], list[Any]]
    outputs: list[gr.Component]


@dataclass(frozen=True)
class Progress:
    """Progress of a job.

    Attributes:
        phase: What is done; `waiting` at first, `done` or `failed` at the end.
        done: How much of that is done.
        total: Of how much; None where that is not known.
        error: Why it failed.
        result: What the function returned, once it is done.
    """

    phase: str
    done: int = 0
    total: int | None = None
    error: tunekit.TunekitError | None = None
    result: Any = None

    @property
    def is_over(self) -> bool:
        """True if nothing more happens."""
        return self.phase in ("done", "failed")


class Jobs:
    """Jobs of one kind, one at a time for each run.

    Args:
        function: The function of tunekit that does the work.
        doing: What it does with a run, in words, such as `exported`.
        progress_in: What an event of it says; None: nothing.
    """

    def __init__(self, function: str, doing: str, progress_in: Callable[[dict[str, Any]], Progress | None]) -> None:
        self._function, self._doing, self._progress_in = function, doing, progress_in
        self._lock = threading.Lock()
        self._progress: dict[Path, Progress] = {}

    def progress_of(self, run: tunekit.Run) -> Progress | None:
        """Return the progress of the newest job of a run on this server; None where there is none."""
        with self._lock:
            return self._progress.get(run.path)

    def begin(self, run: tunekit.Run, *args: Any, **options: Any) -> None:
        """Begin a job, and come back at once.

        Args:
            run: The run.
            args: Further arguments of the function, plain data.
            options: Its named arguments.

        Raises:
            TunekitError: Another job of the run is under way.
        """
        with self._lock:
            now = self._progress.get(run.path)
            if now is not None and not now.is_over:
                raise tunekit.TunekitError(
                    f"{run.name} is already being {self._doing}", hint="wait until that finishes"
                )
            self._progress[run.path] = Progress("waiting")

        def on_event(event: dict[str, Any]) -> None:
            progress = self._progress_in(event)
            if progress is not None:
                self._set(run, progress)

        def work_on() -> None:
            try:
                result = work.call(self._function, str(run.path), *args, on_event=on_event, **options)
            except Exception as error:  # noqa: BLE001  (pages wait for its end, whichever it is)
                self._set(run, Progress("failed", error=in_words(error)))
            else:
                self._set(run, Progress("done", result=result))

        threading.Thread(target=work_on, name=self._function, daemon=True).start()

    def _set(self, run: tunekit.Run, progress: Progress) -> None:
        with self._lock:
            self._progress[run.path] = progress
