"""Record of a run: its events and status, its lock, the space on its disk, and records of finished runs.

Events and status are written by one of its processes for all.

Disk: free space, and the errors if there is too little.

Lock against a second resume or deletion: both read the state of the run, then decide, which may take seconds, and then
act. Without the lock, two could train in one folder, or one in a folder that is being deleted.

Rollback: failures after which a run returns to its newest checkpoint by itself, whatever `parallel.max_restarts` is. A
non-finite step is skipped when it comes again (see `tunekit.training.non_finite`, which also counts them). After
exhausted memory, each process uses half the micro-batch, and accumulates twice as often: once, and never again.

Records of finished runs: the speed of this machine, and their memory.
"""

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from tunekit.errors import DiskError, ExchangeError, MemoryShortError, RollbackError, RunError, TunekitError
from tunekit.estimates.throughput.speed import RunRecord
from tunekit.planner.decisions.shortage import with_half_the_batch
from tunekit.planner.plan import Plan, gib
from tunekit.probe.model import probe_model
from tunekit.recipe.methods import has_teacher
from tunekit.recipe.schema import Recipe
from tunekit.redact import without_secrets
from tunekit.runs.available_actions import next_command
from tunekit.runs.checkpoints.complete import is_being_made, newest_complete
from tunekit.runs.events import EventLog, Listener
from tunekit.runs.run import RUNS, Run, list_runs
from tunekit.runs.small_files import Place, read_object, read_plan, wait_for, write_whole

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or of a user's share of it, that is full."""


RESERVE = ".room"
"""File of a run folder that is deleted where the disk is full, so that what went wrong can be written down."""

RESERVE_BYTES = 2**18

DISK_SETTLE_SECONDS = 60
"""Seconds for a checkpoint to notice that the disk is full, and to be removed."""


def hold_room(run: Run) -> None:
    """Reserve disk space for the error of a run, unless it is reserved."""
    reserve = run.path / RESERVE
    if not reserve.exists() or reserve.stat().st_size < RESERVE_BYTES:
        # Random, for a file system that compresses.
        reserve.write_bytes(os.urandom(RESERVE_BYTES))


def give_room(run: Run) -> None:
    """Give that room back."""
    with contextlib.suppress(OSError):
        (run.path / RESERVE).unlink(missing_ok=True)


def with_room(run: Run, write: Callable[[], None]) -> None:
    """Write something small, with the room that was kept for it if there is no other.

    A checkpoint that is written meanwhile may take that room as well. It fails then, and gives back all that it took.
    """
    may_get_room, until = True, None
    while True:
        try:
            write()
            return
        except OSError as error:
            if error.errno not in FULL or not may_get_room:
                raise
        if until is None:
            give_room(run)
            until = time.monotonic() + DISK_SETTLE_SECONDS
        else:
            time.sleep(0.05)
        # Asked before, since the room may come right after.
        may_get_room = is_being_made(run.path) and time.monotonic() < until


@contextlib.contextmanager
def tokenizers_errors() -> Iterator[None]:
    """Within it, what the tokenizers library cannot write is an OSError: it raises bare ones (tokenizers 0.23)."""
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)$", str(error)) if type(error) is Exception else None
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def disk_full(run: Run, where: str, error: OSError) -> DiskError:
    """Return the error for a file other than a checkpoint that could not be written."""
    give_room(run)
    problem = f"{where}: {words_of(error)}; events and status are written to {run.path}"
    return DiskError(problem, hint=f"free space on its disk, then {next_command(run)}")


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written where a folder lies, or will lie."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def place_of_run(recipe: Recipe) -> Path:
    """The folder that a run of a recipe will have, or will be in."""
    return RUNS if recipe.output.dir is None else Path(recipe.output.dir)


def words_of(error: BaseException) -> str:
    """Describe the error of a file."""
    if isinstance(error, OSError):
        name = "" if error.filename is None else f"{Path(error.filename).name}: "
        return f"{name}{error.strerror or error}"
    return str(error).partition("\n")[0] or type(error).__name__


