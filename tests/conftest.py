"""What all tests share: the number of processes and threads, and what is skipped on this machine."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests import tiers

# Workers that each start a thread a core get in each other's way, so under xdist each takes one. It is set before
# torch is imported, and the processes that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests assert no wall times: an example that is drawn may take as long as a busy machine makes it.
settings.register_profile("tunekit", deadline=None)
settings.load_profile("tunekit")

# Collecting tests makes millions of objects that stay; looking through them takes a quarter of the time.
gc.disable()

# What is prepared in tests is kept apart from what the user prepared, and shared by the processes that tests start.
if "TUNEKIT_TEST_CACHE" not in os.environ:
    os.environ["TUNEKIT_TEST_CACHE"] = tempfile.mkdtemp(prefix="tunekit-cache-")
    atexit.register(shutil.rmtree, os.environ["TUNEKIT_TEST_CACHE"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ["TUNEKIT_TEST_CACHE"]

# Runs of tests stand in no line with the user's own.
os.environ["XDG_STATE_HOME"] = os.environ["TUNEKIT_TEST_CACHE"]

# GNU readline, which pytest loads, tells child processes of 80 columns wherever they write to.
os.environ["COLUMNS"] = "140"

VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
"""Accelerators that this machine offers to the tests."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return what `-n auto` means: a worker more than there are cores, but at most 8, as each loads torch."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores + 1, 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the full tier."""
    group = parser.getgroup("tunekit")
    group.addoption("--shard", metavar="K/N", help="run the K-th of N parts, divided by recorded durations")
    group.addoption("--record-durations", action="store_true", help="write tests/durations.json from this run")


def pytest_configure(config: pytest.Config) -> None:
    """Have xdist give out files in the order of the tests, not by the number of tests in them."""
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is not quick, keep one shard, and begin with the longest files, lest one worker be left with them."""
    durations = tiers.read_durations()
    for item in items:
        if mark := item.get_closest_marker("quarantined"):
            tiers.check_quarantine(item.nodeid, mark)
            item.add_marker("slow")
    tiers.mark_samples(items)
    if shard := config.getoption("shard"):
        mine = tiers.files_of_shard(shard, {tiers.file_of(item.nodeid) for item in items}, durations)
        config.hook.pytest_deselected(items=[item for item in items if tiers.file_of(item.nodeid) not in mine])
        items[:] = [item for item in items if tiers.file_of(item.nodeid) in mine]
    items.sort(key=lambda item: -durations.get(tiers.file_of(item.nodeid), 0.0))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what was collected out of garbage collection: each training collects, and would look at all of it."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give it back, for a clean end of the interpreter."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Count quarantined tests, and write durations where that was asked for."""
    reports = [report for kind in terminalreporter.stats.values() for report in kind if hasattr(report, "keywords")]
    names = sorted({report.nodeid for report in reports if "quarantined" in report.keywords})
    terminalreporter.write_line("".join(f"quarantined: {name}\n" for name in names) + f"{len(names)} quarantined")
    if config.getoption("record_durations"):
        tiers.record(reports)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs hardware or a network that is not there; hide accelerators from what is exact only on a CPU."""
    if item.get_closest_marker("network") and os.environ.get("TUNEKIT_TEST_NETWORK") != "1":
        pytest.skip("needs the hub: TUNEKIT_TEST_NETWORK=1 runs it")
    needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
    if not needed:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif VISIBLE is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = VISIBLE
    if needed:
        import torch

        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} accelerator{'s' if needed > 1 else ''}")


@pytest.fixture(autouse=True)
def _autocast_ends_with_the_test() -> Iterator[None]:
    """Fail the test that leaves autocast on: later ones would train on casts that are never renewed."""
    yield
    if torch := sys.modules.get("torch"):
        assert not torch.is_autocast_enabled("cpu"), "the test left autocast on"


_elsewhere: set[str] = set()
"""Modules that are known not to come from a test's folder: thousands, which are looked at once."""


@pytest.fixture(autouse=True)
def _modules_of_a_test_go_with_it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the modules that were imported from a test's folder: another test may write, or miss, one of that name."""
    yield
    folder = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    for name in sys.modules.keys() - _elsewhere:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]
        else:
            _elsewhere.add(name)
