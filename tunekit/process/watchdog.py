"""Collectives, heartbeats and watchdog of a run's processes.

Collectives: those besides training's, with errors for a process that does not answer.

Watchdog: ends a run that makes no progress, names the responsible process, and writes the stacks of all.

Each process watches itself, from a thread of its own, so that it needs no supervisor: a process without progress for
longer than the plan's limit writes its stacks to `RUN/stacks/rank-N.txt` and its error to `RUN/errors`, and exits. When
one process hangs, all of them wait for it. So each compares the heartbeats of all first: the one that hangs is behind
the others, or sends no heartbeats. While one that is behind makes progress, the others wait on.

The supervisor also sees who sends no heartbeats where no other process is left to see it.

Heartbeats: each process writes `ranks/rank-N.json` once a second, from a thread of its own: its identity, its activity,
and since when.
"""

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, cast

import psutil

from tunekit.errors import ExchangeError, RunError, StandstillError
from tunekit.planner.plan import Plan
from tunekit.recipe.methods import generates
from tunekit.runs.record import Record, errors_of
from tunekit.runs.run import SEEN_SECONDS, Run
from tunekit.runs.small_files import RANKS, Place, beats_in, identity_of, is_alive, wait_for, write_whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

FROM_GLOO = re.compile(r"/gloo/|\bgloo\b", re.IGNORECASE)
"""Common part of gloo's errors: the place in its code that raised them; they are plain RuntimeErrors."""


DATA_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<sign>[^.]+)|exited unexpectedly)"
)
"""Message of torch where a data worker died: RuntimeErrors, raised anywhere."""

DATA_WORKER_HINT = (
    "the system kills processes when host memory runs out (see its log), and a full /dev/shm makes them fail: free "
    "memory, or run fewer processes on this machine"
)


def same_everywhere(value: T, place: Place) -> T:
    """Broadcast the main process's value to every process; all call it together."""
    if place.num_processes == 1:
        return value
    import torch

    values = [value]
    torch.distributed.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def data_worker_problem(error: BaseException, place: Place) -> str | None:
    """Describe which data worker died; None where the error is another.

    Args:
        error: What was raised.
        place: Which process it made them for.
    """
    match = DATA_WORKER.search(str(error))
    if match is None:
        return None
    # Where torch sees it twice, the first time it saw more.
    cause = DATA_WORKER.search(str(error.__cause__)) or match
    end = f"was killed by a signal ({cause['sign']})" if cause["sign"] else "exited unexpectedly"
    return f"data worker {cause['pids'].strip()} of rank {place.rank} {end}"


def any_of(flags: Sequence[bool], place: Place) -> list[bool]:
    """Return of each flag whether any process sets it, exchanged over the CPU network; all call it together."""
    return [bool(vote) for vote in largest(flags, place)]


def largest(values: Sequence[float], place: Place) -> list[float]:
    """Return of each value the largest of all processes; all call it together."""
    if place.num_processes == 1:
        return list(values)
    import torch

    gathered = torch.tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(gathered, torch.distributed.ReduceOp.MAX)
    return cast(list[float], gathered.tolist())


def of_all(value: T, place: Place, group: "ProcessGroup | None" = None) -> list[T]:
    """Gather the values of all processes by rank, in every process; all call it together."""
    if place.num_processes == 1:
        return [value]
    import torch

    values: list[T | None] = [None] * place.num_processes
    torch.distributed.all_gather_object(values, value, group)
    return cast(list[T], values)


def exchange_problem(error: BaseException, place: Place) -> str | None:
    """Describe a failed collective; None where the error is not due to another process's end or silence.

    Args:
        error: What was raised.
        place: Which process this is.
    """
    import torch

    message = str(error)
    if not isinstance(error, torch.distributed.DistError) and not FROM_GLOO.search(message):
        return None
    # Without the file of the library, and its advice.
    words = re.sub(r"^\[.*?\] ", "", message.partition("\n")[0]).partition(". This is typically")[0]
    if "timed out" in message.lower() or "timeout" in message.lower():
        return f"rank {place.rank} timed out waiting for the other processes in {_function(error)} ({words})"
    return f"rank {place.rank} lost the connection to another process in {_function(error)} ({words})"


