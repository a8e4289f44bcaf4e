"""Checkpoints of a run that is being trained, read by others meanwhile."""

from contextlib import contextmanager
from threading import Thread

from tests.training.folders import made_run
from tunekit.runs.checkpoints.complete import (
    Manifest,
    as_written,
    delete_superseded,
    draft_of,
    files_in,
    newest_complete,
    publish,
)
from tunekit.runs.checkpoints.listing import checkpoints

STATE = ("trainer_state.json", "scheduler.pt", "rng_state.pth", "carried-0.pt", "model.safetensors", "optimizer.pt")
NUM_STEPS = 60


def save(run_folder, step):
    """Save a checkpoint of small files, and delete the one before it."""
    folder = draft_of(run_folder, step) / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in STATE:
        (folder / name).write_text(f"{name} after {step}")
    manifest = Manifest(
        format=1, step=step, num_processes=1, strategy="single", dtype="float32", recipe="", made_of=None, versions={},
        best=None, files={name: as_written(folder / name) for name in files_in(folder)},
    )  # fmt: skip
    publish(run_folder, manifest)
    assert delete_superseded(run_folder, 1, None) == []


@contextmanager
def saving(run_folder):
    """Steps are saved, each deleting the one before, until it is left; gives what tells that there are more."""
    save(run_folder, 1)
    writer = Thread(target=lambda: [save(run_folder, step) for step in range(2, NUM_STEPS)])
    writer.start()
    try:
        yield writer.is_alive
    finally:
        writer.join()


def test_the_newest_checkpoint_is_found_while_it_is_replaced(tmp_path):
    run, steps = made_run(tmp_path / "run").path, []
    with saving(run) as is_going_on:
        while is_going_on():
            steps.append(newest_complete(run).step)
    assert steps == sorted(steps) and len(steps) > NUM_STEPS
    assert newest_complete(run).step == NUM_STEPS - 1


def test_checkpoints_are_listed_while_they_are_replaced(tmp_path):
    run, listed = made_run(tmp_path / "run"), []
    with saving(run.path) as is_going_on:
        while is_going_on():
            listed += checkpoints(run)
    assert len(listed) > NUM_STEPS // 2
    assert {checkpoint.fault for checkpoint in listed} == {None}
