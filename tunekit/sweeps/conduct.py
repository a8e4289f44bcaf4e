"""Conductor of a sweep: starts its runs, one after another or several at a time, until none is left.

Each run is a process of its own that outlives this one. The next action is always derived from the run folders, so
another conductor can replace one that was killed: it waits for runs that still train, resumes those that ended early,
and starts those that have not begun.
"""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from filelock import Timeout

from tunekit.api.background import start
from tunekit.api.devices import devices
from tunekit.errors import RunError, Stopped, TunekitError
from tunekit.launching.local import devices_of
from tunekit.launching.stop import stop_run
from tunekit.planner.variants import to_words
from tunekit.runs.events import FINAL_PHASES, Event
from tunekit.runs.run import set_tags
from tunekit.runs.small_files import COMMAND, EXIT_CODES, WHO, read_object, request, write_whole
from tunekit.sweeps import folder
from tunekit.sweeps.folder import Outcome, Sweep, Trial, find_sweep, runs_of
from tunekit.sweeps.study import Study, check_installed

LOOK_SECONDS = 0.3
"""Seconds between two looks at the runs."""

OVER = (*FINAL_PHASES, "died", "stuck", "pruned")
"""States of runs that are waited for no longer."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def resume_sweep(sweep: Sweep | str | Path, *, on_event: Callable[[Event], None] | None = None) -> Sweep:
    """Resume a sweep: train all runs that have not finished or failed.

    Args:
        sweep: The sweep, its folder, or its name in `sweeps/`.
        on_event: Called whenever a run starts or ends.

    Raises:
        RunError: There is no such sweep, or another process is running it.
        Stopped: The sweep was stopped again.
    """
    existing = sweep if isinstance(sweep, Sweep) else find_sweep(str(sweep), exact=True)
    if existing.spec.search == "optuna":
        check_installed()
    conduct(existing, on_event)
    return existing


def stop_sweep(sweep: Sweep | str | Path, *, now: bool = False, on_wait: Callable[[str], None] | None = None) -> str:
    """Stop a sweep from any machine that sees its folder, and return when its runs have stopped.

    Args:
        sweep: The sweep, its folder, or its name in `sweeps/`.
        now: Stop its runs at once, without another checkpoint.
        on_wait: Called with descriptions of what is waited for.

    Returns:
        A description of the states of its runs.
    """
    existing = sweep if isinstance(sweep, Sweep) else find_sweep(str(sweep), exact=True)
    tell = on_wait or (lambda words: None)
    if existing.is_conducted():
        write_whole(existing.path / folder.STOP, json.dumps({"now": now}))
        tell(f"stopping {existing.name}")
        while existing.is_conducted():
            time.sleep(LOOK_SECONDS)
    # Runs that have lost their conductor, or began when it ended.
    _stop_runs(existing, now=now, tell=tell)
    return f"{existing.name}: {stand_of(existing.outcomes())}"


def conduct(sweep: Sweep, on_event: Callable[[Event], None] | None) -> None:
    """See all runs of a sweep to their end.

    Raises:
        RunError: Another process does so.
        Stopped: It was asked to end, and its runs have.
    """
    try:
        with sweep.conductor(), _Signals(sweep) as signals:
            (sweep.path / folder.STOP).unlink(missing_ok=True)
            _Conductor(sweep, signals, on_event).run()
    except Timeout:
        hint = f"stop it there with Ctrl-C, or with: tunekit stop {sweep.path}"
        raise RunError(f"another process is running {sweep.path}", hint=hint) from None


def stand_of(outcomes: list[Outcome]) -> str:
    """Describe how many runs are in which state."""
    states = [outcome.state for outcome in outcomes]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states))) or "no run yet"


class _Conductor:
    """Conductor of a sweep: starts its runs, and waits for them."""

    def __init__(self, sweep: Sweep, signals: "_Signals", on_event: Callable[[Event], None] | None) -> None:
        self._sweep, self._signals, self._on_event = sweep, signals, on_event
        self._spec = sweep.spec
        self._study = Study(sweep) if self._spec.search == "optuna" else None
        self._tried: set[int] = set()
        """Numbers of those that this conductor began or went on with: once each."""
        self._live: set[int] = set()
        self._tagged: set[int] = set()
        self._num_evaluations: dict[int, int] = {}
        """Of each run that goes on, as many as were looked at."""

    def run(self) -> None:
        """Until no run is left, or it is to end."""
        # A conductor that was killed may have started a process that has no folder yet.
        while self._signals.asked is None and self._is_one_beginning():
            self._signals.wait(LOOK_SECONDS)
        while True:
            self._look()
            if self._signals.asked is not None:
                self._end(self._signals.asked)
            if len(self._live) < self._spec.parallel:
                trial = self._next()
                if trial is not None:
                    self._begin(trial)
                    continue
            if not self._live:
                if self._study is not None:
                    self._study.tell(self._sweep.outcomes())
                return
            self._signals.wait(LOOK_SECONDS)

    def _look(self) -> None:
        """Find the runs that go on, and tell of those that have ended."""
        for trial in self._sweep.trials():
            self._tag(trial)
            state = self._sweep.state_of(trial)
            if state not in (*OVER, folder.WAITING):
                self._live.add(trial.number)
                # One that somebody ends meanwhile is not begun again.
                self._tried.add(trial.number)
                self._prune(trial)
            elif trial.number in self._live:
                self._live.remove(trial.number)
                self._tell("ended", trial)

    def _tag(self, trial: Trial) -> None:
        """Tag a run once, whoever has begun it: the user may take the tag away."""
        run = self._sweep.run_of(trial) if trial.number not in self._tagged else None
        if run is not None:
            self._tagged.add(trial.number)
            if self._sweep.tag not in run.tags:
                set_tags(run, [*run.tags, self._sweep.tag])

    def _next(self) -> Trial | None:
        """The combination that comes next; None where there is none for now."""
        trials = self._sweep.trials()
        for trial in trials:
            state = self._sweep.state_of(trial)
            # What could not even begin may have been for a reason that is gone.
            is_to_do = state in folder.TO_DO or (state == folder.FAILED and trial.problem is not None)
            if is_to_do and trial.number not in self._tried | self._live:
                return trial
        if self._study is None or len(trials) >= self._spec.num_runs:
            return None
        trial = Trial(len(trials) + 1, self._study.ask(self._sweep.outcomes()))
        self._sweep.write(trial)
        return trial

    def _begin(self, trial: Trial) -> None:
        """Begin a run, or go on with it."""
        self._tried.add(trial.number)
        self._tell("begins", trial)
        words = [*to_words(trial.changes), self._place_word(trial)]
        try:
            named = [self._free_device()] if self._spec.one_device_each else None
            # On a processor that several share, each would wait for the others.
            queue = self._spec.one_device_each or self._spec.parallel == 1
            start(self._sweep.path / folder.RECIPE, words, resume=True, devices=named, queue=queue)
        except TunekitError as error:
            self._sweep.write(replace(trial, problem=str(error)))
            self._tell("ended", trial)
            return
        if trial.problem is not None:
            self._sweep.write(replace(trial, problem=None))
        self._live.add(trial.number)

    def _place_word(self, trial: Trial) -> str:
        """The word of a run's command line that no other has."""
        return f"output.dir={json.dumps(str(self._sweep.run_path(trial)))}"

    def _is_one_beginning(self) -> bool:
        """Return whether there is a process of a run that has no folder yet."""
        words = {self._place_word(trial) for trial in self._sweep.trials() if self._sweep.run_of(trial) is None}
        return any(words.intersection(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))

    def _free_device(self) -> str:
        """The accelerator that no run of this sweep has, and others use least."""
        runs = [run for trial, run in runs_of(self._sweep) if trial.number in self._live]
        busy = {uuid for run in runs for uuid in devices_of(run.plan)}
        free = [device for device in devices() if device.uuid not in busy]
        if not free:
            raise RunError("fewer accelerators than at the start of the sweep", hint="start the sweep over")
        return min(free, key=lambda device: (len(device.runs) + len(device.waiting), -device.free_bytes)).uuid

    def _prune(self, trial: Trial) -> None:
        """End a run whose evaluations fall behind those of others, where Optuna looks after that."""
        run = self._sweep.run_of(trial)
        if self._study is None or run is None:
            return
        if not trial.is_pruned:
            num = sum(event["event"] == "eval" for event in run.events())
            if num <= self._num_evaluations.get(trial.number, 1):
                return
            self._num_evaluations[trial.number] = num
            outcome = next(outcome for outcome in self._sweep.outcomes() if outcome.trial.number == trial.number)
            if not self._study.falls_behind(outcome):
                return
            self._sweep.write(replace(trial, is_pruned=True))
        stop_run(run, now=True, tell=lambda words: None)

    def _end(self, asked: str) -> None:
        """End all runs, and say so."""
        if self._on_event is not None:
            self._on_event({"event": "stop", "by": asked, "again": asked == "SIGINT"})
        _stop_runs(self._sweep, now=self._signals.now, tell=lambda words: None)
        self._look()
        raise Stopped(
            f"stopped by {WHO.get(asked, asked)}: {stand_of(self._sweep.outcomes())}",
            hint=f"resume with: tunekit resume {self._sweep.path}",
            exit_code=EXIT_CODES.get(asked, 0),
        )

    def _tell(self, event: str, trial: Trial) -> None:
        if self._on_event is not None:
            outcomes = self._sweep.outcomes()
            outcome = next(outcome for outcome in outcomes if outcome.trial.number == trial.number)
            self._on_event({"event": event, "outcome": outcome, "num_runs": self._spec.num_runs})


