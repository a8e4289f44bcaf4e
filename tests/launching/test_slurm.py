"""Runs as jobs of a real Slurm: a controller and two nodes on this machine, with a configuration of their own."""

import getpass
import random
import shutil
import socket
import subprocess
import sys

import psutil
import pytest
import yaml

from tests.processes import in_processes, own_port
from tests.tiny import save_chats, save_tiny_model
from tests.training.watching import Hold
from tests.waiting import LIMIT_SECONDS, until
from tunekit.api import verbs
from tunekit.errors import PlanError, RunError
from tunekit.launching.cluster import Wishes, nodes_of, notice_seconds, seconds_of, submit, with_all_nodes, write_script
from tunekit.recipe.load import load_recipe
from tunekit.runs.run import Run
from tunekit.runs.small_files import place_of, requested
from tunekit.training.worker import work

DAEMONS = "/usr/sbin"
"""Where Debian has slurmctld and slurmd, which is not on every user's path."""

CONFIGURATION = """\
ClusterName=tunekit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
FirstJobId={first_job}
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=first NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={num_cores}
NodeName=second NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={num_cores}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""No cgroups, no munge, no database. A job put back may start again when its credential is over: after 5 s, not 120.

From the number of a job follows the port at which its nodes meet, so that another cluster here has other numbers.
"""

