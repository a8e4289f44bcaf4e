"""Runs on a real cluster of Ray's, of one node on this machine."""

import os
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model
from tests.training.watching import Hold
from tests.waiting import LIMIT_SECONDS, until
from tunekit.api import verbs
from tunekit.errors import DependencyError
from tunekit.launching.cluster import nodes_of
from tunekit.launching.ray_train import train_on_ray
from tunekit.runs.run import Run
from tunekit.runs.small_files import place_of
from tunekit.training.worker import work

MIB = 2**20


@pytest.fixture(scope="module")
def hold(tmp_path_factory):
    """What holds Ray's processes up at the end of the run of two, until one of them was killed."""
    return Hold(tmp_path_factory.mktemp("hold"), "run-2/checkpoints/.saving-120")


@pytest.fixture(scope="module")
def address(hold):
    """The address of a cluster with three slots, until the last test of this module."""
    # Ray's sockets lie below, whose paths may have 107 characters: pytest's folders are too deep for them.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield from _cluster(Path(folder), hold)


def _cluster(folder, hold):
    (folder / "ray").mkdir()
    environment = pytest.MonkeyPatch()
    # It tells nobody, and leaves nothing behind in the user's home and in /tmp.
    environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
    environment.setenv("RAY_AUTH_MODE", "disabled")
    environment.setenv("RAY_TMPDIR", str(folder))
    # By itself it starts workers at the niceness of 15, which wait for all tests that run beside this one.
    environment.setenv("RAY_worker_niceness", "0")
    environment.setenv("PYTHONPATH", hold.environment()["PYTHONPATH"])
    environment.setenv("RAY_gcs_server_port_wait_time_s", f"{LIMIT_SECONDS:.0f}")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": 80 * MIB, "temp_dir": str(folder / "ray")}
    # Any port: by itself it takes one that is always the same.
    node["dashboard_agent_listen_port"] = None
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()
        environment.undo()


def _run(folder, *overrides):
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    recipe = {
        "model": str(save_tiny_model(folder / "model")),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": "full",
        "train": {"max_steps": 120, "global_batch_size": 4, "learning_rate": 1e-3, "save_steps": 60},
        "output": {"sample_prompts": [], "dir": str(folder / f"run-{len(overrides)}")},
    }
    return verbs.make_run(recipe, overrides, hardware=nodes_of(None, None))


def _losses(run):
    return {event["step"]: event["loss"] for event in run.events() if event["event"] == "log"}


def _work(folder):
    work(Run(folder), place=place_of())


def _kill_one_process_after(run, step, hold):
    """Kill one of the processes that train, once the run is so far, and let the others go on to its end."""
    until(lambda: run.status()["step"] >= step)
    ours = {one.pid for one in psutil.Process().children(recursive=True)}
    seen = [one for one in psutil.process_iter(["cmdline"]) if one.pid in ours]
    training = [one for one in seen if "RayTrainWorker" in "".join(one.info["cmdline"] or ())]
    assert len(training) == 2, training
    training[0].kill()
    hold.go_on()


@pytest.mark.slow
def test_two_processes_train_as_one_does_though_one_of_them_is_killed(address, hold, tmp_path):
    run = _run(tmp_path, "parallel.num_processes=2", "parallel.max_restarts=1")
    killer = threading.Thread(target=_kill_one_process_after, args=(run, 61, hold), daemon=True)
    killer.start()
    told = []
    train_on_ray(run, address, told.append)
    killer.join()

    (resumed,) = (event for event in run.events() if event["event"] == "resume")
    assert resumed["step"] == 60
    assert told == run.events()
    assert run.state == "finished" and (run.model_path / "config.json").exists()
    (engine, _) = (event for event in run.events() if event["event"] == "engine")
    assert (engine["num_processes"], engine["engine"]) == (2, "ddp")
    straight = _run(tmp_path, "parallel.num_processes=1")
    in_processes(1, _work, str(straight.path))
    assert list(_losses(run)) == list(range(1, 121))
    assert _losses(run) == pytest.approx(_losses(straight), abs=1e-4)


def test_without_ray_it_is_said_what_to_install(tmp_path, monkeypatch):
    run = _run(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DependencyError, match=r"pip install 'tunekit\[ray\]'"):
        train_on_ray(run)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
