"""Checkpoints are whole or do not count, the newest and the best are kept, and a full disk loses none of them."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tunekit
import tunekit.training.engines.engine
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model
from tests.training.engines import made, work_in, worked
from tests.waiting import LIMIT_SECONDS, until
from tunekit.errors import DiskError, PlanError, RunError
from tunekit.runs.checkpoints.complete import (
    MANIFEST,
    clear_drafts,
    fault_of,
    newest_complete,
    publish_result,
    superseded,
    take_newest,
)
from tunekit.runs.run import Run

STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saving")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


def recipe_for(folder, train=None, *, evaluates=True, adapter="full", runs="runs", **parallel):
    held_out = {"eval_size": 0.2} if evaluates else {}
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64, **held_out},
        "adapter": adapter,
        "train": {"max_steps": STEPS, "global_batch_size": 8, "learning_rate": 1e-3, "save_steps": 2, **(train or {})},
        "parallel": parallel,
        "output": {"sample_prompts": ["hi"], "dir": str(folder / runs / os.urandom(4).hex())},
    }


def checkpoints(run):
    return sorted(path.name for path in (run.path / "checkpoints").iterdir())


def events(run, kind):
    return [event for event in run.events() if event["event"] == kind]


@pytest.fixture(scope="module")
def synced():
    """The files and folders that were brought to the disk while a run trained, in their order."""
    return []


@pytest.fixture(scope="module")
def finished(folder, synced):
    """A run whose loss falls, while the best is asked to be where it is highest: at its first evaluation."""
    asked = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "eval_steps": 3}
    run = Run(made(recipe_for(folder, asked)))
    sync = os.fsync

    def fsync(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        worked(run.path)
    return run


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of that run, to be damaged."""
    shutil.copytree(finished.path, tmp_path / "run")
    return Run(tmp_path / "run")


def test_the_newest_and_the_best_are_kept_and_the_best_is_saved_where_it_was_seen(finished):
    assert checkpoints(finished) == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]
    told = {event["step"]: event["eval_loss"] for event in events(finished, "eval")}
    # Before the first step, when it was due, and after the last one.
    assert sorted(told) == [0, 3, 6, 8]
    assert told[3] == max(loss for step, loss in told.items() if step)
    assert [event["step"] for event in events(finished, "checkpoint")] == [2, 3, 4, 6, 8]
    best = {"metric": "eval_loss", "value": told[3], "step": 3}
    assert finished.result()["checkpoints"]["best"] == best
    assert newest_complete(finished.path).best.model_dump() == best


def test_a_manifest_has_the_checksum_of_every_file_and_no_pickle_of_arguments_is_left(finished):
    folder = finished.path / "checkpoints" / "checkpoint-8"
    manifest = json.loads((folder / MANIFEST).read_text())
    read = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != MANIFEST}
    assert manifest["files"] == {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in read.items()
    }
    assert (manifest["step"], manifest["num_processes"], manifest["strategy"]) == (8, 1, "single")
    assert manifest["versions"]["torch"] == version("torch")
    for name in ("recipe.yaml", "plan.yaml", "fingerprints.json"):
        assert read[name] == (finished.path / name).read_bytes()
    assert manifest["recipe"] == hashlib.sha256(read["recipe.yaml"]).hexdigest()
    assert manifest["made_of"] == hashlib.sha256(read["fingerprints.json"]).hexdigest()
    assert not list(finished.path.rglob("training_args.bin"))


def test_every_file_of_a_checkpoint_is_on_the_disk_before_it_is_visible(finished, synced):
    for step in (6, 8):
        manifest = json.loads((finished.path / "checkpoints" / f"checkpoint-{step}" / MANIFEST).read_text())
        folder = finished.path / "checkpoints" / f".saving-{step}" / f"checkpoint-{step}"
        before = synced[: synced.index(folder / f".{MANIFEST}")]
        assert {folder / name for name in manifest["files"]} <= set(before)