def _stop_runs(sweep: Sweep, *, now: bool, tell: Callable[[str], None]) -> None:
    """End all runs that go on: all are asked before one is waited for."""
    live = [run for trial, run in runs_of(sweep) if sweep.state_of(trial) not in (*OVER, folder.WAITING)]
    for run in live:
        request(run.path, now=now)
    for run in live:
        stop_run(run, now=now, tell=tell)


class _Signals:
    """Stop requests to a sweep, by a signal to this process or by the file in which others write them.

    The first signal ends the runs with checkpoints, and the second at once. Signals are heard in the main thread alone,
    and one is left alone that the process was started to ignore.

    Args:
        sweep: The sweep.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._by: str | None = None
        self._again = False
        self._event = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for sign in SIGNALS:
                if signal.getsignal(sign) is not signal.SIG_IGN:
                    self._previous[sign] = signal.signal(sign, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for sign, before in self._previous.items():
            signal.signal(sign, before)

    @property
    def asked(self) -> str | None:
        """By whom it is to end: the name of a signal, or `tunekit stop`; None where nobody has asked."""
        if self._by is None and (self._sweep.path / folder.STOP).is_file():
            self._by = COMMAND
        return self._by

    @property
    def now(self) -> bool:
        """True if runs are to end at once."""
        with contextlib.suppress(FileNotFoundError):
            words = read_object(self._sweep.path / folder.STOP)
            return self._again or bool(words.get("now"))
        return self._again

    def wait(self, seconds: float) -> None:
        """Wait so long, or until a signal comes."""
        self._event.wait(seconds)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._by is None:
            self._by = signal.Signals(number).name
            self._event.set()
            return
        if number == signal.SIGHUP:
            # One closed terminal: it is sent by the kernel, and once more by the shell.
            return
        self._again = True
        for _, run in runs_of(self._sweep):
            if run.state not in OVER:
                request(run.path, now=True)
