"""Launch of a run on this machine: its processes, their supervisor, and the queue for devices.

A run of one process trains in this one, unless this is the kernel of a notebook, which stays free, the run must
survive its process, or it has a vLLM server. Otherwise this process supervises: it passes events on, records the end of
the run, and restarts the processes if the recipe allows it.

Runs of this machine wait for devices in one queue: first come, first served, whoever started them. Each run that holds
or waits for devices has a ticket: a file in the user's state folder, locked by its process while it lives. So a run
that crashes or is killed releases its devices, and nobody has to clean up. A run is served once no other holds any of
its devices, and none that came earlier waits for one.

On accelerators every run has a ticket, and those that do not queue start at once. Without accelerators, the CPU is the
one device, and only queued runs count.
"""

import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import platformdirs
from filelock import FileLock, Timeout

from tunekit.errors import FAULTS, ExchangeError, HostLostError, RunError, Stopped, TunekitError, from_words
from tunekit.estimates.facts import Hardware
from tunekit.launching.vllm_server import WithServer, serving
from tunekit.planner.plan import Plan
from tunekit.process.processes import LOG, Group
from tunekit.process.signals import Wishes, phase_after, stopped, told_of
from tunekit.process.watchdog import Beat, Pulse, forget_beats
from tunekit.redact import redacting_pipe
from tunekit.runs.available_actions import words_of
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.events import Listener, read_events
from tunekit.runs.record import (
    SETTLE_SECONDS,
    Record,
    disk_errors,
    errors_of,
    forget_errors,
    goes_back,
    hold_room,
    may_go_back,
)
from tunekit.runs.run import Run
from tunekit.runs.small_files import Place, Request, forget_request, requested, write_whole

POLL_SECONDS = 0.1
"""Seconds between two looks at the other processes and their events."""


def launch(run: Run, listener: Listener | None = None) -> None:
    """Train a run in as many processes as its plan has, and return when all have exited.

    Args:
        run: The run; it resumes from its newest complete checkpoint, if there is one.
        listener: Called with every event.

    Raises:
        TunekitError: An error that the user can fix, in any of the processes.
        Stopped: The run was stopped.
    """
    with disk_errors(run, run.name):
        begin(run)
        recipe, plan = run.recipe, run.plan
        forget_errors(run)
        # DeepSpeed wants a process group for one process too.
        alone = plan.layout.num_processes == 1 and not plan.layout.strategy.startswith("zero")
        serves = recipe.method.num_server_devices > 0
        if alone and not (recipe.parallel.max_restarts or may_go_back(recipe) or in_notebook() or serves):
            # It imports the libraries, which a plan does not need.
            from tunekit.training.worker import work

            work(run, listener)
            return

    @contextlib.contextmanager
    def start() -> Iterator[Processes]:
        words = ["tunekit.training.worker", str(run.path)]
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(serving(run)) if serves else None
            output = stack.enter_context(redacting_pipe(stack.enter_context((run.path / LOG).open("ab"))))
            variables = {**plan.environment, **({} if server is None else server.variables)}
            group = stack.enter_context(Group(words, variables, output, num=plan.layout.num_processes))
            yield group if server is None else WithServer(server, group)

    supervise(run, start, listener)


def begin(run: Run) -> None:
    """Record that this process works on a run, and drop requests to an earlier attempt.

    Raises:
        DiskError: The disk is full.
    """
    with disk_errors(run, run.name):
        if not run.is_begun:
            forget_request(run.path)
            run.begin()
        hold_room(run)


class Processes(Protocol):
    """The processes of a run, wherever they are."""

    def codes(self) -> dict[int, int | None]:
        """Return exit codes by rank: negative for a signal, None while a process runs."""

    def wait(self, seconds: float) -> None:
        """Wait until all have exited or a time is up."""


def supervise(
    run: Run, start: Callable[[], contextlib.AbstractContextManager[Processes]], listener: Listener | None
) -> None:
    """Start the processes of a run, restart them if the recipe allows it, and pass their events on.

    Args:
        run: The run.
        start: Starts the processes; none is left at the end of its context.
        listener: Called with every event.

    Raises:
        TunekitError: An error that the user can fix, in any of the processes.
        Stopped: The run was stopped.
    """
    with disk_errors(run, run.name):
        _Supervisor(run, start, listener).supervise(run.recipe.parallel.max_restarts)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())


