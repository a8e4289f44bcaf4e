"""Cores, memory and GPUs that a run uses now, on this host."""

import contextlib
import time
from dataclasses import dataclass

import psutil

from tunekit.errors import TunekitError
from tunekit.launching.remaining import Remaining
from tunekit.probe.host import host_cpu, num_cores
from tunekit.probe.nvidia import DeviceUsage, usage_of_devices
from tunekit.runs.run import Run

MAX_WALKED_BYTES = 8 * 2**30
"""Largest process whose shared memory is counted exactly."""


@dataclass(frozen=True)
class Usage:
    """Use of this host by a run.

    Attributes:
        cores: Cores that its processes kept busy since the last reading, such as 1.5; None at the first.
        num_cores: Cores of this host.
        used_bytes: Memory of its processes; what small ones share counts once.
        total_bytes: Memory of this host.
        devices: Its GPUs, with all that they do, for whichever program.
    """

    cores: float | None
    num_cores: int
    used_bytes: int
    total_bytes: int
    devices: tuple[DeviceUsage, ...] = ()


class UsageMeter:
    """Reads the use of this host by one run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._remaining = Remaining(run)
        self._seconds: dict[int, float] = {}
        """Seconds of each process on the processor, at the last reading."""
        self._read: float | None = None
        self._devices: tuple[str, ...] | None = None

    def read(self) -> Usage | None:
        """Return the use now; None where no process of the run is on this host."""
        self._remaining.look()
        now, seconds, used_bytes = time.monotonic(), dict[int, float](), 0
        for pid in self._remaining.pids:
            # It may end meanwhile.
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                times = process.cpu_times()
                seconds[pid] = times.user + times.system
                used_bytes += _memory_of(process)
        if not seconds:
            return None
        cores = None
        if self._read is not None:
            spent = sum(max(0.0, seconds[pid] - self._seconds[pid]) for pid in seconds.keys() & self._seconds.keys())
            cores = spent / (now - self._read)
        self._seconds, self._read = seconds, now
        return Usage(cores, num_cores(), used_bytes, host_cpu().memory_total_bytes, self._gpus())

    def _gpus(self) -> tuple[DeviceUsage, ...]:
        if self._devices is None:
            try:
                plan = self._run.plan
            except TunekitError:
                # A damaged plan is told elsewhere.
                self._devices = ()
            else:
                names = plan.environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
                server = plan.vllm.devices if plan.vllm is not None else ()
                self._devices = tuple(dict.fromkeys(filter(None, (*names, *server))))
        return usage_of_devices(self._devices)


def _memory_of(process: psutil.Process) -> int:
    """Return a process's memory, with its share of what it has in common with others where the system tells that.

    To tell it, the system walks through all pages while the process cannot map others: large ones are not held up so.
    """
    resident = int(process.memory_info().rss)
    if resident > MAX_WALKED_BYTES:
        return resident
    with contextlib.suppress(psutil.AccessDenied, AttributeError):
        return int(process.memory_full_info().pss)
    return resident
