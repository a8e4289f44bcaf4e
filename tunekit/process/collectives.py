"""Collectives of a run's processes besides those of training, and errors for a process that does not answer."""

import re
import traceback
from collections.abc import Sequence
from typing import TypeVar, cast

from tunekit.runs.small_files import Place

T = TypeVar("T")

FROM_GLOO = re.compile(r"/gloo/|\bgloo\b", re.IGNORECASE)
"""Common part of gloo's errors: the place in its code that raised them; they are plain RuntimeErrors."""


DATA_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<sign>[^.]+)|exited unexpectedly)"
)
"""Message of torch where a data worker died: RuntimeErrors, raised anywhere."""

DATA_WORKER_HINT = (
    "the system kills a process where main memory runs out, which its own log says, and one that finds no room in "
    "/dev/shm fails: make room, or train fewer processes on this machine"
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
    end = f"was ended by a signal ({cause['sign']})" if cause["sign"] else "ended by itself"
    return f"process {cause['pids'].strip()}, which makes micro-batches for rank {place.rank}, {end}"


def any_of(flags: Sequence[bool], place: Place) -> list[bool]:
    """Of each flag whether it is set in any process; all call it together. They go over the processors' network."""
    if place.num_processes == 1:
        return list(flags)
    import torch

    votes = torch.tensor(flags, dtype=torch.uint8)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
    return [bool(vote) for vote in votes]


def of_all(value: T, place: Place) -> list[T]:
    """Gather the values of all processes by rank, in every process; all call it together."""
    if place.num_processes == 1:
        return [value]
    import torch

    values: list[T | None] = [None] * place.num_processes
    torch.distributed.all_gather_object(values, value)
    return cast(list[T], values)


def exchange_problem(error: RuntimeError, place: Place) -> str | None:
    """Describe what a process waited for in vain; None where the error is not another process's end or silence.

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
        return f"rank {place.rank} waited for the other processes in {_function(error)} until its time was up ({words})"
    return f"rank {place.rank} lost contact with another process in {_function(error)} ({words})"


def _function(error: BaseException) -> str:
    """The innermost function outside torch in which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "/torch/" not in frame.filename]
    return f"{(outside or frames)[-1].name}()"