@dataclass(frozen=True)
class _Failure:
    """Reason that a group of processes ended early."""

    error: Exception
    is_the_users: bool = False
    """True if the user has to fix something, so that another attempt would end in the same way."""

    def is_due_to(self, wishes: Wishes) -> bool:
        """Return whether processes failed because of a stop request, and not all at the same moment."""
        return wishes.asked is not None and not self.is_the_users and type(self.error) is RunError


class Follower:
    """Follower of a run in other processes: passes their events on, and follows stop requests.

    Args:
        run: The run.
        listener: Called with every event.

    Attributes:
        record: Its record, for events of this process; the listener gets them with the others.
        wishes: Stop requests, by signal or from outside.
    """

    def __init__(self, run: Run, listener: Listener | None) -> None:
        self.run = run
        self.listener = listener
        self.record = Record(run, Place())
        self.wishes = Wishes(run, run.recipe.parallel.grace_seconds, signs=True)
        self._told: Request | None = None
        _, self.offset = read_events(run.path / "events.jsonl")

    def hand_on(self) -> None:
        """Pass new events to the listener."""
        events, self.offset = read_events(self.run.path / "events.jsonl", self.offset)
        if self.listener is not None:
            for event in events:
                self.listener(event)

    def mind_wishes(self) -> None:
        """Record stop requests, and interrupt unless the processes follow them by themselves after a step.

        Raises:
            KeyboardInterrupt: All processes are to stop at once.
        """
        request = self.wishes.known
        if request is not None and request != self._told:
            self._told = request
            self.record.write("stop", **told_of(self.run, request))
        if request is not None and self.run.status()["phase"] in ("starting", "loading"):
            raise KeyboardInterrupt
        self.wishes.check()

    def stopped(self) -> Stopped:
        """Return the error to raise once all processes have exited, after recording the stop if they have not."""
        request = self.wishes.known or requested(self.run.path) or Request(True, "SIGINT", None, 0.0)
        reason = self.run.status()["exit_reason"]
        if reason is None:
            reason = words_of(self.run, request, is_late=self.wishes.is_late)
            self.end(phase_after(self.run, request), reason)
        return stopped(self.run, request, reason)

    def end(self, phase: str, reason: str) -> None:
        """Record the end of the run."""
        self.record.end(phase, reason)
        self.hand_on()


class _Supervisor(Follower):
    """Supervisor of the processes of a run."""

    def __init__(
        self, run: Run, start: Callable[[], contextlib.AbstractContextManager[Processes]], listener: Listener | None
    ) -> None:
        super().__init__(run, listener)
        self.start = start

    def supervise(self, max_restarts: int) -> None:
        """Train the run, with a maximum number of restarts."""
        with self.wishes:
            try:
                failure = self._train(max_restarts)
            except KeyboardInterrupt as error:
                raise self.stopped() from error
            finally:
                self.hand_on()
        if failure is None and self.run.status()["phase"] == "finished":
            return
        if failure is None or failure.is_due_to(self.wishes):
            raise self.stopped()
        self.end("failed", str(failure.error))
        raise failure.error

    def _train(self, max_restarts: int) -> _Failure | None:
        failure = self._train_once()
        for attempt in range(1, max_restarts + 1):
            if failure is None or failure.is_the_users or self.wishes.asked is not None:
                break
            step = newest_complete(self.run.path).step
            self.record.update_status(phase="starting")
            self.record.write("restart", attempt=attempt, step=step, reason=str(failure.error))
            failure = self._train_once()
        return failure

    def _train_once(self) -> _Failure | None:
        while True:
            forget_errors(self.run)
            forget_beats(self.run)
            try:
                failure = self._end_of_all()
            except TunekitError as error:
                # They did not start; or a host was lost, and their own errors are the consequence.
                failure = _Failure(error, is_the_users=not isinstance(error, HostLostError))
            if failure is None or self.wishes.asked or not goes_back(self.run, self.record, failure.error):
                return failure

    def _end_of_all(self) -> _Failure | None:
        """Return why processes ended early, once all of them are gone."""
        pulse = Pulse(self.run)
        with self.start() as group, self.wishes.waiting():
            silent: list[Beat] = []
            while None in (codes := group.codes()).values() and not any(codes.values()) and not silent:
                self.mind_wishes()
                self.hand_on()
                group.wait(POLL_SECONDS)
                silent = pulse.silent([rank for rank, code in codes.items() if code is None])
            if silent:
                pulse.tell(silent)
            elif not any(codes.values()):
                return None
            # In the order in which they ended.
            ended = [rank for rank, code in codes.items() if code]
            group.wait(SETTLE_SECONDS)
            codes = group.codes()
            ended += [rank for rank, code in codes.items() if code and rank not in ended]
            # One that ends by itself leaves the others alone too.
            ended += [rank for rank, code in codes.items() if code == 0]
        return self._why({rank: codes[rank] or 0 for rank in ended}, [r for r, code in codes.items() if code is None])

    def _why(self, codes: dict[int, int], silent: list[int]) -> _Failure:
        """Return why a group failed.

        Args:
            codes: Exit codes of the ranks that ended, in the order in which they failed.
            silent: Ranks that were there to the last.
        """
        errors = errors_of(self.run)
        error = next(iter(errors), None)
        if error is not None and error["kind"] != ExchangeError.__name__:
            return _Failure(raised(error), is_the_users=error["traceback"] is None and error["kind"] not in FAULTS)
        # A process that has reported its error may crash on exit, with its collective still pending.
        have_told = {words["rank"] for words in errors}
        # One that was aborted often is one that saw another end.
        wordless = sorted((rank for rank in codes if rank not in have_told), key=lambda r: codes[r] == -signal.SIGABRT)
        if wordless:
            return _Failure(_without_word(wordless[0], codes[wordless[0]], f"see {self.run.path / LOG}"))
        assert error is not None
        not_heard = f"; no report from rank {', '.join(map(str, silent))}" if silent else ""
        return _Failure(RunError(error["problem"] + not_heard, hint=error["hint"]))


