"""Stop requests to a run, by signal or from outside, and how a process follows them.

During steps a request is only noted, for the end of the step; anything else is interrupted by a KeyboardInterrupt, and
a second request interrupts everything. Python raises that wherever the program is: in a destructor or a callback from C
it is dropped, and in a collective that nobody answers it is never raised. So the request is remembered, checked again
at the end of each step, and acted upon by a thread of its own, which hears signals although the main thread is in C.

A stop is reported on the screen at once, and in the status when the process ends.
"""

import _thread
import contextlib
import ctypes
import functools
import math
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from tunekit.errors import ExchangeError, Stopped
from tunekit.runs.available_actions import next_command, words_of
from tunekit.runs.record import Record, errors_of
from tunekit.runs.run import Run
from tunekit.runs.small_files import EXIT_CODES, Place, Request, read_job, request, requested

LISTEN_SECONDS = 0.5
"""Seconds between two looks at the run folder for a stop request."""

SIGN_SECONDS = 10.0
"""Seconds between heartbeats of a supervisor."""

MARGIN_SECONDS = 3.0
"""Seconds before the kill by which a run has stopped; a fifth of the grace period if that is less."""

SAME_SECONDS = 1.0
"""Two SIGTERM within this time are one request that came twice: from a scheduler, and from the launcher."""

STUCK_SECONDS = 2.0
"""Seconds for a process to exit by itself after a request to stop at once."""

CHILD_SECONDS = 0.5
"""Seconds that a forked process waits to learn whether a SIGTERM was meant for all."""

PR_SET_PDEATHSIG = 1
"""Linux's prctl option that signals a process when its parent is gone."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that stop a run. SIGHUP comes when a terminal or an ssh connection is closed."""


