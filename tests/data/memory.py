"""How much memory a process took at most; only Linux says it of a process alone (elsewhere it counts its parent's)."""

from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_mib() -> int:
    """The most memory that this process held since it began, in MiB."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) // 1024