RECIPE = {
    "adapter": "full",
    "train": {"max_steps": 200, "global_batch_size": 4, "learning_rate": 1e-3, "save_steps": 60},
    "output": {"sample_prompts": []},
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of two nodes, until the last test of this module."""
    if shutil.which("slurmctld", path=DAEMONS) is None:
        pytest.skip("needs Slurm: apt-get install slurm-wlm")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            ports=[own_port() for _ in range(3)],
            first_job=random.SystemRandom().randrange(1, 1_000_000),
            folder=folder,
            user=getpass.getuser(),
            num_cores=nodes_of(None, None).num_cores,
        )
    )
    environment = pytest.MonkeyPatch()
    environment.setenv("SLURM_CONF", str(configuration))
    commands = [["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "first"], ["slurmd", "-D", "-N", "second"]]
    daemons = [
        subprocess.Popen([f"{DAEMONS}/{name}", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name, *options in commands
    ]
    try:
        until(lambda: _ask("sinfo", "-h", "-o", "%t %D") == "idle 2", lambda: _ask("sinfo"))
        yield
    finally:
        subprocess.run(["scancel", "--user", getpass.getuser()], check=False, capture_output=True)
        for daemon in reversed(daemons):
            for one in [*psutil.Process(daemon.pid).children(recursive=True), daemon]:
                one.terminate()
            daemon.wait(LIMIT_SECONDS)
        environment.undo()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    data = {"train": str(folder / "rows.jsonl"), "max_length": 64}
    return {**RECIPE, "model": str(save_tiny_model(folder / "model")), "data": data}


def _run(recipe, folder, *, num_nodes=1):
    nodes = nodes_of(None, num_nodes)
    loaded = with_all_nodes(load_recipe(recipe, [f"output.dir={folder}"]), nodes)
    return verbs.make_run(loaded, hardware=nodes), nodes


def _ask(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _told(run, phase):
    """Whether a run has ever said that it is in a phase."""
    return any(event["event"] == "phase" and event["phase"] == phase for event in run.events())


def _work(folder):
    work(Run(folder), place=place_of())


def _losses(run):
    return {event["step"]: event["loss"] for event in run.events() if event["event"] == "log"}


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_and_is_queued_again_and_ends_as_if_nothing_had_been(
    slurm, recipe, tmp_path, monkeypatch
):
    # It does not come to its end before it is told that its time is up.
    hold = Hold(tmp_path / "hold", "run/checkpoints/.saving-60")
    run, nodes = _run(recipe, tmp_path / "run", num_nodes=2)
    assert (run.plan.num_nodes, run.plan.layout.num_processes) == (2, 2)
    with monkeypatch.context() as environment:
        environment.setenv("PYTHONPATH", hold.environment()["PYTHONPATH"])
        job = submit(run, write_script(run, nodes, Wishes(time="30")))

    def words():
        return (run.path / "launcher.log").read_text() + "\n".join(map(str, run.events()))

    until(lambda: run.status()["step"] > 2, words)
    assert run.state == "training"
    # Nothing new is started until it was seen to be queued.
    nodes_are = ["scontrol", "update", "NodeName=first,second"]
    subprocess.run([*nodes_are, "State=DRAIN", "Reason=test"], check=True)
    # What Slurm does some time before the limit.
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    until(lambda: requested(run.path), words)
    hold.go_on()
    until(lambda: _told(run, "queued"), words)
    until(lambda: run.state == "queued", words)
    saved = run.status()["step"]
    assert 2 < saved < 200
    subprocess.run([*nodes_are, "State=RESUME"], check=True)
    until(lambda: run.status()["phase"] == "finished", words)

    kinds = [(event["event"], event.get("step"), event.get("phase")) for event in run.events()]
    assert ("checkpoint", saved, None) in kinds and ("resume", saved, None) in kinds
    assert run.state == "finished" and run.status()["step"] == 200 and (run.model_path / "config.json").exists()
    straight, _ = _run(recipe, tmp_path / "straight", num_nodes=2)
    in_processes(2, _work, str(straight.path))
    assert list(_losses(run)) == list(range(1, 201))
    assert _losses(run) == pytest.approx(_losses(straight), abs=1e-6)


@pytest.mark.slow
def test_a_job_is_queued_until_it_starts_and_died_when_it_is_gone_without_an_end(slurm, recipe, tmp_path):
    run, nodes = _run(recipe, tmp_path / "run")
    script = write_script(run, nodes, Wishes(partition="all", sbatch_args=("--hold",)))
    assert run.state == "queued"
    job = submit(run, script)
    assert run.state == "queued"
    subprocess.run(["scancel", job], check=True)
    until(lambda: run.state == "died", lambda: _ask("squeue"))


@pytest.mark.slow
def test_a_job_that_slurm_does_not_take_fails_with_its_words(slurm, recipe, tmp_path):
    run, nodes = _run(recipe, tmp_path / "run")
    with pytest.raises(RunError, match="invalid partition specified: nowhere"):
        submit(run, write_script(run, nodes, Wishes(partition="nowhere")))
    assert run.state == "failed"


def test_the_printed_script_asks_for_the_nodes_of_the_plan(recipe, tmp_path):
    """Planned for machines that are not here, with a name that the shell and Slurm would each read otherwise."""
    folder = tmp_path / "it's 100% mine"
    nodes = nodes_of("2x8xh100", None)
    run = verbs.make_run(
        {**recipe, "train": {**recipe["train"], "global_batch_size": 16}}, [f"output.dir={folder}"], hardware=nodes
    )
    wishes = Wishes("01:00:00", "gpu", "me", ["--qos=high"])
    script = write_script(run, nodes, wishes)
    lines = script.read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert options[1:5] == ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=8"]
    assert options[5:9] == ["--time=01:00:00", "--partition=gpu", "--account=me", "--signal=B:USR1@60"]
    assert options[-1] == "--qos=high"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert run.plan.environment.get("CUDA_VISIBLE_DEVICES") is None


def test_a_limit_that_leaves_no_time_before_the_save_is_refused(recipe, tmp_path):
    run, nodes = _run(recipe, tmp_path / "run")
    assert notice_seconds(run.plan) == 60
    with pytest.raises(RunError, match="--time 2: too short: Slurm may request a checkpoint 120 s before the limit"):
        write_script(run, nodes, Wishes(time="2"))
    write_script(run, nodes, Wishes(time="2:01"))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("01:30:00", 5400), ("2-12", 216000), ("1-0:30", 88200), ("1-00:00:05", 86405)],
)
def test_limits_are_read_as_sbatch_does(time, seconds):
    """Its manual: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, and all four."""
    assert seconds_of(time) == seconds


def test_nodes_are_counted_once():
    with pytest.raises(PlanError, match="--on 2x8xh100 has 2 nodes, --num-nodes is 4"):
        nodes_of("2x8xh100", 4)
    assert nodes_of("8xh100", 4).num_nodes == 4


def test_what_starts_a_job_is_this_python(recipe, tmp_path):
    run, nodes = _run(recipe, tmp_path / "run")
    assert f"{sys.executable} -m tunekit.launching.local {run.path}" in write_script(run, nodes, Wishes()).read_text()


@pytest.mark.slow
def test_the_command_says_where_it_can_launch_and_prints_what_it_would_submit(recipe, tmp_path):
    given = tmp_path / "double.yaml"
    given.write_text(yaml.safe_dump({**recipe, "output": {"dir": str(tmp_path / "run")}}))
    command = [sys.executable, "-m", "tunekit", "launch", str(given)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "pass one of --nodes, --slurm, --ray and --sky" in refused.stderr
    printed = subprocess.run([*command, "--slurm", "--print"], capture_output=True, text=True, check=True)
    assert printed.stdout == (tmp_path / "run" / "job.sbatch").read_text()
    assert Run(tmp_path / "run").state == "queued"