class Wishes:
    """Stop requests to a run, as this process knows them, within a `with` block.

    Signals are handled if the block is in the main thread, the only one that Python lets. Signals that the process was
    started to ignore, except Slurm's SIGUSR1, and those with a handler of the program are left alone.

    Args:
        run: The run.
        grace_seconds: Seconds from SIGTERM to the kill.
        tell: Called with each request, in another thread.
        give_up: Called, in another thread, if the process should have exited and does not.
        signs: Whether this process sends the run's heartbeat to other hosts, by the time of its status.
    """

    def __init__(
        self,
        run: Run,
        grace_seconds: float,
        *,
        tell: Callable[[Request], None] | None = None,
        give_up: Callable[[], None] | None = None,
        signs: bool = False,
    ) -> None:
        self.asked: Request | None = None
        """The first request."""
        self.now = False
        """True if the run is to stop at once."""
        self.is_late = False
        """True if it stops at once because no time was left."""
        self.at_boundaries = False
        """True if a request waits for the end of a step, or of another part that all processes share."""
        self.is_saving = False
        """True while a checkpoint is being written."""
        self.save_seconds = 0.0
        """Expected seconds of a checkpoint."""
        self._run = run
        self._grace_seconds = grace_seconds
        self._tell = tell
        self._give_up = give_up
        self._signs = signs
        self._signed = 0.0
        self._deadline = math.inf
        self._terminated = math.inf
        self._roused_by: int | None = None
        self._since_now = math.inf
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_wakeup = -1
        self._told: Request | None = None
        self._thread = threading.Thread(target=self._watch, name="wishes", daemon=True)

    @property
    def seconds_left(self) -> float:
        """Seconds until the kill; infinite if there is none."""
        return self._deadline - time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it, requests are left to another process to follow."""
        self.at_boundaries = True
        try:
            yield
        finally:
            self.at_boundaries = False

    def end_now(self) -> None:
        """Turn the request into one to stop at once: there is nothing left to wait for."""
        if self.asked is not None:
            self._take(Request(True, self.asked.by, None, time.time()))

    def learn(self, by: str) -> None:
        """Take over a request to another process that all have agreed to follow."""
        if self.asked is None:
            self._take(Request(False, by, None, time.time()))

    def check(self) -> None:
        """Interrupt if a stop is requested and there is no boundary to wait for.

        Raises:
            KeyboardInterrupt: It is.
        """
        if self.now or (self.asked is not None and not self.at_boundaries):
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._previous_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            for sign in SIGNALS:
                before = signal.getsignal(sign)
                if _is_free(sign, before):
                    self._previous[sign] = signal.signal(sign, self._on_signal)
        _follow_forks()
        # The main process of a scheduler's takes it away, while others may begin.
        self._earlier = requested(self._run.path) if self._give_up is not None else None
        self._forks = _Forks(self._grace_seconds)
        _forks.append(self._forks)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        _forks.remove(self._forks)
        for sign, handler in self._previous.items():
            signal.signal(sign, handler)
        if self._listens:
            signal.set_wakeup_fd(self._previous_wakeup)
        os.write(self._pipe[1], b"\0")
        self._thread.join()
        for end in self._pipe:
            os.close(end)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._drain()
        self.check()

    def _drain(self) -> None:
        """Note pending signals, each once, in the thread that sees it first."""
        with self._lock:
            try:
                came = os.read(self._pipe[0], 4096)
            except BlockingIOError:
                return
            if self._previous_wakeup >= 0:
                os.write(self._previous_wakeup, came)
            for number in came:
                if number == self._roused_by:
                    self._roused_by = None
                elif number in self._previous:
                    self._note(signal.Signals(number))

    def _note(self, sign: signal.Signals) -> None:
        """Note a signal."""
        now = sign == signal.SIGINT and self.asked is not None
        if sign == signal.SIGTERM:
            now = time.monotonic() - self._terminated > SAME_SECONDS
            self._terminated = min(self._terminated, time.monotonic())
        # torchrun kills what it handed Ctrl-C on to, after half a minute.
        is_timed = sign == signal.SIGTERM or (sign == signal.SIGINT and "TORCHELASTIC_RUN_ID" in os.environ)
        grace = self._grace_seconds if is_timed else None
        self._take(Request(now, sign.name, grace, time.time()))

    def _take(self, wish: Request) -> None:
        """Note a request to this or another process."""
        with self._lock:
            if self.asked is None:
                self.asked = wish
                self._forks.are_told[0] = 1
            if wish.grace_seconds is not None:
                self._deadline = min(self._deadline, time.monotonic() + wish.grace_seconds)
            if wish.now and not self.now:
                self.now = True
                self._since_now = time.monotonic()

    def _watch(self) -> None:
        while not self._ended.is_set():
            select.select([self._pipe[0]], [], [], LISTEN_SECONDS)
            self._drain()
            self._give_sign()
            known_request = self.known
            heard = requested(self._run.path)
            if heard is not None and heard != self._earlier:
                self._take(heard)
            self._mind_time()
            wish = self.known
            if wish is None:
                continue
            if heard is None or (wish.now and not heard.now) or (heard.grace_seconds is None and self._is_timed):
                seconds = self.seconds_left if self._is_timed else None
                request(self._run.path, now=wish.now, by=wish.by, grace_seconds=seconds)
            if wish != self._told and self._tell is not None:
                self._told = wish
                self._tell(wish)
            if self._ended.is_set():
                break
            if wish != known_request:
                self._rouse()
            if time.monotonic() - self._since_now > STUCK_SECONDS and self._give_up is not None:
                self._give_up()

    def _give_sign(self) -> None:
        if self._signs and time.monotonic() - self._signed > SIGN_SECONDS:
            self._signed = time.monotonic()
            # A status that is just being replaced has a time of its own.
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._run.path / "status.json")

    @property
    def known(self) -> Request | None:
        """The request as far as known; None if there is none."""
        with self._lock:
            if self.asked is None or not self.now:
                return self.asked
            return Request(True, self.asked.by, self.asked.grace_seconds, self.asked.time)

    @property
    def _is_timed(self) -> bool:
        return math.isfinite(self._deadline)

    def _mind_time(self) -> None:
        """Stop while there is time, if the step or the checkpoint takes too long."""
        margin = min(MARGIN_SECONDS, self._grace_seconds / 5)
        needed = margin + (0 if self.is_saving else self.save_seconds)
        if self.asked is not None and not self.now and self.seconds_left < needed:
            self.is_late = True
            self.end_now()

    def _rouse(self) -> None:
        """Have the main thread check, as a signal would."""
        if self._previous and (self.now or not self.at_boundaries):
            sign = next(iter(self._previous))
            self._roused_by = sign
            _thread.interrupt_main(sign)


def before_a_run(signum: int, frame: FrameType | None) -> None:
    """Handle a signal while there is no run that could be stopped."""
    sign = signal.Signals(signum)
    raise Stopped(f"interrupted by {sign.name}", hint=None, exit_code=EXIT_CODES[sign.name])


def _is_free(sign: signal.Signals, handler: Any) -> bool:
    """Return whether a signal is for runs to handle."""
    if sign == signal.SIGINT:
        return handler is not signal.SIG_IGN
    if sign in (signal.SIGTERM, signal.SIGHUP):
        # What nohup starts ignores SIGHUP.
        return handler in (signal.SIG_DFL, signal.default_int_handler, before_a_run)
    # Slurm sends it also to what has no use for it, so that jobs ignore it to begin with.
    return handler is signal.SIG_DFL or (handler is signal.SIG_IGN and "SLURM_JOB_ID" in os.environ)


class _Forks:
    """Hooks for processes that are forked from this one, such as data workers.

    They also get the signals to all processes of a job or terminal, but are needed until the current step is over; and
    SIGTERM is how this process ends them. They exit when it is gone.

    Args:
        grace_seconds: Seconds that they may run on once all are asked to stop.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.are_told = mmap.mmap(-1, 1)
        """Shared with them: whether this process was asked to stop."""
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._is_in_thread = False
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def before(self) -> None:
        """Note which thread forks: the kernel ends a process with its parent thread."""
        self._is_in_thread = threading.get_ident() == self._thread

    def begin_child(self) -> None:
        """In a new process: leave the parent's signals to it, and end with it."""
        signal.set_wakeup_fd(-1)
        for sign in SIGNALS:
            if signal.getsignal(sign) not in (signal.SIG_DFL, signal.SIG_IGN, None):
                signal.signal(sign, self._on_sigterm if sign == signal.SIGTERM else _ignore)
        if self._libc is not None and self._is_in_thread:
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os.kill(os.getpid(), signal.SIGKILL)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        time.sleep(CHILD_SECONDS)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.are_told[0]:
            signal.alarm(math.ceil(self.grace_seconds))
        else:
            os.kill(os.getpid(), signal.SIGTERM)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Ignore a signal that is meant for another process; children do not inherit that."""


_forks: list[_Forks] = []
"""Hooks of this process: one during a run, else none."""


def _before_fork() -> None:
    for forks in _forks[-1:]:
        forks.before()


def _in_child() -> None:
    for forks in _forks[-1:]:
        forks.begin_child()
    _forks.clear()


@functools.cache
def _follow_forks() -> None:
    """Install the hooks, from the first run on. Python cannot remove them."""
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)


class Ending:
    """End of a run by the stop requests that a process of it hears while its `wishes` are entered.

    Args:
        record: Its record.
        supervised: Whether a supervisor records the end of the run, unless it was stopped at the end of a step.
    """

    def __init__(self, record: Record, *, supervised: bool) -> None:
        self._record = record
        self._run = record.run
        self._supervised = supervised
        self._is_joined = not supervised and record.place.num_processes > 1
        self.wishes = Wishes(
            self._run,
            self._run.recipe.parallel.grace_seconds,
            tell=None if supervised else self._tell,
            give_up=self._give_up if self._is_joined else None,
        )

    def is_due_to_a_wish(self, error: BaseException) -> bool:
        """Return whether an error follows from a stop request: some processes end before others, who then see that."""
        was_requested = self.wishes.asked is not None
        return isinstance(error, KeyboardInterrupt) or (was_requested and isinstance(error, ExchangeError))

    def stopped(self, *, at_a_boundary: bool) -> Stopped:
        """Record the stop and return the error to raise once the work is over.

        Args:
            at_a_boundary: Whether all processes ended together, as they were asked to.
        """
        request = self.wishes.known or Request(True, "SIGINT", None, 0.0)
        errors = errors_of(self._run)
        if errors and not at_a_boundary:
            # A launcher ends the others with the same signals where one of them has failed.
            phase, reason = "failed", f"rank {errors[0]['rank']}: {errors[0]['problem']}"
        else:
            phase, reason = self._end_by(request)
        if at_a_boundary or not self._supervised:
            self._record.end(phase, reason)
        return stopped(self._run, request, reason)

    def _tell(self, wish: Request) -> None:
        if self._is_joined and errors_of(self._run):
            self.wishes.end_now()
        self._record.write("stop", **told_of(self._run, wish))

    def _give_up(self) -> None:
        """End this process, which does not end by itself: it waits for others, or is not in Python."""
        request = self.wishes.known
        assert request is not None
        if self._record.place.is_main:
            # Whoever listens may be what it stands in.
            Record(self._run, Place()).end(*self._end_by(request))
        os._exit(request.exit_code)

    def _end_by(self, request: Request) -> tuple[str, str]:
        """Return the phase and the reason of an end that was asked for."""
        return phase_after(self._run, request), words_of(self._run, request, is_late=self.wishes.is_late)


def phase_after(run: Run, asked: Request) -> str:
    """Return the last phase of a stopped run: a Slurm job that reached its time limit is requeued."""
    job = read_job(run.path)
    is_up = asked.by == "SIGUSR1" and job is not None and job == os.environ.get("SLURM_JOB_ID")
    return "queued" if is_up else "interrupted"


def stopped(run: Run, asked: Request, reason: str) -> Stopped:
    """Return the error for a run that was stopped."""
    return Stopped(reason, hint=next_command(run), exit_code=asked.exit_code)


def told_of(run: Run, wish: Request) -> dict[str, object]:
    """Return the fields of the `stop` event: the request and its effect as a message."""
    status = run.status()
    if wish.now:
        message = "stopping at once"
    elif status["phase"] == "training":
        message = f"stopping after step {min(status['step'] + 1, status['num_steps'])} with a checkpoint"
    else:
        message = f"stopping while {status['phase']}"
    if wish.by == "SIGINT" and not wish.now:
        message += "; press again to stop at once"
    return {"by": wish.by, "now": wish.now, "message": message}