def not_saved(run: Run, what: str, why: str, needed_bytes: int | None) -> DiskError:
    """Return the error for a checkpoint or result that could not be written.

    Args:
        run: The run.
        what: What was to be written.
        why: What went wrong.
        needed_bytes: How much that is, where it is known.
    """
    give_room(run)
    try:
        free = free_bytes(run.path)
    except OSError as error:
        free, why = 0, f"{why}; {run.path}: {error.strerror}"
    needs = "" if needed_bytes is None else f"; it needs {gib(needed_bytes)}, {gib(free)} free"
    newest = newest_complete(run.path)
    note = f"checkpoint-{newest.step} is complete" if newest.path else "no checkpoint yet"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and (needed_bytes is None or needed_bytes <= free):
        problem = f"{what} could not be written: {why}; files may be at most {gib(limit)} here (ulimit -f); {note}"
        return DiskError(problem, hint=f"ulimit -f unlimited, then {next_command(run)}")
    much = gib(needed_bytes - free) if needed_bytes is not None and needed_bytes > free else "space"
    hint = f"free {much} on the disk of {run.path}, or lower train.save_total_limit, then {next_command(run)}"
    return DiskError(f"{what} could not be written: {why}{needs}; {note}", hint=hint)


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
        words: dict[str, Any] = {"rank": self.place.rank, "time": time.time(), "traceback": None}
        if isinstance(error, TunekitError):
            words |= error.to_words()
        else:
            words |= {"kind": type(error).__name__, "problem": str(error), "hint": None, "changes": []}
            words["traceback"] = "".join(traceback.format_exception(error))
        folder, text = self.run.path / ERRORS, json.dumps(without_secrets(words), indent=2)
        with_room(self.run, lambda: folder.mkdir(exist_ok=True))
        with_room(self.run, lambda: write_whole(folder / f"rank-{self.place.rank}.json", text))


@contextlib.contextmanager
def disk_errors(run: Run, where: str) -> Iterator[None]:
    """Within it, failures to read or write files of a run folder that is gone or on a full disk raise its own error.

    Args:
        run: The run.
        where: What it is at.

    Raises:
        DiskError: The disk is full.
        RunError: The folder is gone.
    """
    try:
        yield
    except OSError as error:
        if (run.path / "status.json").exists():
            if error.errno in FULL:
                raise disk_full(run, where, error) from error
            raise
        what = f"{run.path} no longer exists: it was deleted or moved during the run"
        raise RunError(what, hint="train again, and keep the folder until the run has ended") from error


def forget_errors(run: Run) -> None:
    """Take away what the processes of an earlier attempt had to say."""
    shutil.rmtree(run.path / ERRORS, ignore_errors=True)


def first_error_of(run: Run) -> dict[str, Any]:
    """Return the first error of a run that has failed, after waiting for the others to report theirs."""
    wait_for(lambda: errors_of(run)[0]["kind"] != ExchangeError.__name__, SETTLE_SECONDS)
    return errors_of(run)[0]


def errors_of(run: Run) -> list[dict[str, Any]]:
    """Return the errors of a run's processes: the earliest first, and last those that only saw another end."""
    keys = ("rank", "time", "kind", "problem", "hint", "traceback")
    errors = [read_object(file, keys=keys) for file in (run.path / ERRORS).glob("rank-*.json")]
    return sorted(errors, key=lambda words: (words["kind"] == ExchangeError.__name__, words["time"]))


CLAIM = ".claim.lock"
"""File of a run folder that is locked meanwhile. It stays; the lock ends with its process."""


@contextlib.contextmanager
def claimed(run: Run) -> Iterator[None]:
    """Within it no other process resumes or deletes a run.

    Raises:
        RunError: Another process does so now, or the folder cannot be written.
    """
    claim = FileLock(run.path / CLAIM, timeout=0)
    try:
        claim.acquire()
    except Timeout:
        raise RunError(f"another process is resuming or deleting {run.name}", hint="retry in a moment") from None
    except OSError as error:
        # On a full disk nobody else can have it either, and runs are deleted to make room.
        if error.errno not in FULL:
            problem = f"cannot write to {run.path}: {error.strerror}"
            raise RunError(problem, hint="make it writable, or copy the run to a writable folder") from error
    try:
        yield
    finally:
        claim.release()


