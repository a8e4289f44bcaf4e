"""State of a run, and the available actions: read from its folder, once a second for all browsers.

Nothing of it is kept that the folder does not say, but for what those are waiting for who asked a run to end here.
"""

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import tunekit
from tunekit import frontend
from webui.failures import in_words
from webui.history import history_of

OVER = ("finished", "failed", "interrupted", "died")
"""States of a run of which nothing is left to stop."""

FRESH_SECONDS = 1.0
"""Maximum age in seconds of an answer that is given again."""

MAX_KEPT = 100
"""Runs of which the last answer is kept."""


@dataclass(frozen=True)
class Situation:
    """State of a run.

    Attributes:
        state: Its state.
        step: Steps that are done.
        num_steps: Steps in all, where that is known.
        updated: When the run itself said so last, in seconds since the epoch.
        place: Its place in the line of runs that wait for devices; None where it does not wait there.
        behind: The runs that it waits for.
        wish: When it was asked to end; None where it was not, or is over.
        stopping: What is waited for, in words, while it ends that was asked to here; None where nothing is.
        stopped: How it ended that was asked to here, or why it did not, in words.
        tags: Its tags.
        note: The user's note on it.
        checkpoints: Its checkpoints, once it is over.
        diagnosis: Why it ended before it was done, where that is so.
        is_read: Whether all that happened was read; the losses of the checkpoints are told then.
    """

    state: str
    step: int
    num_steps: int | None
    updated: float
    place: int | None = None
    behind: tuple[str, ...] = ()
    wish: str | None = None
    stopping: str | None = None
    stopped: str | None = None
    tags: tuple[str, ...] = ()
    note: str = ""
    checkpoints: tuple[frontend.Checkpoint, ...] = ()
    diagnosis: frontend.Diagnosis | None = None
    is_read: bool = True

    @property
    def is_over(self) -> bool:
        """True if nothing of it runs."""
        return self.state in OVER and self.stopping is None

    @property
    def can_go_on(self) -> bool:
        """True if it has a checkpoint to resume from, and has ended."""
        return self.is_over and any(checkpoint.fault is None for checkpoint in self.checkpoints)


@dataclass
class _Ending:
    """Progress of a stop that was requested here."""

    is_now: bool
    words: str = ""
    ended: float | None = None
    """Time when it was over, or given up; None before."""


@dataclass
class _Kept:
    """The last answer of a run."""

    time: float = 0.0
    situation: Situation | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_kept: dict[Path, _Kept] = {}
_endings: dict[Path, _Ending] = {}
_lock = threading.Lock()


def situation_of(run: tunekit.Run) -> Situation:
    """Return the state of a run.

    Raises:
        TunekitError: It was deleted meanwhile.
    """
    path = run.path.resolve()
    with _lock:
        if len(_kept) > MAX_KEPT:
            _kept.clear()
        cache = _kept.setdefault(path, _Kept())
    with cache.lock:
        if cache.situation is None or time.monotonic() - cache.time > FRESH_SECONDS:
            try:
                cache.situation = _look(run, cache.situation)
            except FileNotFoundError as error:
                raise tunekit.TunekitError(f"{run.name} no longer exists", hint="it was deleted or moved") from error
            cache.time = time.monotonic()
        return _with_ending(cache.situation, _endings.get(path))


def forget(run: tunekit.Run) -> None:
    """Look again when asked next: something was done with the run."""
    with _lock:
        _kept.pop(run.path.resolve(), None)


def stop(run: tunekit.Run, *, now: bool) -> None:
    """Ask a run to end, and wait in the background until nothing of it is left."""
    path = run.path.resolve()
    with _lock:
        before = _endings.get(path)
        if before is not None and before.ended is None and before.is_now >= now:
            return
        ending = _endings[path] = _Ending(now)
    threading.Thread(target=_wait_for_end, args=(run, ending), name=f"end of {run.name}", daemon=True).start()


def _wait_for_end(run: tunekit.Run, ending: _Ending) -> None:
    def tell(words: str) -> None:
        ending.words = words

    try:
        ending.words = tunekit.stop(run, now=ending.is_now, on_wait=tell)
    except Exception as error:  # noqa: BLE001  (pages wait for its end, whichever it is)
        ending.words = str(in_words(error))
    ending.ended = time.time()
    forget(run)


def _look(run: tunekit.Run, before: Situation | None) -> Situation:
    status, state = run.status(), run.state
    situation = Situation(
        state=state,
        step=status["step"],
        num_steps=status["num_steps"],
        updated=status["updated"],
        place=status.get("place_in_line") if state == "queued" else None,
        behind=_behind(run) if state == "queued" else (),
        wish=frontend.stop_wish(run),
        tags=tuple(run.tags),
        note=run.note,
    )
    if state in OVER or state == "stuck":
        if before is not None and before.is_read and (before.state, before.updated) == (state, situation.updated):
            # What is over does not change by itself.
            return replace(situation, checkpoints=before.checkpoints, diagnosis=before.diagnosis)
        with history_of(run) as reader:
            checkpoints = tuple(tunekit.checkpoints(run, reader))
            is_read = not reader.is_behind
        return replace(situation, checkpoints=checkpoints, diagnosis=frontend.diagnose_run(run), is_read=is_read)
    return situation


def _behind(run: tunekit.Run) -> tuple[str, ...]:
    events = [event for event in frontend.last_events(run.path / "events.jsonl") if event["event"] == "queue"]
    return tuple(events[-1]["behind"]) if events else ()


def _with_ending(found: Situation, ending: _Ending | None) -> Situation:
    if ending is None:
        return found
    if ending.ended is None:
        return replace(found, stopping=ending.words, wish="now" if ending.is_now else "after the step")
    # What was said of an earlier end is nothing to a run that went on since.
    is_of_this_end = found.updated <= ending.ended if found.state in OVER else found.wish is not None
    return replace(found, stopped=ending.words) if is_of_this_end else found
