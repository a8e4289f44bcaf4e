"""Processes that somebody else's launcher started agree on one run, or on none."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.launching.test_local import RECIPE, losses, work_in_place
from tests.processes import in_processes, own_port
from tests.tiny import save_chats, save_tiny_model
from tests.training.watching import Hold
from tests.waiting import LIMIT_SECONDS, until
from tunekit.api import verbs
from tunekit.errors import DataError, PlanError, RunError, StandstillError
from tunekit.launching import external
from tunekit.launching.external import go_on_with, meeting_point, open_for_attempt, train_joined
from tunekit.probe.nodes import with_started
from tunekit.recipe.load import load_recipe
from tunekit.runs.record import Record
from tunekit.runs.run import Run, list_runs
from tunekit.runs.small_files import Place, place_of

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "337707009",
}
SCRIPT = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NUM_NODES": "2",
}
SRUN = SCRIPT | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    (folder / "double.yaml").write_text(RECIPE, encoding="utf-8")
    return folder


@pytest.mark.parametrize("environment", [TORCHRUN, MPIRUN, SRUN, SRUN | MPIRUN, SRUN | TORCHRUN])
def test_a_process_finds_its_place_by_its_launcher(environment):
    assert place_of(environment) == Place(rank=3, local_rank=1, num_processes=4, num_local=2)


@pytest.mark.parametrize("environment", [{}, SCRIPT, SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}])
def test_the_script_of_a_job_and_a_shell_in_it_are_alone(environment):
    assert place_of(environment) == Place()


def test_tasks_that_are_not_as_many_on_every_node_are_refused():
    with pytest.raises(PlanError, match="start the same number of processes on every node"):
        place_of(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1"})


def test_where_the_processes_meet_is_said_by_the_launcher_or_told_from_the_job():
    place = Place(rank=1, local_rank=1, num_processes=2, num_local=2)
    named = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4242"}
    assert not set(named) & set(meeting_point(place, TORCHRUN | named))
    one, other = (meeting_point(place, SRUN | {"SLURM_JOB_ID": job}) for job in ("7", "8"))
    assert one["MASTER_ADDR"] == "127.0.0.1"
    assert one["MASTER_PORT"] != other["MASTER_PORT"]
    assert {"RANK": "1", "WORLD_SIZE": "2"}.items() <= one.items()
    with pytest.raises(RunError, match="mpirun -x MASTER_ADDR"):
        meeting_point(Place(3, 1, 4, 2), MPIRUN)


CONTRADICTIONS = {
    "processes": (
        ["parallel.num_processes=2"],
        {},
        "parallel.num_processes: 2 contradicts torchrun, which started 4; unset it, or start as many",
    ),
    "restarts": (
        ["parallel.max_restarts=1"],
        {},
        "parallel.max_restarts: only torchrun can restart its processes; "
        "unset it, or run `tunekit train` without a launcher; `tunekit resume` resumes a run",
    ),
    "fsdp": (
        [],
        {"ACCELERATE_USE_FSDP": "true"},
        "accelerate launch sets FSDP, which the plan decides (ACCELERATE_USE_FSDP); "
        "remove it, and set parallel.strategy in the recipe",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_recipe_that_contradicts_its_launcher_is_refused(name):
    overrides, environment, message = CONTRADICTIONS[name]
    with pytest.raises(PlanError) as caught:
        with_started(load_recipe("sft/quickstart", overrides), TORCHRUN | environment)
    assert str(caught.value) == message


def test_a_recipe_asks_for_the_processes_that_were_started():
    recipe = load_recipe("sft/quickstart")
    assert with_started(recipe, {}) == recipe
    assert with_started(recipe, TORCHRUN).parallel.num_processes == 4


def join(folder, *overrides, nodes=1):
    """What a process says that shares a run: its losses, or how it ended."""
    os.chdir(folder)
    place = place_of()
    if nodes > 1:
        place = Place(place.rank, 0, place.num_processes, 1)
        os.chdir(folder / str(place.rank))
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    recipe = folder / "double.yaml"
    output = ["output.dir=/proc/self/cwd/run"] if nodes > 1 else []
    try:
        run = train_joined(place, lambda: verbs.make_run(recipe, [*overrides, *output]), None)
    except SystemExit as ended:
        return f"code {ended.code}"
    except (PlanError, RunError) as error:
        return str(error)
    return str(run.path.resolve()), losses(run)


@pytest.mark.slow
def test_all_processes_work_on_the_run_that_the_first_has_made(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    first, second = in_processes(2, join, workspace, "output.name=shared")
    alone = verbs.make_run("double.yaml", ["parallel.num_processes=2", "output.name=alone"])
    in_processes(2, work_in_place, str(alone.path))
    assert first == second
    assert first[1] == losses(alone)
    (run,) = [run for run in list_runs() if run.name.startswith("shared")]
    assert run.state == "finished"
    assert run.plan.layout.num_processes == 2


@pytest.mark.slow
def test_where_there_is_no_run_the_first_process_says_why_and_the_others_end_with_its_code(workspace):
    told = in_processes(3, join, workspace, "output.name=none")
    assert told[0].endswith(
        "with a global batch size of 4; unset some of them, or set train.global_batch_size to a multiple of 3"
    )
    assert told[1:] == ["code 2", "code 2"]


@pytest.mark.slow
def test_a_node_that_does_not_see_the_folder_is_named(workspace):
    """Two folders of one name, by which process looks: as where nodes have disks of their own."""
    for rank in (0, 1):
        (workspace / str(rank)).mkdir()
        for name in ("model", "rows.jsonl"):
            (workspace / str(rank) / name).symlink_to(workspace / name)
    first, second = in_processes(2, join_as_two_nodes, workspace)
    node = os.uname().nodename
    assert first == (
        f"/proc/self/cwd/run is not visible on {node}: every node reads and writes the run folder; "
        "set output.dir to a folder that all nodes share"
    )
    assert second == "code 2"


def join_as_two_nodes(folder):
    external.SEEN_SECONDS = 1
    return join(folder, nodes=2)


LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
    "accelerate": [
        *(
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            "2",
            "--num_machines",
            "1",
        ),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m"),
    ],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-m"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_run_is_shared_by_the_processes_of_a_launcher(workspace, name):
    if shutil.which(LAUNCHERS[name][0]) is None:
        pytest.skip(f"needs {name}")
    command = [*LAUNCHERS[name], "tunekit", "train", "double.yaml", f"output.name={name}"]
    answer = subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("reading the data") == 1
    (run,) = [run for run in list_runs(workspace / "runs") if run.name.startswith(name)]
    assert run.state == "finished" and set(losses(run)) == {1, 2, 3, 4, 5, 6}
    (engine,) = [event for event in run.events() if event["event"] == "engine"]
    assert engine["num_processes"] == 2


def ended_once(folder, rank, step, processes):
    """Kill a rank of a run once it has a checkpoint."""
    manifest = folder / "checkpoints" / f"checkpoint-{step}" / "manifest.json"

    def is_there():
        assert all(process.poll() is None for process in processes), "it ended too early"
        return manifest.exists()

    until(is_there)
    beat = json.loads((folder / "ranks" / f"rank-{rank}.json").read_text(encoding="utf-8"))
    os.kill(beat["pid"], signal.SIGKILL)


@pytest.mark.slow
def test_agents_of_two_nodes_go_on_with_the_run_after_a_rank_was_killed(workspace, tmp_path):
    """Two agents on this machine, as on two nodes. The one whose process is well does not count the restart."""
    hold = Hold(tmp_path, "checkpoint-40")
    changes = ["train.max_steps=60", "train.save_steps=20"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{own_port()}", "--rdzv-id=7"]
    words = ["-m", "tunekit", "train", "double.yaml", "output.dir=elastic", *changes]
    with (workspace / "agents.txt").open("w+", encoding="utf-8") as told:
        agents = [
            subprocess.Popen(
                [*agent, *meeting, *words],
                cwd=workspace,
                env=os.environ | hold.environment(),
                stdout=told,
                stderr=subprocess.STDOUT,
            )
            for _ in range(2)
        ]
        try:
            ended_once(workspace / "elastic", 1, 20, agents)
            hold.go_on()
            for process in agents:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LIMIT_SECONDS)
        finally:
            codes = [process.poll() for process in agents]
            for process in agents:
                process.kill()
        told.seek(0)
        assert codes == [0, 0], told.read()
    run = Run(workspace / "elastic")
    assert run.state == "finished"
    (restart,) = [event for event in run.events() if event["event"] == "restart"]
    (resumed,) = [event for event in run.events() if event["event"] == "resume"]
    assert restart["attempt"] == 1 and restart["step"] == resumed["step"] >= 20
    with contextlib.chdir(workspace):
        whole = verbs.make_run("double.yaml", ["parallel.num_processes=2", "output.name=whole", *changes])
        in_processes(2, work_in_place, str(whole.path))
        assert losses(run) == losses(whole)


class Asked:
    """A store that counts how often it is asked whether something was said."""

    def __init__(self):
        self.store, self.num_checks = torch.distributed.HashStore(), 0
        self.set, self.get = self.store.set, self.store.get

    def check(self, keys):
        self.num_checks += 1
        return self.store.check(keys)


def test_an_attempt_waits_for_its_own_processes_and_not_for_what_those_before_have_said(monkeypatch):
    """What is left in the agent's store is of a process that had heard; the one in its place comes later."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    agents = Asked()
    places = [Place(rank=rank, num_processes=2) for rank in range(2)]
    for _ in range(2):
        with ThreadPoolExecutor(2) as threads:
            before = agents.num_checks
            first = threads.submit(open_for_attempt, agents, places[0])
            until(lambda before=before: agents.num_checks > before + 10)
            assert not first.done()
            second = threads.submit(open_for_attempt, agents, places[1])
            stores = [meeting.result(timeout=LIMIT_SECONDS) for meeting in (first, second)]
        stores[0].set("word", "of this attempt")
        assert stores[1].get("word") == b"of this attempt"


def test_an_attempt_after_a_fault_of_the_users_says_it_again_and_does_not_train(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    run = verbs.make_run("double.yaml", ["parallel.num_processes=2", "output.name=faulty"])
    Record(run, Place(rank=1, num_processes=2)).write_error(DataError("no such column", hint="rename it"))
    with pytest.raises(DataError, match="no such column; rename it"):
        go_on_with(run, None)
    Record(run, Place(rank=1, num_processes=2)).write_error(StandstillError("rank 1 made no progress"))
    assert go_on_with(run, None) is run
    (restart,) = [event for event in run.events() if event["event"] == "restart"]
    assert (restart["attempt"], restart["step"], restart["reason"]) == (1, 0, "rank 1 made no progress")
