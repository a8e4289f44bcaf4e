"""Run folders that are damaged, or that came from somebody else: each is told of, and keeps nobody from the others."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tiny import save_chats, save_tiny_model
from tests.training.folders import made_run
from tunekit import TunekitError, frontend
from tunekit.api import verbs
from tunekit.cli.app import app
from tunekit.errors import RunError
from tunekit.recipe.load import reload_recipe
from tunekit.runs.events import read_events
from tunekit.runs.reader import EventReader, last_events
from tunekit.runs.run import Run
from tunekit.runs.small_files import Continuation, read_continuation, write_continuation

DEEP = "[" * 200_000
LOG = '{"event": "log", "time": 1, "step": 1, "loss": 2.5}\n'


def folder(path: Path) -> None:
    path.mkdir()


def words(text):
    return lambda path: path.write_text(text)


DAMAGE = {
    "deep": words(DEEP),
    "a folder": folder,
    "a FIFO": os.mkfifo,
    "a list": words("[1,2,3]\n"),
    "an empty object": words("{}\n"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\0"),
    "too large": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**27),
}
FILES = ("status.json", "plan.yaml", "recipe.yaml", "events.jsonl", "tags.json", "job.json", "ranks/rank-0.json")
COMMANDS = (["runs"], ["runs", "show", "bad"], ["report", "bad"], ["compare", "bad", "good"])
PLAIN = (TunekitError, SystemExit, type(None))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two runs in a `runs` folder, each with all of the small files."""
    root = tmp_path_factory.mktemp("damaged")
    for name in ("good", "bad"):
        run = made_run(root / "runs" / name)
        (run.path / "events.jsonl").write_text(LOG)
        (run.path / "ranks").mkdir()
    return root


@pytest.fixture
def damage(whole, tmp_path, monkeypatch):
    """Puts something in the place of a file of the run `bad`."""
    shutil.copytree(whole / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)

    def put(file, what):
        path = tmp_path / "runs" / "bad" / file
        path.unlink(missing_ok=True)
        DAMAGE[what](path)

    return put


@pytest.mark.sample(16)
@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_folder_is_told_of_in_a_line_and_the_others_are_listed(file, what, damage):
    damage(file, what)
    told = {tuple(command): CliRunner().invoke(app, command) for command in COMMANDS}
    assert [type(one.exception) for one in told.values() if not isinstance(one.exception, PLAIN)] == []
    listed = told["runs",].output.splitlines()
    assert next(line for line in listed if line.startswith("good")).split()[1] == "finished"
    is_no_run = file == "status.json" and what in ("a folder", "a FIFO")
    assert any("bad" in line for line in listed) != is_no_run


@pytest.mark.parametrize("what", ["deep", "a list", "an empty object", "no text"])
def test_a_status_that_is_none_is_told_by_its_file(what, damage):
    damage("status.json", what)
    with pytest.raises(RunError, match=r"runs/bad/status\.json is damaged: .*; restore it from a copy$"):
        Run("runs/bad").status()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (DEEP, "nested too deep"),
        ("[1, 2, 3]", "not an event"),
        ('{"event": "log", "time": 1}', "not an event"),
        ('{"event": "sample", "time": 1, "prompt": 7, "when": "x", "answer": ""}', "not an event"),
    ],
)
def test_a_line_that_is_no_event_is_told_by_its_number_and_passed_over_by_a_reader(line, why, tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(f"{LOG}{line}\n{LOG}")
    with pytest.raises(RunError, match=rf"events\.jsonl:2: damaged line: {why}"):
        read_events(path)
    reader = EventReader(path)
    reader.read()
    assert (reader.num_events, reader.num_broken) == (2, 1)
    assert last_events(path) in ([json.loads(LOG)] * 2, [json.loads(LOG)])


def test_a_line_without_an_end_is_not_kept(tmp_path):
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 2**26)
        file.seek(0, os.SEEK_END)
        file.write(f"\n{LOG}".encode())
    reader = EventReader(path)
    reader.read()
    assert (reader.num_events, reader.num_broken) == (1, 1)


@pytest.mark.parametrize("file", ["log.txt", "launcher.log", "events.jsonl", "ranks/rank-0.json"])
@pytest.mark.parametrize("what", ["a folder", "a FIFO", "a link"])
def test_a_run_does_not_write_to_what_is_no_file_of_its_own(file, what, damage, tmp_path):
    path = tmp_path / "runs" / "bad" / file
    if what == "a link":
        path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "private")
        (tmp_path / "private").write_text("mine")
    else:
        damage(file, what)
    with pytest.raises(RunError, match=rf"{file} is not a regular file of the run; remove it"):
        verbs.resume("runs/bad", ["train.max_steps=9"])


@pytest.mark.parametrize("what", ["deep", "a list"])
def test_a_plan_that_is_none_is_told_by_its_file(what, damage):
    damage("plan.yaml", what)
    with pytest.raises(
        RunError, match=r"bad/plan\.yaml is damaged: (nested too deeply|not a YAML mapping); restore it"
    ):
        _ = Run("runs/bad").plan


@pytest.mark.parametrize("file", [file for file in FILES if "/" not in file])
def test_what_a_link_in_a_folder_leads_to_is_not_shown(file, damage, tmp_path):
    damage(file, "a list")
    for text in ("canary of a key\n", "canary: of a key\n", "c: canary\n- of\n", "canary:of:a:key:/bin/sh\n" * 20):
        (tmp_path / "private").write_text(text)
        (tmp_path / "runs" / "bad" / file).unlink(missing_ok=True)
        (tmp_path / "runs" / "bad" / file).symlink_to(tmp_path / "private")
        for command in COMMANDS:
            done = CliRunner().invoke(app, command)
            assert isinstance(done.exception, PLAIN)
            assert "canary" not in done.output + str(done.exception)
        with pytest.raises(TunekitError, match="a link out of its folder"):
            reload_recipe(tmp_path / "runs" / "bad" / file)


def test_a_folder_that_is_deleted_while_the_run_goes_on_is_told_in_a_line(tmp_path):
    save_tiny_model(tmp_path / "model", hidden=32, layers=1)
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(8)))
    recipe = {
        "model": str(tmp_path / "model"),
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 32},
        "train": {"max_steps": 3, "global_batch_size": 2},
        "output": {"sample_prompts": [], "dir": str(tmp_path / "run")},
    }

    def delete(event: frontend.Event) -> None:
        if event["event"] == "log":
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    with pytest.raises(RunError, match="run no longer exists: it was deleted or moved during the run; train again"):
        verbs.train(recipe, on_event=delete)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("weights", ["../other/checkpoints/checkpoint-2", "/etc", "model", "checkpoints/link"])
def test_a_resume_request_loads_no_weights_but_those_of_a_checkpoint_of_the_run(weights, tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "link").symlink_to(tmp_path)
    request = Continuation(2, weights="checkpoints/checkpoint-2")
    write_continuation(folder, request)
    assert read_continuation(folder) == request
    write_continuation(folder, Continuation(2, weights=weights))
    with pytest.raises(RunError, match="is not one of its checkpoints; remove the file"):
        read_continuation(folder)