def _function(error: BaseException) -> str:
    """The innermost function outside torch in which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "/torch/" not in frame.filename]
    return f"{(outside or frames)[-1].name}()"


BEAT_SECONDS = 1.0
"""Seconds between heartbeats."""

UNEVEN = ("generation", "tools", "rewards")
"""Activities that not all processes go through."""


@dataclass
class Beat:
    """Last heartbeat of a process.

    Attributes:
        rank: Which one it is.
        pid: Its number on its host.
        identity: What no other process of that host ever has with this number.
        host: Name of its host.
        time: When it said this, in seconds since the epoch.
        step: The step that it is at.
        at: What it does in it: `loading`, `data`, `forward`, `backward`, `optimizer`, `evaluation`, `saving`, ...
        since: When it began that, in seconds since the epoch.
        marks: How many such parts it has begun in this step. All processes go through the same.
        moves: How often it was seen to move in this part: rows, layers, batches.
        is_warm: Whether its first step is over, in which a model is compiled and buffers are filled.
    """

    rank: int
    pid: int
    identity: str
    host: str
    time: float
    step: int
    at: str
    since: float
    marks: int = 0
    moves: int = 0
    is_warm: bool = False

    @property
    def position(self) -> tuple[int, int, int]:
        """Progress of the process, for comparison with others."""
        # Answers differ in length, and rewards in what they take.
        return self.step, self.marks, 0 if self.at in UNEVEN else self.moves

    def has_moved_since(self, before: "Beat") -> bool:
        """Return whether it made progress since an earlier heartbeat."""
        return (self.step, self.marks, self.moves) != (before.step, before.marks, before.moves)


class Heart:
    """Sends the heartbeats of this process during a `with` block.

    Args:
        run: The run.
        place: Which of its processes this is.
    """

    def __init__(self, run: Run, place: Place) -> None:
        self._file = run.path / RANKS / f"rank-{place.rank}.json"
        pid, now = os.getpid(), time.time()
        self._beat = Beat(place.rank, pid, identity_of(pid) or "", os.uname().nodename, now, 0, "starting", now)
        self.thread = threading.get_ident()
        """The thread that works."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="heart", daemon=True)

    @property
    def at(self) -> str:
        """Current activity of the process."""
        return self._beat.at

    def mark(self, at: str, step: int | None = None) -> None:
        """Set the current activity. It is kept in memory, and costs nothing."""
        beat = self._beat
        if step is not None and step != beat.step:
            # Before the first of an attempt it has step 0.
            beat.is_warm = beat.step > 0
            beat.step, beat.marks = step, 0
        beat.at, beat.since = at, time.time()
        beat.marks += 1
        beat.moves = 0

    def move(self) -> None:
        """Count progress within the current activity."""
        self._beat.moves += 1

    def now(self) -> Beat:
        """Return the current heartbeat."""
        return replace(self._beat, time=time.time())

    def __enter__(self) -> Self:
        self._file.parent.mkdir(exist_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._file.unlink(missing_ok=True)

    def _keep_beating(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._write()
            except OSError:
                # A full disk is no reason to be taken for dead.
                with contextlib.suppress(OSError):
                    os.utime(self._file)

    def _write(self) -> None:
        write_whole(self._file, json.dumps(asdict(self.now())))


def beats_of(run: Run) -> list[Beat]:
    """Return the last heartbeats of a run's processes, by rank; one that ended in order sends no more."""
    return sorted((Beat(**fields) for fields in beats_in(run.path)), key=lambda beat: beat.rank)


def last_signs(run: Run) -> dict[int, int]:
    """Return the time of each rank's last heartbeat, by the clock of the disk in nanoseconds."""
    signs = {}
    for file in (run.path / RANKS).glob("rank-*.json"):
        with contextlib.suppress(FileNotFoundError):
            signs[int(file.stem.removeprefix("rank-"))] = file.stat().st_mtime_ns
    return signs


def forget_beats(run: Run) -> None:
    """Delete the heartbeats of an earlier attempt."""
    shutil.rmtree(run.path / RANKS, ignore_errors=True)


STACKS = "stacks"
"""Folder of a run folder with the stacks of all processes when one made no progress."""

HUNG_CODE = 124
"""Exit code of a process without progress, as that of `timeout`."""

ASK = signal.SIGUSR2
"""The signal on which a process writes its stacks, whatever it is at."""

STEADY = ("data", "forward", "backward", "optimizer", "logging", "evaluation")
"""Activities in which a process must make progress all the time, once its first step is over."""

EXCHANGING = ("/torch/nn/parallel/distributed.py", "/torch/autograd/graph.py")
"""Files of torch from which it exchanges outside of Python: buffers before a pass, and gradients in a backward pass."""

LOOK_SECONDS = 5 * BEAT_SECONDS
"""Seconds that others on this host are watched, to see which ones send heartbeats and which make progress."""

TELL_SECONDS = 15
"""Seconds that a process which only waited stays for the error of the one that it waited for."""

PULSE_MARGIN_SECONDS = 60
"""Seconds that the supervisor waits for a heartbeat beyond the limit of a process."""


def limit_of(plan: Plan, beat: Beat) -> int:
    """Return the limit for a process without progress at its current activity, in seconds."""
    return plan.timeout_seconds if beat.is_warm and beat.at in STEADY else plan.patience_seconds


def where(beat: Beat) -> str:
    """Describe the current activity of a process."""
    if beat.at == "data":
        return f"waiting for data of step {beat.step}"
    return f"in {beat.at} of step {beat.step}" if beat.step else f"in {beat.at}"


@dataclass(frozen=True)
class Sight:
    """State of a run as seen by a process that makes no progress.

    Attributes:
        mine: Where it is itself.
        waits: Whether it stands in an exchange, as far as its stack tells.
        others: Where those of the others are that have not ended.
        silent: Ranks of others that give no sign of life.
        moving: Ranks of others that move.
        num_processes: All that there are, the ended ones too.
    """

    mine: Beat
    waits: bool
    others: Sequence[Beat]
    silent: Collection[int]
    moving: Collection[int]
    num_processes: int

    @property
    def is_patient(self) -> bool:
        """True if it waits for a process that makes progress, as it should."""
        return any(other.rank in self.moving and other.position <= self.mine.position for other in self.others)

    def verdict(self, seconds: float, stacks: Path) -> RunError:
        """Return the error that names the hanging process, from the view of one that waits.

        Args:
            seconds: How long it has stood.
            stacks: Where the stacks are.
        """
        mine, hint = self.mine, f"see the stack traces of all processes in {stacks}"
        silent = [other for other in self.others if other.rank in self.silent]
        if silent:
            words = f"; rank {mine.rank} waited {seconds:.0f} s for it, {where(mine)}"
            return StandstillError("; ".join(map(no_sign_of, silent)) + words, hint=hint)
        there = {mine.rank, *(other.rank for other in self.others)}
        missing = [str(rank) for rank in range(self.num_processes) if rank not in there]
        behind = [other for other in self.others if other.position < mine.position]
        waited = f"rank {mine.rank} waited {seconds:.0f} s, {where(mine)},"
        if missing:
            ended = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
            return ExchangeError(f"{waited} for {ended}, which had exited", hint=hint)
        if behind:
            slowest = min(behind, key=lambda other: other.position)
            return ExchangeError(f"{waited} for rank {slowest.rank}, which was stuck {where(slowest)}", hint=hint)
        if self.waits:
            return ExchangeError(f"{waited} for the other processes", hint=hint)
        return StandstillError(f"rank {mine.rank} made no progress for {seconds:.0f} s, {where(mine)}", hint=hint)


def silent_server(plan: Plan, beat: Beat, seconds: float) -> RunError | None:
    """Return the error of a vLLM server that does not answer; None for a process that waits for none.

    Args:
        plan: The plan of the run.
        beat: Where the process stands.
        seconds: How long it has stood there.
    """
    method = plan.recipe.method
    # The main process alone asks the server.
    if plan.vllm is None or plan.vllm.mode != "server" or beat.rank or beat.at not in ("generation", "tools"):
        return None
    assert generates(method)
    server = method.generation.server_words
    problem = f"{server.key}: {server.name} has not answered for {seconds:.0f} s, {where(beat)}"
    return StandstillError(problem, hint=server.hint)


def no_sign_of(beat: Beat) -> str:
    """Describe a process that sends no heartbeats."""
    return f"rank {beat.rank} (process {beat.pid} on {beat.host}) stopped sending heartbeats, last {where(beat)}"


def gone_words(run: Run) -> str:
    """Describe the processes of this host that died without an error, for the message of one that lost them."""
    return "".join(
        f"; rank {beat.rank} (process {beat.pid} on {beat.host}) has exited, last {where(beat)}"
        for beat in beats_of(run)
        if beat.host == os.uname().nodename and not is_alive(beat.pid, beat.identity)
    )


class Watchdog:
    """Ends this process once it has made no progress for too long, during a `with` block.

    Args:
        record: Record for the error.
        heart: Heartbeats of the process.
        plan: The plan, with the limits.
        supervised: Whether a supervisor records the end of the run.
    """

    def __init__(self, record: Record, heart: Heart, plan: Plan, *, supervised: bool) -> None:
        self._record = record
        self._heart = heart
        self._plan = plan
        self._supervised = supervised
        self._folder = record.run.path / STACKS
        self._began = time.time()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._folder.mkdir(exist_ok=True)
        self._file = self._folder / f"rank-{self._record.place.rank}.txt"
        self._stacks = self._file.open("a", encoding="utf-8")
        faulthandler.register(ASK, file=self._stacks, all_threads=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.unregister(ASK)
        self._stacks.close()
        # A process that takes itself for another one, which is then to be said, may have taken the file away.
        with contextlib.suppress(OSError):
            if not self._file.stat().st_size:
                self._file.unlink()
                self._folder.rmdir()

    def _watch(self) -> None:
        heart, plan = self._heart, self._plan
        last, still_seconds, looked_at = heart.now(), 0.0, time.monotonic()
        tick = min(BEAT_SECONDS, plan.timeout_seconds / 10)
        while not self._ended.wait(tick):
            now, before, looked_at = heart.now(), looked_at, time.monotonic()
            # While this whole process was stopped, as by Ctrl-Z, nobody could have moved.
            still_seconds += min(looked_at - before, 2 * tick)
            if now.has_moved_since(last):
                last, still_seconds = now, 0.0
            elif still_seconds > limit_of(plan, now):
                self._on_standstill(now, still_seconds)
                still_seconds, looked_at = 0.0, time.monotonic()

    def _on_standstill(self, stood_at: Beat, seconds: float) -> None:
        """End this process, unless it waits for one that makes progress, or makes progress after all."""
        run = self._record.run
        sight = self._look(stood_at)
        if self._ended.is_set() or sight.is_patient or self._heart.now().has_moved_since(stood_at):
            return
        self._write_stacks(f"{where(stood_at)} for {seconds:.0f} s")
        ask_for_stacks([beat for beat in sight.others if beat.rank not in sight.silent])
        ask_children()
        error = silent_server(self._plan, stood_at, seconds) or sight.verdict(seconds, self._folder)
        if isinstance(error, ExchangeError):
            # Whom it waited for has more to say. Its supervisor would end it as soon as this one is gone.
            wait_for(lambda: any(words["rank"] != stood_at.rank for words in errors_of(run)), TELL_SECONDS)
        if self._ended.is_set():
            return
        self._record.write_error(error)
        if not self._supervised:
            self._tell(error, main_is_silent=0 in sight.silent)
        self._stacks.flush()
        end_children(self._began)
        os._exit(HUNG_CODE)

    def _look(self, mine: Beat) -> Sight:
        """Watch the other processes for some heartbeats and return what they do."""
        place, run = self._record.place, self._record.run
        if place.num_processes == 1:
            return Sight(mine, waits=False, others=(), silent=(), moving=(), num_processes=1)
        signs, before = last_signs(run), {beat.rank: beat for beat in beats_of(run)}
        elsewhere = any(beat.host != mine.host for beat in before.values())
        # A file system of a network shows late what another host writes.
        self._ended.wait(SEEN_SECONDS if elsewhere else LOOK_SECONDS)
        later_signs, after = last_signs(run), {beat.rank: beat for beat in beats_of(run)}
        peers = [beat for rank, beat in after.items() if rank != mine.rank and rank < place.num_processes]
        return Sight(
            mine,
            waits=is_waiting(self._heart.thread),
            others=peers,
            silent=[beat.rank for beat in peers if later_signs.get(beat.rank) == signs.get(beat.rank)],
            moving=[beat.rank for beat in peers if beat.rank in before and beat.has_moved_since(before[beat.rank])],
            num_processes=place.num_processes,
        )

    def _write_stacks(self, why: str) -> None:
        print(f"\n{datetime.now():%Y-%m-%d %H:%M:%S} {why}", file=self._stacks, flush=True)
        faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _tell(self, error: RunError, *, main_is_silent: bool) -> None:
        """Record the end of the run where no supervisor does, in the first process with an error."""
        run, place = self._record.run, self._record.place
        first = errors_of(run)[0]
        if place.is_main or main_is_silent:
            reason = str(error) if first["rank"] == place.rank else f"{first['problem']}; {first['hint']}"
            # Whoever listens may be what it stands in.
            Record(run, Place()).end("failed", reason)
        if first["rank"] == place.rank:
            # While a run works, what is written to the other one goes to its log.
            print(error, file=sys.__stderr__, flush=True)


class Pulse:
    """Heartbeats of a supervisor's processes, on any host.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._plan = run.plan
        self._signs: dict[int, int] = {}
        self._silent: dict[int, float] = {}
        self._looked = time.monotonic()

    def silent(self, ranks: Collection[int]) -> list[Beat]:
        """Return those of some ranks that have sent no heartbeat for longer than their limit.

        It is cheap, and counts no time in which this process was suspended itself.
        """
        passed = time.monotonic() - self._looked
        if passed < BEAT_SECONDS:
            return []
        self._looked += passed
        signs = last_signs(self._run)
        for rank, sign in signs.items():
            fresh = sign != self._signs.get(rank)
            self._silent[rank] = 0.0 if fresh else self._silent[rank] + min(passed, 2 * BEAT_SECONDS)
        self._signs = signs
        # Files are read only where one of them is old.
        least = min(self._plan.timeout_seconds, self._plan.patience_seconds) + PULSE_MARGIN_SECONDS
        if not any(self._silent[rank] > least for rank in signs if rank in ranks):
            return []
        return [beat for beat in beats_of(self._run) if beat.rank in ranks and self._is_over(beat)]

    def _is_over(self, beat: Beat) -> bool:
        return self._silent.get(beat.rank, 0.0) > limit_of(self._plan, beat) + PULSE_MARGIN_SECONDS

    def tell(self, silent: Sequence[Beat]) -> None:
        """Have all others write their stacks, and write the error that the silent ones cannot write themselves."""
        names = {beat.rank for beat in silent}
        ask_for_stacks([beat for beat in beats_of(self._run) if beat.rank not in names])
        time.sleep(BEAT_SECONDS)
        for beat in silent:
            words = f"{no_sign_of(beat)}; silent for {self._silent[beat.rank]:.0f} s"
            error = StandstillError(words, hint=f"see the stack traces of the others in {self._run.path / STACKS}")
            Record(self._run, Place(rank=beat.rank)).write_error(error)


def ask_for_stacks(beats: Sequence[Beat]) -> None:
    """Have the processes of this host that listen for it write their stacks."""
    for beat in beats:
        if beat.host == os.uname().nodename and is_alive(beat.pid, beat.identity):
            _ask(beat.pid)


def ask_children() -> None:
    """Have forked processes, such as data workers, write their stacks to the file of this one."""
    for child in psutil.Process().children(recursive=True):
        _ask(child.pid)


def _ask(pid: int) -> None:
    """Send the signal, which would end a process that does not listen."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        if int(caught.split()[1], 16) >> (ASK - 1) & 1:
            os.kill(pid, ASK)


def end_children(since: float) -> None:
    """Kill the processes that this one started since a time, in seconds since the epoch."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.create_time() >= since - 1:
                child.kill()


def is_waiting(thread: int) -> bool:
    """Return whether a thread waits in a collective, judging by its stack."""
    innermost = sys._current_frames().get(thread)
    for depth, (frame, _) in enumerate(() if innermost is None else traceback.walk_stack(innermost)):
        file = frame.f_code.co_filename
        if "/torch/" not in file:
            return False
        if "/torch/distributed/" in file or (depth == 0 and file.endswith(EXCHANGING)):
            return True
    return False
