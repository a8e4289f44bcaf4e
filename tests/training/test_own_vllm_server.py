"""A vLLM server that a run starts: what it is asked for, and that it begins and ends with the run."""

import os
import signal

import psutil
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.policy_server import FAILS
from tests.training.served import STEPS, Served
from tests.waiting import LIMIT_SECONDS, until

pytestmark = pytest.mark.slow


def servers(run):
    """Process IDs and arguments of the servers that a run started."""
    return [line for line in run.asked if "pid" in line]


def assert_same_model(*runs):
    whole, other = (load_file(run.folder / "run" / "model" / "model.safetensors") for run in runs)
    assert whole.keys() == other.keys() and all(torch.equal(whole[name], other[name]) for name in whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("own"), 1, own=True).go()


def test_it_generates_like_one_that_runs_already_and_ends_with_the_run(whole, tmp_path):
    (server,) = servers(whole)
    assert not psutil.pid_exists(server["pid"])
    arguments = server["arguments"]
    assert arguments["model"] == str(whole.folder / "model")
    assert (arguments["dtype"], arguments["max_model_len"], arguments["gpu_memory_utilization"]) == ("float32", 64, 0.9)
    assert (arguments["tensor_parallel_size"], arguments["data_parallel_size"]) == (1, 1)
    assert_same_model(whole, Served(tmp_path, 1).go())


def test_two_processes_learn_from_it(whole, tmp_path):
    run = Served(tmp_path, 1, num_processes=2, own=True).go()
    assert len(servers(run)) == 1
    assert [run.logs[step]["reward"] for step in range(1, STEPS + 1)] == pytest.approx(
        [whole.logs[step]["reward"] for step in range(1, STEPS + 1)]
    )


def test_a_stopped_run_ends_it_and_a_resumed_one_starts_another(whole, tmp_path):
    run = Served(tmp_path, 1, own=True).go_until(2)
    (server,) = servers(run)
    assert not psutil.pid_exists(server["pid"])
    run.go("resume")
    assert len(servers(run)) == 2
    assert_same_model(whole, run)


def test_a_run_whose_server_dies_ends_with_the_reason_and_goes_on(whole, tmp_path):
    run = Served(tmp_path, 1, own=True)
    with run.process("train") as process:
        run.wait_for(2)
        os.kill(servers(run)[0]["pid"], signal.SIGKILL)
        assert process.wait(LIMIT_SECONDS) == 2
    assert "method.generation.vllm_mode: the run's vLLM server was killed by SIGKILL" in run.output
    assert f"see {tmp_path / 'run' / 'vllm.log'}" in run.output
    assert_same_model(whole, run.go("resume"))


def test_a_server_that_does_not_start_ends_the_run_with_its_last_line(tmp_path):
    run = Served(tmp_path, 1, own=True)
    (tmp_path / FAILS).write_text("ValueError: no room for the cache")
    with run.process("train") as process:
        assert process.wait(LIMIT_SECONDS) == 2
    assert "the run's vLLM server exited with code 1: ValueError: no room for the cache; see " in run.output


def test_it_ends_where_the_run_is_killed(tmp_path):
    run = Served(tmp_path, 1, own=True)
    with run.process("train") as process:
        run.wait_for(1)
        process.kill()
        process.wait()
    pid = servers(run)[0]["pid"]
    until(lambda: not psutil.pid_exists(pid))
