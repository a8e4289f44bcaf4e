"""Main memory and cores: those of the machine, or what a container leaves of them."""

from pathlib import Path

import psutil
import pytest

from tunekit.estimates.facts import Device
from tunekit.probe.hardware import probe_hardware, torch_build
from tunekit.probe.host import Limits, apple_device, cgroup_limits

GIB = 2**30
UNLIMITED = "9223372036854771712"
"""What control groups of version 1 show where no limit is set, with pages of 4 KiB."""


@pytest.fixture
def machine(tmp_path):
    """A folder with `proc` and `sys`, from the group of this process and files by their names."""

    def written(group, files):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(group)
        for name, text in files.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return cgroup_limits(tmp_path)

    return written


def test_the_machine_is_at_most_what_psutil_says():
    hardware = probe_hardware()
    assert 0 < hardware.cpu.memory_free_bytes <= hardware.cpu.memory_total_bytes <= psutil.virtual_memory().total
    assert 1 <= hardware.num_cores <= psutil.cpu_count()
    assert hardware.cpu.kind == "cpu"


def test_torch_is_built_for_what_it_says_itself():
    import torch

    build = torch_build()
    assert (build.cuda, build.hip) == (torch.version.cuda, torch.version.hip)


def test_a_container_shows_its_limits_at_the_root(machine):
    """Docker with `--memory 8g --cpus 2.5` on version 2, whose group is the root of its own namespace."""
    limits = machine(
        "0::/\n",
        {
            "memory.max": f"{8 * GIB}\n",
            "memory.current": f"{3 * GIB}\n",
            "memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_anon 0\ninactive_file {GIB}\n",
            "cpu.max": "250000 100000\n",
        },
    )
    assert limits == Limits(memory_bytes=8 * GIB, memory_used_bytes=2 * GIB, cores=2.5)


def test_the_least_limit_of_the_groups_above_holds(machine):
    """A Slurm step on version 2: the job is limited, the step is not."""
    job = "system.slice/slurmstepd.scope/job_7"
    limits = machine(
        f"0::/{job}/step_0/user/task_0\n",
        {
            f"{job}/step_0/user/task_0/memory.max": "max\n",
            f"{job}/step_0/user/task_0/cpu.max": "max 100000\n",
            f"{job}/memory.max": f"{64 * GIB}\n",
            f"{job}/memory.current": f"{GIB}\n",
            "system.slice/memory.max": f"{128 * GIB}\n",
            "system.slice/cpu.max": "1600000 100000\n",
        },
    )
    assert limits == Limits(memory_bytes=64 * GIB, memory_used_bytes=GIB, cores=16)


def test_version_1_has_its_limits_elsewhere(machine):
    """A container whose group is named from outside, while its own files are mounted at the root."""
    limits = machine(
        "12:memory:/docker/4f1c\n5:cpu,cpuacct:/docker/4f1c\n1:name=systemd:/docker/4f1c\n0::/\n",
        {
            "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "memory/memory.usage_in_bytes": f"{2 * GIB}\n",
            "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n",
            "cpu/cpu.cfs_quota_us": "50000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert limits == Limits(memory_bytes=4 * GIB, memory_used_bytes=GIB, cores=0.5)


def test_no_limit_is_none(machine):
    limits = machine(
        "4:memory:/\n1:cpu:/\n",
        {
            "memory/memory.limit_in_bytes": f"{UNLIMITED}\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert limits.memory_bytes == int(UNLIMITED) and limits.cores is None


def test_a_machine_without_control_groups_has_no_limits(tmp_path):
    assert cgroup_limits(tmp_path) == Limits()


@pytest.mark.parametrize(("gib", "mib"), [(16, 10922.67), (32, 21845.34), (64, 49152.00)])
def test_metal_may_use_what_llama_cpp_prints_that_it_may(gib, mib):
    memory = Device(
        kind="cpu",
        name="CPU",
        memory_total_bytes=gib * GIB,
        memory_free_bytes=gib * GIB,
        native_bfloat16=False,
    )
    device = apple_device("Apple M2 Max", memory)
    assert (device.kind, device.name) == ("mps", "Apple M2 Max GPU")
    assert device.memory_total_bytes / 2**20 == pytest.approx(mib, abs=0.02)


@pytest.mark.skipif(not Path("/sys/fs/cgroup").is_dir(), reason="needs Linux")
def test_the_limits_of_this_machine_can_be_read():
    from tunekit.probe.host import ROOT

    limits = cgroup_limits(ROOT)
    assert limits.memory_bytes is None or limits.memory_bytes > limits.memory_used_bytes
