"""Exit of a process that was asked to stop: reported on the screen at once, and in the status when it is over."""

import os
from types import TracebackType
from typing import Self

from tunekit.errors import ExchangeError, Stopped
from tunekit.process.signals import Wishes
from tunekit.runs.available_actions import next_command
from tunekit.runs.rank import Place
from tunekit.runs.record import Record, errors_of
from tunekit.runs.run import Run
from tunekit.runs.scheduler_job import read_job
from tunekit.runs.stop_request import Request, words_of


class Ending:
    """The wishes that a process of a run hears, and what it says of them, from the beginning of a `with` block on.

    Args:
        record: Where it says it.
        supervised: Whether another process says how the run ended, unless it was stopped at the end of a step.
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

    def __enter__(self) -> Self:
        self.wishes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wishes.__exit__(kind, error, trace)

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
            phase, reason = phase_after(self._run, request), words_of(self._run, request, is_late=self.wishes.is_late)
        if at_a_boundary or not self._supervised:
            self._record.end(phase, reason)
        return stopped(self._run, request, reason)

    def _tell(self, wish: Request) -> None:
        if self._is_joined and errors_of(self._run):
            self.wishes.end_now()
        self._record.write("stop", **told_of(self._run, wish))

    def _give_up(self) -> None:
        """End this process, which does not end by itself: it waits for others, or is not in Python."""
        if self._record.place.is_main:
            # Whoever listens may be what it stands in.
            request = self.wishes.known
            assert request is not None
            Record(self._run, Place()).end(
                phase_after(self._run, request), words_of(self._run, request, is_late=self.wishes.is_late)
            )
        os._exit(0 if self.wishes.known is None else self.wishes.known.exit_code)


def phase_after(run: Run, asked: Request) -> str:
    """The last phase of a run that was stopped: a job of Slurm's whose time was up is put into the queue again."""
    job = read_job(run.path)
    is_up = asked.by == "SIGUSR1" and job is not None and job == os.environ.get("SLURM_JOB_ID")
    return "queued" if is_up else "interrupted"


def stopped(run: Run, asked: Request, reason: str) -> Stopped:
    """Return the error for a run that was stopped."""
    return Stopped(reason, hint=next_command(run), exit_code=asked.exit_code)


def told_of(run: Run, wish: Request) -> dict[str, object]:
    """The fields of the `stop` event: the wish, and what becomes of it, in words."""
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
