"""Files that a resume needs are on the disk before its checkpoint is visible: the power may fail after."""

import os
import resource
from pathlib import Path

import pytest

from tests.training.folders import made_run
from tunekit.errors import DiskError
from tunekit.runs.checkpoints.complete import Manifest, Written, draft_of, publish
from tunekit.runs.events import EventLog, read_events
from tunekit.runs.record import not_saved
from tunekit.runs.small_files import Continuation, write_continuation, write_whole


@pytest.fixture
def synced(monkeypatch):
    """The files and folders that were synced, in their order; each is."""
    names, sync = [], os.fsync

    def fsync(descriptor):
        names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return names


def test_a_checkpoint_is_visible_once_all_that_it_needs_of_the_run_is_on_the_disk(synced, tmp_path):
    run = made_run(tmp_path / "run")
    (run.path / "events.jsonl").write_text("")
    (run.path / "data").mkdir(exist_ok=True)
    (run.path / "data" / "train.arrow").write_bytes(b"rows")
    folder = draft_of(run.path, 2) / "checkpoint-2"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"weights")
    manifest = Manifest(
        format=1, step=2, num_processes=1, strategy="single", dtype="float32", recipe="", made_of=None, versions={},
        best=None, files={"weights": Written(size=7, sha256="")},
    )  # fmt: skip
    publish(run.path, manifest)
    before = synced[: synced.index("checkpoints")]
    assert {"recipe.yaml", "plan.yaml", "status.json", "events.jsonl", "train.arrow", "data", "run"} <= set(before)
    assert {tmp_path.name, tmp_path.parent.name} <= set(before), "folders that may be as new as the run"


@pytest.mark.parametrize("content", [b"", bytes(300)])
def test_a_run_that_lost_its_status_with_the_power_has_died(content, tmp_path):
    run = made_run(tmp_path / "run")
    (run.path / "ranks").mkdir()
    for name in ("status.json", "ranks/rank-0.json"):
        (run.path / name).write_bytes(content)
    assert run.state == "died" and run.status()["step"] == 0
    run.update_status(step=3)
    assert run.status()["phase"] == "training" and run.status()["step"] == 3


@pytest.mark.parametrize("tail", [b"", bytes(70000), b'{"event": "log", "ti', b'{"event": "lo' + bytes(50)])
def test_events_go_on_behind_the_last_whole_one(tail, tmp_path):
    path = tmp_path / "events.jsonl"
    EventLog(path).write("phase", phase="training")
    with path.open("ab") as stream:
        stream.write(tail)
    assert [event["event"] for event in read_events(path)[0]] == ["phase"]
    log = EventLog(path)
    for step in (1, 2):
        log.write("log", step=step)
    assert [event.get("step") for event in read_events(path)[0]] == [None, 1, 2]


def test_files_that_a_resume_replaces_are_on_the_disk_before_they_take_their_names(synced, tmp_path):
    write_continuation(tmp_path, Continuation(3))
    draft, folder = synced
    assert draft.startswith(".resume.json-") and folder == tmp_path.name
    synced.clear()
    write_whole(tmp_path / "status.json", "{}")
    assert synced == []


def test_a_limit_of_the_size_of_files_is_no_full_disk(tmp_path):
    run = made_run(tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, hard))
    try:
        limited = not_saved(run, "checkpoint-2", "[enforce fail at inline_container.cc:672]", 2**20)
        short = not_saved(run, "checkpoint-2", "No space left on device", 2**60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(limited, DiskError)
    assert limited.problem == (
        "checkpoint-2 could not be written: [enforce fail at inline_container.cc:672]; "
        "files may be at most 1.00 GiB here (ulimit -f); no checkpoint yet"
    )
    assert limited.hint.startswith("ulimit -f unlimited, then ")
    assert "ulimit" not in str(short) and "free " in short.hint
