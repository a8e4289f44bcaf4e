"""Several machines for real: network namespaces with addresses of their own, reached by ssh, that share their disk."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

import tunekit
from tests.tiny import save_chats, save_tiny_model
from tests.training.namespaces import Namespaces, missing, namespaces
from tests.training.watching import Hold
from tests.waiting import LIMIT_SECONDS, is_gone, until
from tunekit.errors import PlanError, RunError
from tunekit.launching.ssh_hosts import Hosts
from tunekit.runs.run import Run

NUM_STEPS = 80


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts, and a third that commands are given on."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with namespaces(3, tmp_path_factory.mktemp("hosts") / "ssh") as found:
        yield found


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    recipe = {
        "model": "model",
        "data": {"train": "rows.jsonl", "max_length": 64},
        "adapter": "full",
        "train": {"max_steps": NUM_STEPS, "global_batch_size": 4, "learning_rate": 1e-3, "save_steps": 8},
        "output": {"sample_prompts": []},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def expected(workspace):
    """Losses of one process."""
    before = Path.cwd()
    os.chdir(workspace)
    try:
        return losses(tunekit.train("recipe.yaml", ["output.name=alone"]))
    finally:
        os.chdir(before)


class Command:
    """tunekit on a host, in a folder that all hosts see."""

    def __init__(
        self, hosts: Namespaces, workspace: Path, *words: str, before: str = "", held: Mapping[str, str] | None = None
    ) -> None:
        program = f"{before}\nfrom tunekit.cli.app import main\nmain()"
        self.process = subprocess.Popen(
            hosts.inside(2, sys.executable, "-c", program, *words),
            cwd=workspace,
            env={**hosts.environment(), **(held or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell starts what runs in the background with the signal ignored, and the tests may run there.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def end(self) -> tuple[int, str]:
        """Its exit code and what it printed."""
        words, _ = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, words


def losses(run: Run) -> list[float]:
    """Losses of all steps; of one that was done again the later."""
    return list({event["step"]: event["loss"] for event in run.events() if event["event"] == "log"}.values())


def running(hosts: Namespaces, module: str, address: str) -> list[psutil.Process]:
    """Processes of a module on the host with an address."""
    return [
        process
        for process in hosts.processes()
        if module in process.cmdline() and f" {address} " in process.environ().get("SSH_CONNECTION", "")
    ]


def ssh_to(hosts: Namespaces, address: str) -> set[int]:
    """Numbers of the processes that reach for an address, or have reached it."""
    found = set()
    for process in hosts.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if words and Path(words[0]).name == "ssh" and any(word.endswith(address) for word in words):
                found.add(process.pid)
    return found


def two(hosts: Namespaces) -> list[str]:
    return ["--nodes", ",".join(hosts.addresses[:2])]


@pytest.mark.slow
def test_two_hosts_train_as_one_process_does(hosts, workspace, expected):
    folder = workspace / "two"
    code, words = Command(hosts, workspace, "launch", "recipe.yaml", f"output.dir={folder}", *two(hosts)).end()
    assert code == 0, words
    run = Run(folder)
    assert (run.state, run.plan.num_nodes, run.plan.layout.num_processes) == ("finished", 2, 2)
    assert losses(run) == pytest.approx(expected, abs=1e-5)
    assert "10.77.0.1 (eth0), 10.77.0.2 (eth0)" in words
    until(lambda: not hosts.processes())


@pytest.mark.slow
def test_a_run_whose_host_is_cut_off_ends_with_its_name_and_goes_on_when_the_host_is_back(
    hosts, workspace, expected, tmp_path
):
    folder = workspace / "cut"
    # It does not come to its end before the host is cut off.
    hold = Hold(tmp_path / "hold", "cut/checkpoints/.saving-16")
    words = ["launch", "recipe.yaml", f"output.dir={folder}", *two(hosts)]
    command = Command(hosts, workspace, *words, held=hold.environment())
    until(lambda: (folder / "checkpoints" / "checkpoint-8" / "manifest.json").exists())
    hosts.link(1, "down")
    try:
        code, words = command.end()
        assert code == 2, words
        assert "10.77.0.2: no heartbeat" in words
        assert "10.77.0.1:" not in words
        run = Run(folder)
        assert run.state == "failed"
        assert "10.77.0.2" in run.status()["exit_reason"]
        assert run.status()["step"] < NUM_STEPS
        # The other side of the cut ends by itself, though nobody can tell it to.
        until(lambda: not [process for process in hosts.processes() if "tunekit" in " ".join(process.cmdline())])
        assert len([event for event in run.events() if event["event"] == "error"]) == 1
    finally:
        hosts.link(1, "up")
    with pytest.raises(PlanError, match="planned for 2 nodes"):
        tunekit.resume(folder)
    code, words = Command(hosts, workspace, "resume", str(folder), *two(hosts)).end()
    assert code == 0, words
    assert run.state == "finished"
    assert losses(run) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_run_starts_again_once_a_lost_host_answers_and_ctrl_c_ends_it_on_all_hosts(hosts, workspace):
    folder = workspace / "again"
    restarts = ["parallel.max_restarts=1", "train.max_steps=100000"]
    command = Command(hosts, workspace, "launch", "recipe.yaml", f"output.dir={folder}", *restarts, *two(hosts))
    until(lambda: (folder / "checkpoints" / "checkpoint-8" / "manifest.json").exists())
    run = Run(folder)
    (node,) = running(hosts, "tunekit.launching.ssh_node", "10.77.0.2")
    before = ssh_to(hosts, "10.77.0.2")
    node.kill()
    hosts.link(1, "down")
    until(lambda: any(event["event"] == "restart" for event in run.events()))
    (restart,) = [event for event in run.events() if event["event"] == "restart"]
    assert restart["reason"].startswith("10.77.0.2: ")
    until(lambda: ssh_to(hosts, "10.77.0.2") - before)
    hosts.link(1, "up")
    until(lambda: any(event["event"] == "resume" for event in run.events()))
    resumed = run.status()["step"]
    until(lambda: run.status()["step"] > resumed + 1)
    command.process.send_signal(signal.SIGINT)
    code, words = command.end()
    assert code == 130, words
    assert run.state == "interrupted"
    until(lambda: not hosts.processes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "override", "reason"),
    [
        ("10.77.0.1,10.77.0.9", "", r"^10\.77\.0\.9: .*No route to host"),
        ("10.77.0.1,nobody@10.77.0.2", "", r"^nobody@10\.77\.0\.2: .*Permission denied"),
        ("10.77.0.1,root@10.77.0.1", "", r"^root@10\.77\.0\.1: same machine as 10\.77\.0\.1"),
        ("10.77.0.1,10.77.0.1", "", "duplicate host 10.77.0.1"),
        ("10.77.0.1,10.77.0.2", "parallel.num_processes=3", "3 processes cannot be spread evenly over 2 hosts"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_the_hosts_name_before_rows_are_read(
    hosts, workspace, nodes, override, reason
):
    def runs() -> list[Path]:
        return sorted((workspace / "runs").glob("*"))

    before = runs()
    words = ["launch", "recipe.yaml", *filter(None, [override]), "--nodes", nodes]
    code, said = Command(hosts, workspace, *words).end()
    assert code == 2, said
    assert re.search(reason, said, re.MULTILINE), said
    assert runs() == before


def test_a_name_that_ssh_would_take_for_an_option_is_none():
    with pytest.raises(RunError, match="invalid host"):
        Hosts(["-oProxyCommand=true"])


@pytest.mark.slow
def test_hosts_with_other_versions_or_another_disk_are_refused_by_name(hosts, workspace, tmp_path):
    (torch,) = Path(sysconfig.get_path("purelib")).glob("torch-*.dist-info")
    shutil.copytree(torch, tmp_path / "torch")
    metadata = tmp_path / "torch" / "METADATA"
    metadata.write_text(re.sub(r"^Version: .*", "Version: 1.0", metadata.read_text("utf-8"), flags=re.M), "utf-8")
    hosts.serve(1, 2201, ["--bind", str(tmp_path / "torch"), str(torch)])
    (workspace / "other").mkdir()
    hosts.serve(1, 2202, ["-t", "tmpfs", "none", str(workspace / "other")])

    old = Command(hosts, workspace, "launch", "recipe.yaml", "--nodes", "10.77.0.1,10.77.0.2:2201")
    blind = Command(
        hosts,
        workspace,
        *("launch", "recipe.yaml", f"output.dir={workspace / 'other' / 'run'}", "--nodes", "10.77.0.1,10.77.0.2:2202"),
        before="from tunekit.launching import ssh_hosts; ssh_hosts.SEEN_SECONDS = 0",
    )
    code, words = old.end()
    assert code == 2, words
    assert "10.77.0.2:2201: has torch 1.0, but 10.77.0.1 has torch 2" in words
    code, words = blind.end()
    assert code == 2, words
    assert f"10.77.0.2:2202: does not see {workspace / 'other' / 'run'}" in words


@pytest.mark.slow
def test_doctor_measures_the_exchange_between_hosts(hosts, workspace):
    code, words = Command(hosts, workspace, "doctor", "--network", "recipe.yaml", *two(hosts)).end()
    assert code == 0, words
    assert "2 ranks, gloo" in words
    assert "10.77.0.1 (eth0), 10.77.0.2 (eth0)" in words
    rows = re.findall(r"(all-\w+) +([\d.]+) ([KM])iB +([\d.]+) ms +([\d.]+) GB/s +unknown", words)
    assert len(rows) == 6, words
    for collective, size, unit, milliseconds, speed in rows:
        # For two ranks, by nccl-tests: all of the bytes in an all-reduce, half of them in an all-gather.
        sent = float(size) * {"K": 2**10, "M": 2**20}[unit] * {"all-reduce": 1, "all-gather": 0.5}[collective]
        assert float(speed) == pytest.approx(sent / float(milliseconds) / 1e6, rel=0.02)


@pytest.mark.slow
def test_doctor_names_the_rank_that_does_not_answer(tmp_path):
    doctor = subprocess.Popen(
        [sys.executable, "-m", "tunekit", "doctor", "--network"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )

    def ranks() -> list[psutil.Process]:
        return [
            process
            for process in psutil.Process(doctor.pid).children(recursive=True)
            if "tunekit.launching.bandwidth" in process.cmdline() and process.environ().get("RANK") == "1"
        ]

    until(ranks)
    (rank,) = ranks()
    # Once it has said that it is there, which it does each second.
    until(lambda: rank.num_threads() > 1)
    num_writes = rank.io_counters().write_count
    until(lambda: rank.io_counters().write_count > num_writes)
    rank.suspend()
    _, words = doctor.communicate(timeout=LIMIT_SECONDS)
    assert doctor.returncode == 2
    assert re.search(r"^rank 1 on this machine: no heartbeat for 8 s, while ", words), words
    until(lambda: is_gone(rank))
