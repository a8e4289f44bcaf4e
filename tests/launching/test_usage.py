"""Use of this host by a run, read from real processes."""

import os
import subprocess
import sys
import time

from tests.training.folders import made_run
from tests.waiting import LIMIT_SECONDS
from tunekit.launching.usage import UsageMeter
from tunekit.probe.host import host_cpu, num_cores
from tunekit.runs.small_files import identity_of

SPINNING = "held = bytearray(200 * 2**20); print(flush=True)\nwhile True: pass"


def test_cores_and_memory_are_those_of_the_processes_of_the_run(tmp_path):
    with subprocess.Popen([sys.executable, "-c", SPINNING], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            named = {"pid": process.pid, "identity": identity_of(process.pid), "host": os.uname().nodename}
            meter = UsageMeter(made_run(tmp_path / "run", phase="training", **named))
            first = meter.read()
            assert first.cores is None and first.num_cores == num_cores() and first.devices == ()
            until, second = time.monotonic() + LIMIT_SECONDS, first
            while not second.cores and time.monotonic() < until:
                time.sleep(0.2)
                second = meter.read()
            assert 0 < second.cores < 1.5
            assert 200 * 2**20 < second.used_bytes < 2**30
            assert second.total_bytes == host_cpu().memory_total_bytes
        finally:
            process.kill()
    assert meter.read() is None
