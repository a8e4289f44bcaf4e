"""The line in which runs of this machine wait for devices: first come, first served, whoever started them and where.

Each run that holds devices, or waits for some, has a ticket: a file in the user's state folder, with a lock that its
process holds for as long as it lives. So a run that crashes, or is killed, gives back what it had, and nobody has to
clean up after it. A run is served once no other holds any of its devices, and none that came earlier waits for one.

On accelerators every run has a ticket, and those that do not wait for their turn are there at once, as ever. Where
there are none, the processor is the one device, and only runs that were put into the line count.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from tunekit.errors import RunError
from tunekit.estimates.facts import Hardware
from tunekit.planner.plan import Plan
from tunekit.process.signals import Wishes, stopped
from tunekit.runs.available_actions import words_of
from tunekit.runs.events import Listener
from tunekit.runs.record import Record
from tunekit.runs.run import Run
from tunekit.runs.small_files import Place, Request, write_whole

LOOK_SECONDS = 0.5
"""Seconds between two looks of a waiting run at the queue."""

FREE_SHARE = 0.97
"""Of a device that another run gives back: a little less than one has free that nobody uses, which is taken first."""

PROCESSOR = "cpu"
"""The device of a machine that has no other."""


@dataclass(frozen=True)
class Ticket:
    """A run in the line.

    Attributes:
        number: The smaller, the earlier it came.
        run: Its folder.
        devices: What it holds or waits for, by UUID.
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
    """All runs of this machine that hold devices or wait for some, the earliest first."""
    folder = _folder()
    if not folder.is_dir():
        return []
    with _line(folder):
        return _tickets(folder)


def devices_of(plan: Plan) -> tuple[str, ...]:
    """The devices of this machine that a plan uses, by UUID."""
    named = plan.environment.get("CUDA_VISIBLE_DEVICES", plan.environment.get("HIP_VISIBLE_DEVICES"))
    return tuple(named.split(",")) if named else (plan.device.kind,)


def when_served(hardware: Hardware) -> Hardware:
    """A machine as a run finds it that waits for its turn: what other runs hold is free again."""
    busy = {device for ticket in tickets() for device in ticket.devices}
    free = (
        {"memory_free_bytes": int(FREE_SHARE * device.memory_total_bytes)} if device.visible_as in busy else {}
        for device in hardware.accelerators
    )
    devices = (device.model_copy(update=more) for device, more in zip(hardware.accelerators, free, strict=True))
    return hardware.model_copy(update={"accelerators": tuple(devices)})


@contextlib.contextmanager
def turn(run: Run, *, waits: bool, listener: Listener | None) -> Iterator[None]:
    """Within it, a run has its devices. Where it waits for them, it says so in its status and its events.

    Args:
        run: A run that has begun, and has not started to work.
        waits: Whether it waits until no other run has any of them.
        listener: Called with every event; with `begun` when all can see the run and what it is at.

    Raises:
        Stopped: It was asked to end while it waited.
    """
    devices = devices_of(run.plan)
    with contextlib.ExitStack() as stack:
        if waits or devices != (PROCESSOR,):
            ticket = stack.enter_context(_ticket(run, devices, waits=waits))
            if waits:
                _wait(run, ticket, listener)
        if not waits and listener is not None:
            listener({"event": "begun", "run": run})
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
                if reported is None and listener is not None:
                    listener({"event": "begun", "run": run})
                reported = ahead
                wishes.check()
                time.sleep(LOOK_SECONDS)
            wishes.check()
        except KeyboardInterrupt as error:
            request = wishes.known or Request(True, "SIGINT", None, 0.0)
            run.update_status(place_in_line=None)
            record.end("interrupted", f"{words_of(run, request)}: it waited for {', '.join(ticket.devices)}")
            raise stopped(run, request, str(run.status()["exit_reason"])) from error
    run.update_status(phase="starting", place_in_line=None)
    if reported is None and listener is not None:
        listener({"event": "begun", "run": run})


def _tell(record: Record, ticket: Ticket, ahead: Sequence[Ticket]) -> None:
    """Say which place a run has, and what it waits for."""
    place = 1 + sum(other.waits for other in ahead)
    behind = [Path(other.run).name for other in ahead]
    if record.run.status()["phase"] != "queued":
        record.write("phase", phase="queued")
    record.update_status(phase="queued", place_in_line=place)
    record.write("queue", place=place, behind=behind, devices=list(ticket.devices))


@contextlib.contextmanager
def _ticket(run: Run, devices: tuple[str, ...], *, waits: bool) -> Iterator[Ticket]:
    """A ticket for as long as this process lives, and at most until the block ends."""
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
    """The tickets of processes that live, while nobody else looks; those of others are thrown away."""
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