def _without_word(rank: int, code: int, hint: str) -> RunError:
    """Return the error for a process that reported nothing itself."""
    if code >= 0:
        return RunError(f"rank {rank} exited with code {code} without an error message", hint=hint)
    if code == -signal.SIGKILL:
        hint = f"the system does this when host memory runs out (see its log); {hint}"
    return RunError(f"rank {rank} was killed by {signal.Signals(-code).name}", hint=hint)


def raised(words: dict[str, Any]) -> Exception:
    """Return the error that a process has recorded."""
    if words["traceback"] is None:
        return from_words(words)
    return RuntimeError(f"rank {words['rank']}:\n{words['traceback']}")


def main() -> None:
    """Train the run whose folder is the only argument, on a node of a scheduler."""
    try:
        launch(Run(sys.argv[1]))
    except TunekitError:
        # It stands in the run folder.
        sys.exit(2)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()


LOOK_SECONDS = 0.5
"""Seconds between two looks of a waiting run at the queue."""

FREE_SHARE = 0.97
"""Share of memory that counts as free on a device that another run releases: slightly less than on an idle one."""

PROCESSOR = "cpu"
"""The device of a machine that has no other."""


@dataclass(frozen=True)
class Ticket:
    """A run in the queue.

    Attributes:
        number: Position; earlier runs have smaller ones.
        run: Its folder.
        devices: Devices that it holds or waits for, by UUID.
        waits: Whether it waits.
    """

    number: int
    run: str
    devices: tuple[str, ...]
    waits: bool

    def shares(self, other: "Ticket") -> bool:
        """Return whether both have a device in common."""
        return not set(self.devices).isdisjoint(other.devices)


def tickets() -> list[Ticket]:
    """List the runs of this machine that hold or wait for devices, earliest first."""
    folder = _folder()
    if not folder.is_dir():
        return []
    with _line(folder):
        return _tickets(folder)


def devices_of(plan: Plan) -> tuple[str, ...]:
    """The devices of this machine that a plan uses, by UUID."""
    named = plan.environment.get("CUDA_VISIBLE_DEVICES", plan.environment.get("HIP_VISIBLE_DEVICES"))
    own = tuple(named.split(",")) if named else (plan.device.kind,)
    return own if plan.vllm is None else own + plan.vllm.devices


def when_served(hardware: Hardware) -> Hardware:
    """Return the hardware as a queued run will find it: devices held by other runs are free again."""
    busy = {device for ticket in tickets() for device in ticket.devices}
    free = (
        {"memory_free_bytes": int(FREE_SHARE * device.memory_total_bytes)} if device.visible_as in busy else {}
        for device in hardware.accelerators
    )
    devices = (device.model_copy(update=more) for device, more in zip(hardware.accelerators, free, strict=True))
    return hardware.model_copy(update={"accelerators": tuple(devices)})