def test_what_a_checkpoint_takes_is_planned_and_told(finished):
    planned, told = finished.plan.saving, events(finished, "checkpoint")
    folder = finished.path / "checkpoints" / "checkpoint-8"
    on_disk = sum(file.stat().st_size for file in folder.iterdir() if file.name != MANIFEST)
    assert told[-1]["bytes"] == on_disk
    # Of a model of 70,000 weights what else there is tells: states of random numbers, the recipe, the plan.
    assert planned.checkpoint_bytes == pytest.approx(on_disk, rel=0.1)
    whole = sum(file.stat().st_size for file in finished.model_path.iterdir())
    assert planned.result_bytes == pytest.approx(whole, rel=0.1)
    assert finished.result()["checkpoints"]["num"] == len(told)
    assert all(event["wait_seconds"] == event["seconds"] for event in told)


def names_of_files():
    return ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", MANIFEST]


@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed", "removed"])
@pytest.mark.parametrize("name", names_of_files())
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(name, damage, copied):
    file = copied.path / "checkpoints" / "checkpoint-8" / name
    content = file.read_bytes()
    if damage == "removed":
        file.unlink()
    else:
        half = len(content) // 2
        flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        file.write_bytes({"truncated": content[:-1], "emptied": b"", "changed": flipped}[damage])
    left = {path.name: path.read_bytes() for path in file.parent.iterdir()}
    newest = take_newest(copied.path)
    assert newest.step == 6
    (why,) = newest.skipped
    assert why.startswith("checkpoint-8: ") and why.endswith("; renamed to checkpoint-8.bad")
    # A digit of a manifest may be one of a checksum.
    assert name in why or name == MANIFEST
    aside = copied.path / "checkpoints" / "checkpoint-8.bad"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == left
    assert newest_complete(copied.path).skipped == ()


@pytest.mark.parametrize(
    ("put", "why"),
    [(os.mkfifo, "not a regular file"), (Path.mkdir, "not a regular file"), (lambda file: file.write_text(DEEP), "")],
)
def test_a_manifest_that_is_none_is_not_waited_for(put, why, copied):
    file = copied.path / "checkpoints" / "checkpoint-8" / MANIFEST
    file.unlink()
    put(file)
    newest = newest_complete(copied.path)
    assert newest.step == 6 and why in newest.skipped[0] and MANIFEST in newest.skipped[0]


DEEP = "[" * 200_000


def test_a_status_is_told_from_sizes_alone_and_a_resume_reads_what_is_there(copied):
    weights = copied.path / "checkpoints" / "checkpoint-8" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert newest_complete(copied.path).step == 8
    assert take_newest(copied.path).skipped == (
        "checkpoint-8: model.safetensors has changed since it was written; renamed to checkpoint-8.bad",
    )


def test_a_second_damaged_checkpoint_of_a_step_gets_another_name(copied):
    for _ in range(2):
        folder = copied.path / "checkpoints" / "checkpoint-8"
        if not folder.exists():
            shutil.copytree(folder.with_name("checkpoint-6"), folder)
        (folder / MANIFEST).unlink(missing_ok=True)
        take_newest(copied.path)
    assert {"checkpoint-8.bad", "checkpoint-8.bad-2"} <= set(checkpoints(copied))


def test_where_no_checkpoint_is_whole_a_run_does_not_begin_anew_by_itself(copied):
    for step in (3, 6, 8):
        (copied.path / "checkpoints" / f"checkpoint-{step}" / "optimizer.pt").unlink()
    copied.update_status(phase="failed")
    with pytest.raises(RunError, match=r"no complete checkpoint: checkpoint-8: optimizer\.pt is missing") as told:
        take_newest(copied.path)
    assert "start over: tunekit train" in told.value.hint


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "sub/../../outside", "link", "linked/file", ""])
def test_a_manifest_that_names_what_is_not_in_its_folder_is_damaged(name, copied):
    folder = copied.path / "checkpoints" / "checkpoint-8"
    (folder.parent / "outside").write_bytes(b"x")
    (folder / "link").symlink_to(folder.parent / "outside")
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "file").write_bytes(b"x")
    (folder / "linked").symlink_to(folder.parent / "other")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert fault_of(folder, contents=False) == f"{MANIFEST} lists {name!r}, which is outside its folder"


