"""Worker process of a run: reads the folder, loads, trains and saves. All decisions are in the plan.

Library output goes to the run's log, and what matters to the events. One of several processes is started as
`python -m tunekit.training.worker FOLDER`, by tunekit or by another launcher, and has its ranks in its environment.
Libraries read their variables on import, so nothing here imports one before the plan's variables are set.
"""

import atexit
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING

from tunekit.errors import DataWorkerError, ExchangeError, MemoryShortError, RunError, Stopped, TunekitError
from tunekit.planner.decisions.shortage import change_that_fits
from tunekit.probe.model import probe_model
from tunekit.process import watchdog
from tunekit.process.garbage import collected_seldom, leave_to_the_system
from tunekit.process.log_capture import library_words_to, send_nothing_at_all
from tunekit.process.processes import follow_supervisor, is_supervised, open_store
from tunekit.process.signals import Ending, Wishes
from tunekit.recipe.functions import importable
from tunekit.recipe.methods import has_teacher
from tunekit.redact import Redacting
from tunekit.runs.events import Listener
from tunekit.runs.record import FULL, Record, disk_errors, disk_full, first_error_of, hold_room
from tunekit.runs.run import INPUTS, Run
from tunekit.runs.small_files import Place, forget_request, place_of
from tunekit.tracking.trackers import Reporting
from tunekit.training.measured_memory import is_out_of_memory, set_allocator, shortage

if TYPE_CHECKING:
    from tunekit.training.callbacks import Watch

RESERVE_BYTES = 16 * 2**20
"""Address space reserved to report exhausted memory; it is not written, and takes no memory."""

DATA_WORKER_SECONDS = 5
"""Time between a broken connection to a data worker and the signal of its end, at most, in seconds."""


def work(run: Run, listener: Listener | None = None, place: Place | None = None, *, supervised: bool = False) -> None:
    """Train a run in this process, from its newest complete checkpoint if there is one.

    Args:
        run: The run.
        listener: Called with every event.
        place: Place of this process; by default the only one.
        supervised: Whether a supervisor records the end of the run. Otherwise this process does, whatever happens.

    Raises:
        TunekitError: An error that the user can fix.
        Stopped: The run was stopped, and no supervisor reports it.
    """
    send_nothing_at_all()
    place = place or Place()
    record = Record(run, place, listener)
    log = run.path / ("log.txt" if place.is_main else f"log-{place.rank}.txt")
    ending = Ending(record, supervised=supervised)
    with ending.wishes, Reporting(record, run.recipe.output.report_to), importable(run.path.resolve() / INPUTS):
        try:
            heart = watchdog.Heart(run, place)
            with (
                disk_errors(run, "starting"),
                log.open("a", encoding="utf-8") as stream,
                library_words_to(stream),
                heart,
            ):
                has_stopped = _train(record, heart, ending.wishes, supervised=supervised)
        except BaseException as error:
            if ending.is_due_to_a_wish(error):
                raise ending.stopped(at_a_boundary=False) from error
            record.write_error(error)
            if isinstance(error, ExchangeError) or not isinstance(error, TunekitError):
                with log.open("a", encoding="utf-8") as stream:
                    traceback.print_exc(file=Redacting(stream))
            if not supervised:
                record.end("failed", _why(run, error))
            raise

        if has_stopped:
            stopped = ending.stopped(at_a_boundary=True)
            if not supervised:
                raise stopped


def _why(run: Run, error: BaseException) -> str:
    """Return why a run failed, as known to a process that has an error of its own."""
    if isinstance(error, ExchangeError):
        first = first_error_of(run)
        if first["kind"] != ExchangeError.__name__:
            return f"rank {first['rank']}: {first['problem']}"
    return str(error) if isinstance(error, TunekitError) else f"{type(error).__name__}: {error}"


def _train(record: Record, heart: watchdog.Heart, wishes: Wishes, *, supervised: bool) -> bool:
    plan = record.run.plan
    os.environ.update(plan.environment)
    set_allocator(plan.environment)
    with collected_seldom():
        from tunekit.training.compiled_later import compiled_later

        with compiled_later():
            from tunekit.training.callbacks import Watch

    watch = Watch(record, plan, heart)
    try:
        with watchdog.Watchdog(record, heart, plan, supervised=supervised):
            return _work(watch, wishes)
    except RuntimeError as error:
        # torch raises it wherever the signal of the child reaches this process, also while another error is told.
        lost = watchdog.data_worker_problem(error, record.place)
        if lost is None:
            raise
        raise DataWorkerError(f"{_where(watch, 'after')}: {lost}", hint=watchdog.DATA_WORKER_HINT) from error


def _work(watch: "Watch", wishes: Wishes) -> bool:
    with collected_seldom():
        from tunekit.training.engines.engine import join, leave

        if watch.plan.layout.engine == "automodel":
            from tunekit.training.automodel import load_train_save
        else:
            from tunekit.training.train import load_train_save

    run, place = watch.record.run, watch.record.place
    reserve = bytearray(RESERVE_BYTES)
    try:
        if place.is_main:
            hold_room(run)
        join(watch.plan, place)
        has_stopped = load_train_save(watch, wishes)
        leave()
        return has_stopped
    except (ConnectionError, EOFError):
        # A data worker's connection breaks before the system has announced its end, at which torch raises.
        time.sleep(DATA_WORKER_SECONDS)
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise disk_full(run, _where(watch, "after"), error) from error
    except (RuntimeError, MemoryError) as error:
        del reserve
        if is_out_of_memory(error):
            raise _memory_error(watch, error) from error
        problem = watchdog.exchange_problem(error, place)
        if problem is None or watchdog.data_worker_problem(error, place) is not None:
            raise
        hint = f"see the logs of the other processes: {run.path / 'log*.txt'}"
        raise ExchangeError(f"{_where(watch, 'after')}: {problem}{watchdog.gone_words(run)}", hint=hint) from error
    finally:
        watch.end_tools()


def _memory_error(watch: "Watch", error: BaseException) -> RunError:
    """Return the error for exhausted memory: the planned and the actual memory, and the change to make."""
    plan = watch.plan
    found = shortage(plan, watch.held, watch.context_bytes, error)
    words, method = found.words(), plan.recipe.method
    teacher = probe_model(method.teacher) if has_teacher(method) else None
    change = change_that_fits(plan, probe_model(plan.recipe.model), found.limit_bytes, teacher)
    problem = f"{_where(watch, 'evaluation after')}: {plan.device.name} is out of memory{': ' * bool(words)}{words}"
    return MemoryShortError(problem, hint=f"{change.words}\n{found.table()}", changes=change.changes)


def _where(watch: "Watch", between: str) -> str:
    """Describe the progress of a run; `between` is what precedes the step behind which it is."""
    status = watch.record.run.status()
    if status["phase"] != "training":
        return str(status["phase"])
    step = status["step"]
    return f"step {step + 1}" if watch.timing.is_in_step else f"{between} step {step}"


def main() -> None:
    """Work as one of the processes of the run whose folder is the only argument."""
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)
    supervised = is_supervised()
    if supervised:
        follow_supervisor()
    store = open_store()
    atexit.register(leave_to_the_system)
    run, place = Run(sys.argv[1]), place_of()
    if not supervised and place.is_main:
        # Nobody else says that the run starts, or goes on.
        forget_request(run.path)
        run.begin()
    try:
        work(run, place=place, supervised=supervised)
        del store  # It was the others' too, to the end.
    except TunekitError:
        # It stands in the run folder, for whoever started this.
        sys.exit(2)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()
