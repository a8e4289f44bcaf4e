"""Tasks for SkyPilot. No cloud is asked: what is written is compared with the fields that SkyPilot documents."""

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.tiny import save_chats, save_tiny_model
from tunekit.api import verbs
from tunekit.errors import DependencyError, RunError
from tunekit.launching.cluster import launch_task, nodes_of, write_task

FIELDS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run"}
"""Of a task, by https://docs.skypilot.co/en/latest/reference/yaml-spec.html (2026-11)."""

BATCH = "train.global_batch_size=16"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    data = {"train": str(folder / "rows.jsonl"), "max_length": 64}
    return {"model": str(save_tiny_model(folder / "model")), "data": data, "output": {"sample_prompts": []}}


def _task(recipe, folder, on, *overrides):
    run = verbs.make_run(recipe, [f"output.dir={folder}", *overrides], hardware=nodes_of(on, None))
    return run, yaml.safe_load(write_task(run, on).read_text())


def _words_on_a_node(command, folder, **variables):
    """What the shell of a node makes of a command, word by word."""
    node = {"PATH": f"{folder}:/usr/bin:/bin", **variables}
    (folder / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "python").chmod(0o755)
    shown = subprocess.run(["bash", "-c", command], env=node, capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()


def test_a_task_starts_the_processes_of_the_plan_on_nodes_of_its_kind(recipe, tmp_path):
    run, task = _task(recipe, tmp_path / "run", "2x8xa100-40gb", BATCH)
    assert run.plan.layout.num_processes == 16
    assert set(task) <= FIELDS
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "A100:8"})
    assert all(isinstance(value, str) for value in task["envs"].values())
    words = _words_on_a_node(task["run"], tmp_path, SKYPILOT_NODE_RANK="1", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2")
    assert {"--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=10.0.0.1"} < set(words)
    assert words[-3:] == ["-m", "tunekit.training.worker", str(run.path)]


def test_what_the_processes_read_is_brought_to_the_same_place(recipe, tmp_path):
    run, task = _task(recipe, tmp_path / "it's mine", "8xh100", BATCH, "parallel.max_restarts=2")
    folders = {str(run.path), recipe["model"]}
    assert task["file_mounts"] == {folder: folder for folder in folders}
    words = _words_on_a_node(task["run"], tmp_path)
    assert words == ["-m", "tunekit.launching.local", str(run.path)]
    assert (Path(words[-1]) / "plan.yaml").exists() and run.state == "queued"


def test_nodes_without_a_common_disk_do_not_start_again(recipe, tmp_path):
    with pytest.raises(RunError, match="share no disk"):
        _task(recipe, tmp_path / "run", "2x8xh100", BATCH, "parallel.max_restarts=1")


def test_nodes_install_the_engine_of_the_plan(recipe, tmp_path):
    full = [BATCH, "adapter=full", "parallel.engine=automodel"]
    _, task = _task(recipe, tmp_path / "automodel", "8xh100", *full)
    assert "'tunekit[automodel]==" in task["setup"] and "--no-deps nemo-automodel==" in task["setup"]
    _, task = _task(recipe, tmp_path / "zero", "8xh100", BATCH, "parallel.strategy=zero2")
    assert "'tunekit[deepspeed]==" in task["setup"]
    with pytest.raises(RunError, match="writes checkpoints to one disk"):
        _task(recipe, tmp_path / "nodes", "2x8xh100", *full)


def test_without_skypilot_the_command_is_said(recipe, tmp_path, monkeypatch):
    run, _ = _task(recipe, tmp_path / "run", "h100")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DependencyError) as raised:
        launch_task(run, run.path / "task.sky.yaml")
    command = shlex.join(["sky", "launch", "--cluster", "tunekit-run", "--detach-run", f"{run.path}/task.sky.yaml"])
    assert command in str(raised.value)


def test_skypilot_takes_the_task(recipe, tmp_path):
    """By its own schema, where it is installed."""
    pytest.importorskip("sky", reason="needs SkyPilot, which tunekit does not install: pip install skypilot")
    from sky.utils import common_utils, schemas

    _, task = _task(recipe, tmp_path / "run", "2x8xa100-40gb", BATCH)
    common_utils.validate_schema(task, schemas.get_task_schema(), "task: ")
