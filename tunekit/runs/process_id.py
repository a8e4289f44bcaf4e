"""Identity of a process: its number is reused after its end, and clocks are set."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def identity_of(pid: int) -> str | None:
    """Return an identity that no other process of this number ever had on this host; None where there is none, or a
    zombie.

    On Linux that is the boot, and when it started since then, which no change of the clock alters.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if sys.platform != "linux":
            return f"{process.create_time():.2f}"
        # The name before the state may have spaces and brackets in it.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return f"{BOOT_ID.read_text(encoding='ascii').strip()}-{fields[19]}"
    except (psutil.Error, FileNotFoundError, ProcessLookupError):
        return None


def is_alive(pid: int, identity: str) -> bool:
    """Return whether a process of this host is alive, and still the same."""
    return identity_of(pid) == identity


def kill(pid: int, identity: str) -> None:
    """End a process of this host if it is still the same: no other, whatever happens meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        if sys.platform != "linux":
            if is_alive(pid, identity):
                os.kill(pid, signal.SIGKILL)
            return
        # What is held so keeps its number.
        descriptor = os.pidfd_open(pid)
        try:
            if is_alive(pid, identity):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
