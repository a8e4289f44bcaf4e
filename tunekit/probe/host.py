"""Main memory and cores that this process may use: in a container less than the machine has.

Linux limits a group of processes by files under /sys/fs/cgroup, in one of two forms (kernel documentation,
admin-guide/cgroup-v2 and cgroup-v1). A limit of any group above holds too, so the least counts.
"""

import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tunekit.estimates.facts import Device

ROOT = Path("/")

METAL_SHARES = ((36 * 2**30, 3 / 4), (0, 2 / 3))
"""Share of main memory that Metal recommends to use at most, from a size on. Logs of llama.cpp print 10,923 MiB for
16 GiB, 21,845 for 32 and 49,152 for 64 (abetlen/llama-cpp-python#687, ggml-org/llama.cpp#2011 and #1870)."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of a group of processes; None where it may use all."""

    memory_bytes: int | None = None
    memory_used_bytes: int = 0
    """Of that, without what the kernel takes back when it is needed."""
    cores: float | None = None


def host_cpu() -> Device:
    """The processor with the main memory that this process may use."""
    memory, limits = psutil.virtual_memory(), cgroup_limits(ROOT)
    total, free = memory.total, memory.available
    if limits.memory_bytes is not None and limits.memory_bytes < total:
        total = limits.memory_bytes
        free = min(free, max(0, total - limits.memory_used_bytes))
    return Device(
        kind="cpu",
        name=f"CPU ({processor()})",
        memory_total_bytes=total,
        memory_free_bytes=free,
        native_bfloat16=False,
    )


def num_cores() -> int:
    """Cores that this process may use, of a share of one the whole."""
    allowed = len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count() or 1
    limit = cgroup_limits(ROOT).cores
    return allowed if limit is None else max(1, min(allowed, int(limit)))


def apple_device(name: str, memory: Device) -> Device:
    """The GPU of an Apple processor: it has no memory of its own and may use a share of host memory."""
    share = next(share for size, share in METAL_SHARES if memory.memory_total_bytes >= size)
    total = int(memory.memory_total_bytes * share)
    return Device(
        kind="mps",
        name=f"{name} GPU",
        memory_total_bytes=total,
        memory_free_bytes=min(total, memory.memory_free_bytes),
        native_bfloat16=False,
        link="host memory",
    )


def processor() -> str:
    """The processor's name."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cgroup_limits(root: Path) -> Limits:
    """Return the limits of this process's control groups.

    Args:
        root: The folder that `proc` and `sys` are in.
    """
    groups = root / "proc/self/cgroup"
    if not groups.is_file():
        return Limits()
    limits = []
    for line in groups.read_text(encoding="utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            limits += [_version_2(folder) for folder in _with_parents(root / "sys/fs/cgroup", group)]
        for controller in {"memory", "cpu"} & set(controllers.split(",")):
            limits += [_version_1(folder) for folder in _with_parents(root / "sys/fs/cgroup" / controller, group)]
    memory = [limit for limit in limits if limit.memory_bytes is not None]
    least = min(memory, key=lambda limit: limit.memory_bytes or 0, default=Limits())
    cores = min((limit.cores for limit in limits if limit.cores is not None), default=None)
    return Limits(least.memory_bytes, least.memory_used_bytes, cores)


def _with_parents(mount: Path, group: str) -> Iterator[Path]:
    """Folders of a group and of those above it. In a container the group's own is often what is mounted."""
    folder = mount / group.lstrip("/")
    yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(mount) and parent.is_dir())


def _version_2(folder: Path) -> Limits:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return Limits(
        memory_bytes=_number(folder / "memory.max"),
        memory_used_bytes=max(0, (_number(folder / "memory.current") or 0) - _statistic(folder, "inactive_file")),
        cores=int(quota) / int(period) if quota.isdigit() else None,
    )


def _version_1(folder: Path) -> Limits:
    """An unset limit of memory is there a number larger than any machine; that of cores is -1."""
    used = (_number(folder / "memory.usage_in_bytes") or 0) - _statistic(folder, "total_inactive_file")
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return Limits(
        memory_bytes=_number(folder / "memory.limit_in_bytes"),
        memory_used_bytes=max(0, used),
        cores=quota / period if quota is not None and period else None,
    )


def _statistic(folder: Path, name: str) -> int:
    """A number of memory.stat, which has a name and a number in every line."""
    lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return next((int(words[1]) for words in lines if words[0] == name), 0)


def _number(file: Path) -> int | None:
    """The number in a file; None for `max`, -1, or a file that is not there."""
    text = _read(file)
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
