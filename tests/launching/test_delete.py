"""A run is deleted where it is over, and nothing else is."""

import os
import subprocess
import sys

import pytest

import tunekit
from tests.commands import run_command
from tests.training.folders import made_run
from tunekit.errors import RunError
from tunekit.runs.run import list_runs
from tunekit.runs.small_files import identity_of


def tunekit_runs(folder, *words):
    return run_command("runs", *words, cwd=folder)


def test_of_a_deleted_run_nothing_is_left_and_its_neighbour_is_whole(tmp_path):
    run, other = made_run(tmp_path / "gone"), made_run(tmp_path / "kept")
    before = sorted(other.path.rglob("*"))
    (run.path / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("stays")
    (run.path / "model").symlink_to(tmp_path / "elsewhere")
    tunekit.delete_run(run)
    assert [one.name for one in list_runs(tmp_path)] == ["kept"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".rows.jsonl", "elsewhere", "kept"]
    assert sorted(other.path.rglob("*")) == before
    assert (tmp_path / "elsewhere" / "file").read_text() == "stays"


@pytest.mark.parametrize("phase", ["training", "queued"])
def test_a_run_that_is_not_over_is_kept(tmp_path, phase):
    run = made_run(tmp_path / "run", phase=phase)
    with pytest.raises(RunError, match=rf"run is {phase}; stop it first: tunekit stop"):
        tunekit.delete_run(run)
    assert run.state == phase


def test_a_run_is_kept_while_a_process_of_it_lives_whatever_it_said(tmp_path):
    run = made_run(tmp_path / "run", phase="failed")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (run.path / "ranks").mkdir()
        words = f'{{"rank": 1, "pid": {process.pid}, "identity": "{identity_of(process.pid)}", "host": '
        words += f'"{os.uname().nodename}", "at": "backward", "step": 3, "time": 5.0, "since": 1.0}}'
        (run.path / "ranks" / "rank-1.json").write_text(words)
        with pytest.raises(RunError, match="run is failed, but still running: rank 1 in backward of step 3 for 4 s"):
            tunekit.delete_run(run)
        process.communicate(b"\n")
    tunekit.delete_run(run)
    assert not run.path.exists()


def test_a_run_whose_process_died_is_deleted(tmp_path):
    run = made_run(tmp_path / "run", phase="training", pid=2**22 + 1, identity="nobody")
    assert run.state == "died"
    tunekit.delete_run(run)
    assert not run.path.exists()


def test_a_run_that_another_starts_from_is_kept_and_the_other_is_named(tmp_path):
    first = made_run(tmp_path / "first")
    second = made_run(tmp_path / "second")
    recipe = (second.path / "recipe.yaml").read_text()
    (first.path / "model").mkdir()
    (second.path / "recipe.yaml").write_text(recipe.replace("path: pico", f"path: {first.path / 'model'}", 1))
    with pytest.raises(RunError, match="cannot delete first: second starts from its model"):
        tunekit.delete_run(first)
    tunekit.delete_run(second)
    tunekit.delete_run(first)
    assert list_runs(tmp_path) == []


def test_a_folder_with_more_than_a_run_is_kept(tmp_path, monkeypatch):
    outer = made_run(tmp_path / "outer")
    inner = made_run(outer.path / "mine" / "inner")
    with pytest.raises(RunError, match="contains another run: inner"):
        tunekit.delete_run(outer)
    (tmp_path / "link").symlink_to(inner.path)
    with pytest.raises(RunError, match="is a link"):
        tunekit.delete_run(tunekit.Run(tmp_path / "link"))
    monkeypatch.chdir(inner.path)
    with pytest.raises(RunError, match="is the working directory"):
        tunekit.delete_run(inner)
    assert inner.state == outer.state == "finished"


def test_what_an_earlier_deletion_left_is_no_run_and_goes_with_the_next(tmp_path):
    run = made_run(tmp_path / "run")
    left = made_run(tmp_path / "left")
    left.path.rename(tmp_path / ".deleted-1-left")
    assert [one.name for one in list_runs(tmp_path)] == ["run"]
    tunekit.delete_run(run)
    assert [path.name for path in tmp_path.iterdir()] == [".rows.jsonl"]


def test_the_command_deletes_only_what_is_named_wholly_and_with_a_word(tmp_path):
    made_run(tmp_path / "runs" / "mine-1")
    begun = tunekit_runs(tmp_path, "delete", "mine", "--yes")
    assert begun.returncode == 2 and "no run named 'mine'; use the full name" in begun.stderr
    unsaid = tunekit_runs(tmp_path, "delete", "mine-1")
    assert unsaid.returncode == 2 and unsaid.stderr == "deleting runs/mine-1 needs confirmation; add --yes\n"
    deleted = tunekit_runs(tmp_path, "delete", "mine-1", "--yes")
    assert (deleted.returncode, deleted.stdout) == (0, "runs/mine-1 deleted\n")
    assert not (tmp_path / "runs" / "mine-1").exists()