@contextlib.contextmanager
def turn(run: Run, *, waits: bool, listener: Listener | None) -> Iterator[None]:
    """Hold the devices of a run within the context, after waiting for them; status and events show the wait.

    Args:
        run: A run that has begun, and has not started to train.
        waits: Whether it waits until no other run holds any of its devices.
        listener: Called with every event; with `begun` once the run and its state are visible.

    Raises:
        Stopped: The run was stopped while it waited.
    """
    devices = devices_of(run.plan)
    with contextlib.ExitStack() as stack:
        if waits or devices != (PROCESSOR,):
            ticket = stack.enter_context(_ticket(run, devices, waits=waits))
            if waits:
                _wait(run, ticket, listener)
        if not waits:
            _tell_begun(run, listener)
        yield


def _wait(run: Run, ticket: Ticket, listener: Listener | None) -> None:
    """Wait until a ticket is served."""
    record = Record(run, Place(), listener)
    reported: list[Ticket] | None = None
    with Wishes(run, run.recipe.parallel.grace_seconds, signs=True) as wishes:
        try:
            while ahead := _served_or_ahead(ticket):
                if ahead != reported:
                    _tell(record, ticket, ahead)
                if reported is None:
                    _tell_begun(run, listener)
                reported = ahead
                wishes.check()
                time.sleep(LOOK_SECONDS)
            wishes.check()
        except KeyboardInterrupt as error:
            request = wishes.known or Request(True, "SIGINT", None, 0.0)
            run.update_status(place_in_line=None)
            record.end("interrupted", f"{words_of(run, request)}: was waiting for {', '.join(ticket.devices)}")
            raise stopped(run, request, str(run.status()["exit_reason"])) from error
    run.update_status(phase="starting", place_in_line=None)
    if reported is None:
        _tell_begun(run, listener)


def _tell_begun(run: Run, listener: Listener | None) -> None:
    if listener is not None:
        listener({"event": "begun", "run": run})


def _tell(record: Record, ticket: Ticket, ahead: Sequence[Ticket]) -> None:
    """Record the place of a run in the queue, and what it waits for."""
    place = 1 + sum(other.waits for other in ahead)
    behind = [Path(other.run).name for other in ahead]
    if record.run.status()["phase"] != "queued":
        record.write("phase", phase="queued")
    record.update_status(phase="queued", place_in_line=place)
    record.write("queue", place=place, behind=behind, devices=list(ticket.devices))


@contextlib.contextmanager
def _ticket(run: Run, devices: tuple[str, ...], *, waits: bool) -> Iterator[Ticket]:
    """Hold a ticket until the block or this process ends."""
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}", hint="set XDG_STATE_HOME") from error
    with _line(folder):
        number = max((int(file.stem) for file in folder.glob("*.json")), default=0) + 1
        ticket = Ticket(number, str(run.path.resolve()), devices, waits)
        lock = _lock(folder, number)
        lock.acquire()
        _write(folder, ticket)
    try:
        yield ticket
    finally:
        with _line(folder):
            _remove(folder, number)
            lock.release()


def _served_or_ahead(ticket: Ticket) -> list[Ticket]:
    """Serve a ticket if no other has its devices and none that came earlier waits for one; else return those."""
    folder = _folder()
    with _line(folder):
        ahead = [
            other
            for other in _tickets(folder)
            if other.number != ticket.number
            and other.shares(ticket)
            and (not other.waits or other.number < ticket.number)
        ]
        if not ahead:
            _write(folder, replace(ticket, waits=False))
        return ahead


def _tickets(folder: Path) -> list[Ticket]:
    """Return the tickets of live processes, and delete the others; call it with the queue locked."""
    tickets_found = []
    for file in sorted(folder.glob("*.json")):
        number = int(file.stem)
        try:
            with _lock(folder, number).acquire(blocking=False):
                _remove(folder, number)
        except Timeout:
            values = json.loads(file.read_text(encoding="utf-8"))
            tickets_found.append(Ticket(**{**values, "devices": tuple(values["devices"])}))
    return tickets_found


def _folder() -> Path:
    """Return the folder of this machine's tickets; homes may be shared by several machines."""
    return platformdirs.user_state_path("tunekit") / "line" / socket.gethostname()


def _line(folder: Path) -> FileLock:
    """Return the lock for reading or changing tickets."""
    return FileLock(folder / "line.lock")


def _lock(folder: Path, number: int) -> FileLock:
    return FileLock(folder / f"{number:08d}.lock", thread_local=False)


def _write(folder: Path, ticket: Ticket) -> None:
    write_whole(folder / f"{ticket.number:08d}.json", json.dumps(asdict(ticket)))


def _remove(folder: Path, number: int) -> None:
    for suffix in (".json", ".lock"):
        (folder / f"{number:08d}{suffix}").unlink(missing_ok=True)