def test_a_checkpoint_that_is_a_link_to_one_elsewhere_is_passed_over(copied, tmp_path):
    folder = copied.path / "checkpoints" / "checkpoint-8"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    newest = newest_complete(copied.path)
    assert (newest.step, newest.skipped) == (6, ("checkpoint-8: is a link to another folder",))


def unlisted(folder, *names):
    """Take files out of a checkpoint and of its manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in names:
        (folder / name).unlink()
        del manifest["files"][name]
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", [name for name in names_of_files() if name != MANIFEST])
def test_state_that_is_missing_is_a_fault_also_where_the_manifest_does_not_know_it(name, copied):
    folder = copied.path / "checkpoints" / "checkpoint-8"
    unlisted(folder, name)
    fault = fault_of(folder, contents=True)
    assert f"({name}) is missing" in fault


def test_what_a_save_that_was_cut_off_left_is_taken_away_and_what_it_replaced_comes_back(copied):
    folder = copied.path / "checkpoints"
    (folder / ".saving-10" / "checkpoint-10").mkdir(parents=True)
    (folder / "checkpoint-8").rename(folder / ".replaced-8")
    shutil.copytree(folder / "checkpoint-6", folder / ".replaced-6")
    assert newest_complete(copied.path).step == 6
    clear_drafts(copied.path)
    assert checkpoints(copied) == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]
    assert newest_complete(copied.path).step == 8


def test_a_result_is_published_although_an_earlier_one_was_cut_off_while_it_took_away_what_it_replaced(
    tmp_path, monkeypatch
):
    def publish(words):
        (tmp_path / "draft").mkdir()
        (tmp_path / "draft" / "weights").write_text(words)
        publish_result(tmp_path / "draft", tmp_path / "model")

    def cut_off(folder, **how):
        if folder.exists():
            raise KeyboardInterrupt

    publish("first")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", cut_off)
        publish("second")
    publish("third")
    assert (tmp_path / "model" / "weights").read_text() == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_only_whole_checkpoints_count_as_kept(copied):
    """A damaged one does not push a good one out."""
    assert [path.name for path in superseded(copied.path, 2, None)] == ["checkpoint-3"]
    (copied.path / "checkpoints" / "checkpoint-8" / "optimizer.pt").unlink()
    assert superseded(copied.path, 2, None) == []


def test_a_measure_that_no_evaluation_tells_is_an_error_that_lists_them(folder):
    run = Run(made(recipe_for(folder, {"metric_for_best_model": "eval_acuracy"})))
    with pytest.raises(RunError, match=r"metric_for_best_model: evaluations report no eval_acuracy") as told:
        worked(run.path)
    assert "eval_loss" in told.value.hint and "eval_mean_token_accuracy" in told.value.hint
    assert events(run, "log") == []


def test_a_measure_without_rows_to_evaluate_on_is_refused(folder):
    with pytest.raises(PlanError, match="no evaluation rows"):
        tunekit.plan(recipe_for(folder, {"metric_for_best_model": "eval_loss"}, evaluates=False))


@contextmanager
def small_disk(path, size):
    """A disk of a size, as the user that may mount one."""
    path.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.slow
def test_a_run_that_would_fill_the_disk_is_refused_before_its_rows_are_read(folder):
    with small_disk(folder / "refused", "3m"):
        asked = recipe_for(folder, runs="refused")
        with pytest.raises(
            PlanError, match=r"the run needs up to 3\.7 MiB on the disk of .* 3\.0 MiB are free"
        ) as told:
            made(asked)
        assert "adapter.type=lora" in told.value.hint
        assert not list((folder / "refused").iterdir())
        assert made(recipe_for(folder, adapter="lora", runs="refused"))


def work_on_a_disk_that_is_full(path):
    """Work as one process with a disk that says that there is room, and return what all end with."""
    import tunekit.training.checkpointing.save

    free_bytes = tunekit.training.checkpointing.save.free_bytes
    tunekit.training.checkpointing.save.free_bytes = lambda folder: free_bytes(folder) if folder == path else 2**40
    try:
        worked(path)
    except RunError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "parallel"),
    [
        (1, {}),
        pytest.param(2, {"strategy": "ddp"}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "fsdp2"}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "zero2"}, marks=pytest.mark.slow),
        (2, {"strategy": "zero3"}),
    ],
    ids=["single", "ddp", "fsdp2", "zero2", "zero3"],
)
def test_a_disk_that_is_full_in_the_middle_of_a_save_ends_all_processes_and_loses_nothing(num, parallel, folder):
    sharing = {"num_processes": num, **parallel} if num > 1 else {}
    with small_disk(folder / "full", "20m"):
        run = Run(made(recipe_for(folder, evaluates=False, runs="full", **sharing)))
        size = run.plan.saving.checkpoint_bytes
        filler = folder / "full" / "filler"
        free = shutil.disk_usage(filler.parent).free
        # The first checkpoint fits, the second does not.
        filler.write_bytes(b"\0" * (free - int(1.5 * size) - 2**19))
        told = in_processes(num, work_on_a_disk_that_is_full, run.path)
        assert len(set(told)) == 1, told
        assert told[0].startswith("the checkpoint of step 4 could not be written"), told
        assert "No space left on device" in told[0] and "checkpoint-2 is complete" in told[0]
        assert f"then resume with: tunekit resume {run.path}" in told[0]
        assert checkpoints(run) == ["checkpoint-2"]
        assert newest_complete(run.path).step == 2
        filler.unlink()
        work_in(run.path, num) if num > 1 else worked(run.path)
        assert run.state == "finished"
        assert checkpoints(run) == ["checkpoint-6", "checkpoint-8"]


def fill(file):
    """Write to a file until the disk is full."""
    with file.open("ab", buffering=0) as stream, pytest.raises(OSError, match="No space left on device"):
        while True:
            stream.write(b"\0" * 2**10)


@pytest.mark.slow
def test_a_disk_that_is_full_before_the_first_step_is_told_and_loses_nothing(folder):
    from tunekit.launching.local import begin, launch

    with small_disk(folder / "packed", "20m"):
        run = Run(made(recipe_for(folder, evaluates=False, runs="packed")))
        filler = folder / "packed" / "filler"
        fill(filler)
        with pytest.raises(DiskError, match=r"No space left on device") as refused:
            launch(run)
        assert refused.value.hint.startswith("free space on its disk, then start over: tunekit train ")
        filler.unlink()
        begin(run)
        fill(filler)
        with pytest.raises(DiskError, match=r"^starting: .*No space left on device"):
            worked(run.path)
        assert run.state == "failed" and "No space left" in run.status()["exit_reason"]
        filler.unlink()
        launch(run)
        assert run.state == "finished"


@pytest.mark.slow
def test_resuming_on_a_full_disk_is_refused_and_works_once_there_is_room(folder):
    with small_disk(folder / "resumed", "20m"):
        run = Run(made(recipe_for(folder, {"max_steps": 2}, evaluates=False, runs="resumed")))
        worked(run.path)
        filler = folder / "resumed" / "filler"
        fill(filler)
        with pytest.raises(DiskError, match=r"No space left on device") as refused:
            tunekit.resume(run.path, ["train.max_steps=4"])
        assert refused.value.hint == f"free space on its disk, then resume with: tunekit resume {run.path}"
        filler.unlink()
        assert tunekit.resume(run.path, ["train.max_steps=4"]).status()["step"] == 4


def work_while_a_checkpoint_takes_all_room(path):
    """Work as one process that writes a checkpoint of which files take the room that is kept for words, too."""
    import threading

    import tunekit.runs.record
    from tunekit.runs.checkpoints.complete import draft_of
    from tunekit.training.checkpointing.save import Saver

    write, give, has_taken = Saver._write, tunekit.runs.record.give_room, threading.Event()
    taken = draft_of(path, 4) / f"taken-{os.environ['RANK']}"

    def write_when_all_is_taken(saver, saving):
        if saving.step == 4:
            fill(taken)
            if saver.record.place.is_main:
                # It may not be done before the training wants to say something.
                assert has_taken.wait(LIMIT_SECONDS)
        write(saver, saving)

    def give_what_is_taken(run):
        give(run)
        if taken.exists():
            fill(taken)
            has_taken.set()

    Saver._write, tunekit.runs.record.give_room = write_when_all_is_taken, give_what_is_taken
    try:
        return work_on_a_disk_that_is_full(path)
    finally:
        Saver._write, tunekit.runs.record.give_room = write, give


@pytest.mark.slow
def test_a_checkpoint_that_takes_the_room_for_words_gives_it_back(folder):
    with small_disk(folder / "full", "20m"):
        run = Run(made(recipe_for(folder, evaluates=False, runs="full", strategy="fsdp2", num_processes=2)))
        assert run.plan.saving.in_background
        told = in_processes(2, work_while_a_checkpoint_takes_all_room, run.path)
        assert len(set(told)) == 1, told
        assert told[0].startswith("the checkpoint of step 4 could not be written"), told
        assert "checkpoint-2 is complete" in told[0] and checkpoints(run) == ["checkpoint-2"]
        # What was logged meanwhile is not lost.
        assert [event["step"] for event in events(run, "log")][:4] == [1, 2, 3, 4]
        assert run.status()["step"] > 4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_what_is_written_while_training_goes_on_is_what_was_there_when_it_began(strategy, folder):
    """The writes wait until steps have been taken; the weights are those of one process that waits for them."""
    alone = Run(made(recipe_for(folder, {"save_total_limit": 9}, evaluates=False)))
    worked(alone.path)
    run = Run(made(recipe_for(folder, {"save_steps": 4}, evaluates=False, strategy=strategy, num_processes=2)))
    assert run.plan.saving.in_background
    steps = in_processes(2, work_slowly, run.path)
    # Steps were taken between a copy and its writing.
    assert all(written > 4 for written in steps)
    checkpoint = run.path / "checkpoints" / "checkpoint-4"
    wanted = load_file(alone.path / "checkpoints" / "checkpoint-4" / "model.safetensors")
    for name, tensor in weights_in(checkpoint, strategy).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-5)
    told = events(run, "checkpoint")
    assert told[0]["wait_seconds"] < told[0]["seconds"]


def work_slowly(path):
    """Work as one process that begins to write when two more steps are taken; return the step at which it did."""
    from tunekit.training.checkpointing.save import Saver

    write, steps = Saver._write, []

    def write_later(saver, saving):
        until(lambda: saver.trainer.state.global_step >= min(saving.step + 2, STEPS))
        steps.append(saver.trainer.state.global_step)
        write(saver, saving)

    Saver._write = write_later
    try:
        worked(path)
    finally:
        Saver._write = write
    return steps[0]


def weights_in(checkpoint, strategy):
    """The weights of a checkpoint in parts, put together by its library."""
    if strategy == "zero3":
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint / "pytorch_model_fsdp_0", checkpoint.parent / "whole.pt")
    return torch.load(checkpoint.parent / "whole.pt", weights_only=True)["model"]


def test_a_result_that_could_not_be_written_leaves_nothing_half_and_is_written_by_going_on(folder, monkeypatch):
    run = Run(made(recipe_for(folder, {"max_steps": 2}, evaluates=False)))
    save = tunekit.training.engines.engine.save_model

    def fill_the_disk(trainer, plan, to):
        save(trainer, plan, to)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to / "model.safetensors"))

    with monkeypatch.context() as patch:
        patch.setattr(tunekit.training.engines.engine, "save_model", fill_the_disk)
        with pytest.raises(RunError, match=r"the result could not be written: model\.safetensors: No space") as told:
            worked(run.path)
    assert "checkpoint-2 is complete" in told.value.problem and "tunekit resume" in told.value.hint
    assert not run.model_path.exists() and not (run.path / ".saving-model").exists()
    worked(run.path)
    assert run.state == "finished"
    # Nothing was trained again: what was saved is what is there.
    assert [event["step"] for event in events(run, "log")] == [1, 2]
    kept = load_file(run.path / "checkpoints" / "checkpoint-2" / "model.safetensors")
    torch.testing.assert_close(load_file(run.model_path / "model.safetensors"), kept, rtol=0, atol=0)
