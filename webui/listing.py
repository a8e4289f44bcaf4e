"""The runs of a workspace in a line each, read from the folder once for all browsers.

Of the events only the end of the file is looked at, and of what does not change nothing a second time.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tunekit
from tunekit import frontend

FRESH_SECONDS = 1.0
"""Maximum age in seconds of a listing that is shown again."""

FINAL = ("finished", "failed", "interrupted", "died")
"""States in which nothing changes any more by itself."""


@dataclass(frozen=True)
class Line:
    """A run in the table.

    Attributes:
        name: Its name.
        state: What it is at; `unreadable` where its folder cannot be read.
        method: How it learns.
        model: What it trains.
        step: The last step that is done.
        num_steps: Of how many; None while that is not known.
        measure: What tells best whether it learns, by its name in the log.
        value: What that was last.
        held_out: What it was on held-out rows in the last evaluation.
        tokens_per_second: How fast it is, or was last.
        seconds_left: Until the last step, if it goes on as it does.
        started: When, in seconds since the epoch.
        seconds: From then until its last sign of life, pauses included.
        tags: What it was marked with.
        note: The user's note on it.
        recipe: Its recipe.
    """

    name: str
    state: str
    method: str = ""
    model: str = ""
    step: int = 0
    num_steps: int | None = None
    measure: str = "loss"
    value: float | None = None
    held_out: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    started: float = 0.0
    seconds: float | None = None
    tags: tuple[str, ...] = ()
    note: str = ""
    recipe: tunekit.Recipe | None = field(default=None, repr=False, compare=False)

    @property
    def is_over(self) -> bool:
        """True if nothing changes any more by itself."""
        return self.state in FINAL


class Listing:
    """The runs of one folder.

    Args:
        root: The folder with the run folders.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._lines: tuple[Line, ...] = ()
        self._read = float("-inf")
        self._known: dict[tuple[str, str], tuple[object, Any]] = {}
        self._compared: list[tuple[str, tunekit.Recipe]] = []
        self._fields: dict[str, dict[str, str]] = {}

    def lines(self) -> tuple[Line, ...]:
        """All runs, the newest first."""
        with self._lock:
            if time.monotonic() - self._read >= FRESH_SECONDS:
                names = [path.name for path in self._folders()]
                self._known = {key: cached for key, cached in self._known.items() if key[0] in set(names)}
                lines = [line for line in map(self._line, names) if line is not None]
                self._lines = tuple(sorted(lines, key=lambda line: line.started, reverse=True))
                self._read = time.monotonic()
            return self._lines

    def line(self, name: str) -> Line:
        """One run, as it is now.

        Raises:
            TunekitError: It was deleted.
        """
        with self._lock:
            line = self._line(name)
        if line is None:
            raise tunekit.TunekitError(f"no run {name!r} in runs", hint="it was deleted; see the table of runs")
        return line

    def fields(self, lines: Sequence[Line]) -> dict[str, dict[str, str]]:
        """Return the recipe fields in which runs differ: their values by run and key."""
        compared = [(line.name, line.recipe) for line in lines if line.recipe is not None]
        with self._lock:
            # Recipes are read once, so that the same one is the same object.
            if [(name, id(recipe)) for name, recipe in compared] == [(name, id(read)) for name, read in self._compared]:
                return self._fields
        differing = {
            key: values
            for key, values in frontend.recipe_diff(*(recipe for _, recipe in compared)).items()
            # What some recipes do not have differs where two of the others do.
            if not key.startswith("output.") and len({*values} - {None}) > 1
        }
        fields = {
            name: {key: value for key, values in differing.items() if (value := values[place]) is not None}
            for place, (name, _) in enumerate(compared)
        }
        with self._lock:
            self._compared, self._fields = compared, fields
        return fields

    def _folders(self) -> list[Path]:
        """Folders of runs; not what is only linked to from there."""
        if not self._root.is_dir():
            return []
        return [path for path in self._root.iterdir() if not path.is_symlink() and (path / "status.json").is_file()]

    def _line(self, name: str) -> Line | None:
        path = self._root / name
        try:
            run = tunekit.Run(path)
            status, state = run.status(), run.state
            recipe = self._once(path / "recipe.yaml", lambda: _asked(run))
            logs, evaluation = self._once(path / "events.jsonl", lambda: _last_logs(path))
            return Line(
                name=name,
                state=state,
                method=recipe["method"],
                model=recipe["model"],
                step=status["step"],
                num_steps=status["num_steps"],
                started=status["started"],
                seconds=status["updated"] - status["started"],
                **self._figures(logs, evaluation, state, status),
                tags=tuple(run.tags),
                note=run.note,
                recipe=recipe["recipe"],
            )
        except (tunekit.TunekitError, OSError, ValueError, KeyError):
            # It is being deleted or written just now, or was damaged, or is of another version.
            return Line(name, "unreadable") if (path / "status.json").is_file() else None

    def _figures(
        self, logs: Sequence[frontend.Event], evaluation: frontend.Event, state: str, status: dict[str, Any]
    ) -> dict[str, Any]:
        if not logs:
            return {}
        last = logs[-1]
        measure = frontend.judged_by(list(last))
        value, held_out = last.get(measure), evaluation.get(f"eval_{measure}")
        return {
            "measure": measure,
            "value": value if isinstance(value, int | float) else None,
            "held_out": held_out if isinstance(held_out, int | float) else None,
            "tokens_per_second": last.get("tokens_per_second"),
            "seconds_left": seconds_left(logs, status["num_steps"]) if state == "training" else None,
        }

    def _once(self, path: Path, read: Callable[[], Any]) -> Any:
        """Return the content of a file, read again only when the file has changed."""
        status = path.stat() if path.exists() else None
        mark = None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
        key = (path.parent.name, path.name)
        if key not in self._known or self._known[key][0] != mark:
            self._known[key] = (mark, read())
        return self._known[key][1]


@cache
def listing_of(root: Path) -> Listing:
    """The listing of a workspace, the same for all that look at it."""
    return Listing(root / "runs")


def seconds_left(logs: Sequence[frontend.Event], num_steps: int | None) -> float | None:
    """Return the remaining seconds of a run, by the clock between its last logged steps; None where these are too few.

    Evaluations and checkpoints between them count, as they will between those to come.
    """
    if num_steps is None or len(logs) < 2 or logs[-1]["step"] <= logs[0]["step"]:
        return None
    rate: float = (logs[-1]["time"] - logs[0]["time"]) / (logs[-1]["step"] - logs[0]["step"])
    return max(0.0, rate * (num_steps - int(logs[-1]["step"])))


def _asked(run: tunekit.Run) -> dict[str, Any]:
    recipe = run.recipe
    path = Path(recipe.model.path)
    # A run that went on from another one's result trains a folder with the same name in each.
    folder = path.parent.name if path.name == "model" else path.name
    model = folder if path.is_absolute() else recipe.model.path
    return {"method": recipe.method.type, "model": model, "recipe": recipe}


def _last_logs(path: Path) -> tuple[list[frontend.Event], frontend.Event]:
    """Return the last logged steps since the run was last resumed, and the last evaluation, or an empty one."""
    events = frontend.last_events(path / "events.jsonl")
    begins = [place for place, event in enumerate(events) if event["event"] in ("restart", "resume")]
    since = events[begins[-1] + 1 :] if begins else events
    logs = [event for event in since if event["event"] == "log"]
    evaluation = next((event for event in reversed(since) if event["event"] == "eval"), {})
    return logs or [event for event in events if event["event"] == "log"][-1:], evaluation