EARLIER_PLAN = "plan_out_of_memory.yaml"
"""File of a run folder with the plan that memory did not suffice for, where another one was made for it."""


def may_go_back(recipe: Recipe) -> bool:
    """Return whether a run may have to be restarted, so that another process has to watch it."""
    return recipe.train.non_finite == "rollback" or recipe.train.retry_out_of_memory


def goes_back(run: Run, record: Record, error: Exception) -> bool:
    """Return whether a failed run is to be restarted, after preparing and recording that."""
    if isinstance(error, RollbackError):
        words = "the step will be skipped"
    elif isinstance(error, MemoryShortError) and run.recipe.train.retry_out_of_memory:
        smaller = _with_less(run)
        if smaller is None:
            return False
        words = f"retrying with micro-batches of {smaller.batch_words} and the same global batch"
    else:
        return False
    record.update_status(phase="starting")
    attempt = 1 + sum(event["event"] == "restart" for event in run.events())
    reason = f"{error.problem}; {words}"
    record.write("restart", attempt=attempt, step=newest_complete(run.path).step, reason=reason)
    return True


def _with_less(run: Run) -> Plan | None:
    """The plan that is tried where memory ran out, written into the folder; None where there is none, or was one."""
    earlier, plan = run.path / EARLIER_PLAN, run.plan
    # A plan that was made anew since, for an edited recipe, is another one.
    if earlier.exists() and plan.micro_batch_size < read_plan(earlier, plan.recipe).micro_batch_size:
        return None
    method = plan.recipe.method
    teacher = probe_model(method.teacher) if has_teacher(method) else None
    smaller = with_half_the_batch(plan, probe_model(plan.recipe.model), teacher)
    if smaller is None:
        return None
    shutil.copy2(run.path / "plan.yaml", earlier)
    write_whole(run.path / "plan.yaml", smaller.to_yaml())
    return smaller


NUM_RUNS = 10
"""Finished runs that are looked at, the newest: each is to be read and checked, and older ones tell of older code."""

MEASURED = ("peak_memory_bytes", "planned_memory_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
"""Fields that a result and a record have under the same names."""


def recorded_runs(root: Path = RUNS) -> list[RunRecord]:
    """Records of the newest finished runs in a folder; of those that tell nothing, none."""
    finished = [run for run in list_runs(root) if run.status()["phase"] == "finished"][:NUM_RUNS]
    records = (_record(run) for run in finished)
    return [record for record in records if record is not None]


def _record(run: Run) -> RunRecord | None:
    try:
        plan, result = run.plan, run.result()
        if plan.speed is None or not result["tokens_per_second"]:
            return None
        # Earlier versions did not measure it.
        seconds = result.get("generation_seconds")
        return RunRecord(
            device=plan.device.name,
            model_type=plan.speed.model_type,
            method=plan.recipe.method.type,
            adapter=plan.recipe.adapter.type,
            dtype=plan.dtype,
            num_params=plan.num_params,
            flops_per_token=plan.speed.flops_per_token,
            sheet_flops_per_second=plan.speed.sheet_flops_per_second,
            micro_batch_tokens=plan.speed.micro_batch_tokens,
            tokens_per_second=result["tokens_per_second"],
            by_vllm=plan.vllm is not None,
            generation_share=None if seconds is None else seconds / result["step_seconds"],
            planned_tensor_bytes=plan.memory.tensor_bytes,
            **{name: result[name] for name in MEASURED},
            layout=plan.layout,
            num_nodes=plan.num_nodes,
        )
    except (TunekitError, ValueError, KeyError, OSError, yaml.YAMLError):
        # Written by another version, or damaged since: no reason to refuse a new plan.
        return None
