"""A run that is gone on with: longer, edited, from an earlier checkpoint, from its weights, in other processes."""

import contextlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import Console
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import get_cosine_schedule_with_warmup

from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import work_in, worked
from tests.training.folders import made_run
from tests.waiting import LIMIT_SECONDS
from tunekit.api import verbs
from tunekit.api.resume import resumed
from tunekit.display.console import run_report
from tunekit.errors import RunError
from tunekit.launching.stop import delete_run
from tunekit.recipe.load import reload_recipe
from tunekit.runs import fingerprints
from tunekit.runs.available_actions import prospects
from tunekit.runs.checkpoints.complete import MANIFEST, Newest, Patience, newest_complete
from tunekit.runs.events import EventLog
from tunekit.runs.run import Run
from tunekit.runs.small_files import Place
from tunekit.training.callbacks import evaluation_is_due
from tunekit.training.checkpointing.restore import Carried, _state_as_is

SHORT, LONG = 4, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("going_on")
    save_tiny_model(folder / "model", hidden=32, layers=1)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


def recipe_for(folder, name, *, adapter="full", scheduler="constant", steps=SHORT, parallel=None, **train):
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": adapter,
        "train": {
            "max_steps": steps,
            "global_batch_size": 6,
            "learning_rate": 1e-3,
            "lr_scheduler_type": scheduler,
            "save_steps": 2,
            **train,
        },
        "parallel": parallel or {},
        "output": {"sample_prompts": [], "dir": str(folder / name)},
    }


@pytest.fixture(scope="module")
def short(folder):
    """A finished run with an adapter that draws random numbers."""
    return verbs.train(recipe_for(folder, "short", adapter={"type": "lora", "dropout": 0.1}))


@pytest.fixture(scope="module")
def long(folder):
    """The same of twice the length, that nothing cut off."""
    return verbs.train(recipe_for(folder, "long", adapter={"type": "lora", "dropout": 0.1}, steps=LONG))


@pytest.fixture(scope="module")
def full(folder):
    """A finished run of all weights."""
    return verbs.train(recipe_for(folder, "full", scheduler="cosine"))


def copied(run, to):
    shutil.copytree(run.path, to)
    return Run(to)


def events(run, kind):
    return [event for event in run.events() if event["event"] == kind]


def losses(run):
    return {event["step"]: event["loss"] for event in events(run, "log")}


def said(run, *overrides, **how):
    """What is said when a run is made ready to go on."""
    told = []
    resumed(run, overrides, on_event=told.append, **how)
    return told[0]["notes"]


@pytest.mark.slow
def test_a_run_that_is_made_longer_equals_one_that_was_so_from_the_beginning(short, long, tmp_path):
    run = copied(short, tmp_path / "run")
    verbs.resume(run, [f"train.max_steps={LONG}"])
    assert losses(run) == losses(long)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(long.model_path), rtol=0, atol=0)
    assert run.recipe.train.max_steps == run.status()["num_steps"] == run.status()["step"] == LONG
    (event,) = events(run, "resume")
    assert (event["step"], event["changes"]) == (SHORT, [f"train.max_steps {SHORT} -> {LONG}"])
    assert reload_recipe(run.path / "recipe-1.yaml") == short.recipe


@pytest.mark.slow
def test_one_process_goes_on_with_a_run_and_none_deletes_it_meanwhile(short, tmp_path):
    """Others come when it has seen that the run is over, and has not said yet that it goes on."""
    run, told = copied(short, tmp_path / "run"), []

    def come_between(event):
        if event["event"] == "plan":
            command = [sys.executable, "-m", "tunekit", "resume", str(run.path), f"train.max_steps={LONG}"]
            told.append(subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL))
            with pytest.raises(RunError, match="another process is resuming or deleting run"):
                delete_run(run)

    verbs.resume(run, [f"train.max_steps={LONG}"], on_event=come_between)
    (other,) = told
    assert other.returncode == 2 and "another process is resuming or deleting run" in " ".join(other.stderr.split())
    assert run.state == "finished" and len(events(run, "resume")) == 1
    assert [event["step"] for event in events(run, "log")] == list(range(1, LONG + 1))
    # Nobody has it any more.
    delete_run(run)
    assert not run.path.exists()


def test_epochs_can_be_added_instead_of_steps(short, long, tmp_path):
    run = copied(short, tmp_path / "run")
    notes = said(run, "train.num_epochs=2.5")
    # An epoch of 20 rows has 4 steps of 6, the last one filled.
    assert notes[0] == f"resuming from step {SHORT} of 10"
    assert notes[1] == "applied: train.num_epochs (not set) -> 2.5"
    assert not any("learning rate follows" in note for note in notes)


@pytest.mark.slow
def test_the_learning_rate_follows_the_new_length_from_there(full, tmp_path):
    run = copied(full, tmp_path / "run")
    notes = said(run, f"train.max_steps={LONG}")
    assert "the learning rate follows the new length from here (cosine)" in notes
    worked(run.path)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    warmup = run.plan.schedule.warmup_steps
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=warmup, num_training_steps=LONG)
    wanted = []
    for _ in range(LONG):
        wanted.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    found = [event["learning_rate"] for event in events(run, "log")][SHORT:]
    assert found == pytest.approx(wanted[SHORT:], rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "is finished, after 4 steps"),
        (["train.logging_steps=2"], "is finished, after 4 steps"),
        (["train.max_steps=4", "train.logging_steps=2"], "is finished, after 4 steps"),
        (["train.max_steps=3"], "has trained 4 steps, 3 are requested"),
    ],
)
def test_what_is_reached_is_refused(overrides, words, short):
    with pytest.raises(RunError, match=words) as refused:
        verbs.resume(short.path, overrides)
    assert "train.max_steps=8" in refused.value.hint
    assert short.state == "finished"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "train.learning_rate=0.5",
            "train.learning_rate 0.001 -> 0.5: the learning-rate schedule in the checkpoint overrides it",
        ),
        ("adapter.rank=4", "adapter.rank 16 -> 4: the checkpoint has the tensors of another adapter"),
        ("model=pico", "model.path .* -> pico: the checkpoint has the weights of another model"),
        ("data.max_length=32", "data.max_length 64 -> 32: the rows were prepared"),
    ],
)
def test_what_a_checkpoint_does_not_fit_is_refused_and_nothing_is_changed(override, words, short):
    before = {file: file.read_bytes() for file in short.path.glob("*.yaml")}
    with pytest.raises(RunError, match=words) as refused:
        verbs.resume(short.path, [override, "train.max_steps=8"])
    assert f"model: {short.path}" in refused.value.hint
    assert ("--weights-only" in refused.value.hint) == (override == "train.learning_rate=0.5")
    assert {file: file.read_bytes() for file in short.path.glob("*.yaml")} == before


def test_what_the_saved_state_overrides_is_what_is_refused(full, tmp_path):
    """Whatever a plan and a recipe say of it, a trainer that goes on has the checkpoint's."""
    run = copied(full, tmp_path / "run")
    resumed(run, ["train.max_steps=6", "train.lr_scheduler_type=constant"])
    for name, section, key in (("recipe.yaml", "train", "weight_decay"), ("plan.yaml", None, "learning_rate")):
        values = yaml.safe_load((run.path / name).read_text())
        (values if section is None else values[section])[key] = 0.5
        (run.path / name).write_text(yaml.safe_dump(values))
    seen = []
    worked(run.path, lambda trainer: seen.extend(trainer.optimizer.param_groups))
    assert {group["weight_decay"] for group in seen} == {0.0}
    assert [event["learning_rate"] for event in events(run, "log")][SHORT:] == [1e-3, 1e-3]


def test_edits_in_the_recipe_file_and_on_the_command_line_take_effect(full, tmp_path):
    run = copied(full, tmp_path / "run")
    shutil.copy(run.path / "recipe.yaml", newest_complete(run.path).path / "recipe.yaml")
    values = yaml.safe_load((run.path / "recipe.yaml").read_text())
    values["train"]["logging_steps"] = 2
    (run.path / "recipe.yaml").write_text(yaml.safe_dump(values))
    notes = said(run, "train.max_steps=8", "train.save_steps=3")
    assert {"applied: train.max_steps 4 -> 8, train.logging_steps 1 -> 2, train.save_steps 2 -> 3"} <= set(notes)
    worked(run.path)
    assert [event["step"] for event in events(run, "log")][SHORT:] == [6, 8]
    assert [event["step"] for event in events(run, "checkpoint")][2:] == [6, 8]
    assert reload_recipe(run.path / "recipe-1.yaml") == full.recipe


def checkpoints(run):
    return sorted(folder.name for folder in (run.path / "checkpoints").glob("checkpoint-*"))


@pytest.mark.parametrize("name", ["2", "checkpoint-2", "path"])
def test_a_run_goes_back_to_a_checkpoint_and_the_later_ones_are_set_aside(name, full, tmp_path):
    run = copied(full, tmp_path / "run")
    notes = said(run, from_=str(run.path / "checkpoints" / "checkpoint-2") if name == "path" else name)
    assert notes[0] == "resuming from step 2 of 4"
    assert notes[-1] == "set aside in checkpoints/aside-1: checkpoint-4"
    assert (run.path / "checkpoints" / "aside-1" / "checkpoint-4" / "manifest.json").is_file()
    if name == "path":
        worked(run.path)
        assert [event["step"] for event in events(run, "log")] == [1, 2, 3, 4, 3, 4]
        torch.testing.assert_close(saved_weights(run.model_path), saved_weights(full.model_path), rtol=0, atol=0)
        notes = said(run, "train.max_steps=6", from_=str(run.path / "checkpoints" / "aside-1" / "checkpoint-4"))
        assert notes[-1] == "set aside in checkpoints/aside-2: checkpoint-4"
        assert checkpoints(run) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize(
    ("eval_steps", "step", "evaluated", "counted", "is_due"),
    [
        (3, 6, None, None, True),
        (3, 6, 6, None, False),
        (3, 7, None, None, False),
        (3, 8, None, None, True),
        (3, 8, 6, None, True),
        (3, 8, 8, None, False),
        (3, 6, 6, 3, True),
        (3, 6, 6, 6, False),
        (None, 8, None, None, False),
    ],
)
def test_an_evaluation_that_was_cut_off_is_made_up_for(eval_steps, step, evaluated, counted, is_due, tmp_path):
    run = made_run(tmp_path / "run", phase="interrupted")
    if evaluated is not None:
        EventLog(run.path / "events.jsonl").write("eval", step=evaluated, eval_loss=1.0)
    schedule = run.plan.schedule.model_copy(update={"num_steps": 8, "eval_steps": eval_steps})
    patience = None if counted is None else Patience(counter=0, since=counted, step=counted)
    newest = Newest(step=step, path=tmp_path, patience=patience)
    assert evaluation_is_due(run, schedule, newest, Place()) is is_due


class Halfway:
    """What a trainer carries between two logged steps."""

    def __init__(self, **values):
        self.args = SimpleNamespace(device="cpu", gradient_accumulation_steps=1)
        self.state = SimpleNamespace(global_step=5, max_steps=8, epoch=1.25, num_input_tokens_seen=0)
        self.summed_loss, self.logged_step, self.num_trained_tokens = torch.tensor(0.0), 0, 0
        self.metrics, self.replayed_groups, self.rollouts_ahead = {"train": {}, "eval": {}}, None, None
        vars(self).update(values)

    def wrap(self, name, function):
        pass

    def await_rollouts(self):
        self.rollouts_ahead = [*self.rollouts_ahead, {"step": 7, "completions": {"logprobs": [[[-1.5]], [[None]]]}}]


def test_completions_that_are_ahead_are_waited_for_and_carried(full, tmp_path):
    saved, resumed_trainer = Halfway(rollouts_ahead=[{"step": 6}]), Halfway(rollouts_ahead=[])
    source = shutil.copytree(newest_complete(full.path).path, tmp_path / "checkpoint-4")
    Carried(saved, full.plan, Place(), None)._save(lambda folder: None, str(source))
    Carried(resumed_trainer, full.plan, Place(), source).restore()
    assert resumed_trainer.rollouts_ahead == saved.rollouts_ahead and len(saved.rollouts_ahead) == 2


def test_what_was_summed_since_the_last_logged_step_is_logged_after_a_resume(full, tmp_path):
    measured = {"train": {"entropy": [0.5, torch.tensor(2.0)]}, "eval": {}}
    saved = Halfway(summed_loss=torch.tensor(7.5), logged_step=4, num_trained_tokens=1234, metrics=measured)
    source = shutil.copytree(newest_complete(full.path).path, tmp_path / "checkpoint-4")
    Carried(saved, full.plan, Place(), None)._save(lambda folder: None, str(source))
    resumed_trainer = Halfway(state=SimpleNamespace(global_step=5, max_steps=8))
    Carried(resumed_trainer, full.plan, Place(), source).restore()
    assert (resumed_trainer.summed_loss.item(), resumed_trainer.logged_step) == (7.5, 4)
    assert resumed_trainer.num_trained_tokens == 1234
    assert resumed_trainer.metrics == {"train": {"entropy": [0.5, 2.0]}, "eval": {}}


def test_what_is_no_checkpoint_of_the_run_is_refused(full, short, tmp_path):
    run = copied(full, tmp_path / "run")
    (run.path / "checkpoints" / "checkpoint-9").symlink_to(short.path / "checkpoints" / "checkpoint-4")
    for name in ("3", "../../model", "checkpoint-9", str(short.path / "checkpoints" / "checkpoint-4")):
        with pytest.raises(RunError, match="run has no such checkpoint") as refused:
            verbs.resume(run, from_=name)
        assert "checkpoint-2, checkpoint-4" in refused.value.hint


def without_optimizer(run, *steps):
    for step in steps:
        (run.path / "checkpoints" / f"checkpoint-{step}" / "optimizer.pt").unlink()


@pytest.mark.slow
def test_a_checkpoint_without_its_states_offers_its_weights(full, folder, tmp_path):
    run = copied(full, tmp_path / "run")
    without_optimizer(run, 2, 4)
    with pytest.raises(RunError, match=r"optimizer.pt is missing") as refused:
        verbs.resume(run, from_="2")
    assert "--from 2 --weights-only" in refused.value.hint
    with pytest.raises(RunError, match="no complete checkpoint") as refused:
        verbs.resume(run)
    assert "--weights-only starts from the weights of checkpoint-4" in refused.value.hint
    # Another run from these weights tells what is to come out.
    other = recipe_for(folder, tmp_path / "other", scheduler="cosine", learning_rate=2e-3)
    other = verbs.train(other | {"model": str(full.path / "checkpoints" / "checkpoint-2")})
    (run.path / "errors").mkdir()
    notes = said(run, "train.learning_rate=2e-3", from_="2", weights_only=True)
    assert notes[0] == (
        "starting over from the weights of step 2, for 4 steps, with fresh optimizer, schedule, random state and data "
        "order"
    )
    assert notes[1] == "applied: train.learning_rate 0.001 -> 0.002"
    assert checkpoints(run) == []
    worked(run.path)
    assert losses(run) == losses(other)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(other.model_path), rtol=0, atol=0)
    (event,) = events(run, "resume")
    assert (event["step"], event["weights_only"]) == (0, True)
    assert checkpoints(run) == ["checkpoint-2", "checkpoint-4"]


def test_what_began_with_weights_and_ended_early_begins_with_them_again(full, tmp_path):
    run = copied(full, tmp_path / "run")
    said(run, from_="2", weights_only=True)
    run.update_status(phase="failed", exit_reason="the power is gone")
    notes = said(run)
    assert notes[0].startswith("starting over from the weights of step 2")
    assert (run.path / "checkpoints" / "aside-1" / "checkpoint-2").is_dir()


def changed(run):
    return fingerprints.changes(run, run.recipe)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model/model.safetensors", "model: .*model.safetensors has changed"),
        ("model/config.json", "model: .*config.json has changed"),
        ("model/generation_config.json", "model: .*generation_config.json has changed"),
        ("model/tokenizer.json", "tokenizer: .*tokenizer.json has changed"),
        ("rows.jsonl", "data.train: .*rows.jsonl has changed"),
        ("run/data/train.arrow", "rows: data/train.arrow has changed"),
    ],
)
def test_what_a_run_is_made_of_may_not_change(file, words, folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    shutil.copy(folder / "rows.jsonl", tmp_path)
    run = verbs.make_run(recipe_for(tmp_path, "run"))
    assert changed(run) == []
    # The cache has the same file by another name.
    held = (tmp_path / file).read_bytes()
    (tmp_path / file).unlink()
    (tmp_path / file).write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    (found,) = changed(run)
    assert re.search(words, found)


def test_other_versions_than_at_the_checkpoint_are_told(full, tmp_path):
    same, run = copied(full, tmp_path / "same"), copied(full, tmp_path / "run")
    assert not [note for note in said(same, "train.max_steps=8") if "versions" in note]
    file = newest_complete(run.path).path / MANIFEST
    manifest = json.loads(file.read_text())
    version = manifest["versions"]["torch"]
    manifest["versions"] |= {"torch": "3.1.0", "flashy": "1.0"}
    file.write_text(json.dumps(manifest))
    told = [note for note in said(run, "train.max_steps=8") if "versions" in note]
    assert told == [
        "other versions than at the checkpoint, so losses may differ in rounding: "
        f"torch 3.1.0 → {version}, flashy 1.0 → not installed"
    ]


@pytest.mark.parametrize("damage", [Path.mkdir, os.mkfifo, lambda file: file.write_text("[" * 200_000 + "\n")])
def test_events_that_cannot_be_read_are_told_before_a_run_resumes(damage, full, tmp_path):
    run = copied(full, tmp_path / "run")
    (run.path / "events.jsonl").unlink()
    damage(run.path / "events.jsonl")
    with pytest.raises(RunError, match=r"events\.jsonl(:1: damaged line: nested too deep| is not a regular file)"):
        resumed(run, ["train.max_steps=8"])
    assert run.recipe == full.recipe


def test_a_changed_model_is_refused_by_its_name(full, tmp_path, folder):
    run = copied(full, tmp_path / "run")
    kept = (run.path / fingerprints.FINGERPRINTS).read_text()
    model = str(folder / "model" / "model.safetensors")
    digest = fingerprints.digest_of(folder / "model" / "model.safetensors")
    (run.path / fingerprints.FINGERPRINTS).write_text(kept.replace(digest, "0" * 64))
    with pytest.raises(RunError, match=f"model: {model} has changed") as refused:
        verbs.resume(run, ["train.max_steps=8"])
    assert "restore them" in refused.value.hint


def test_rows_that_were_prepared_do_without_their_source_and_patterns_notice_more_files(folder, tmp_path):
    recipe = recipe_for(folder, tmp_path / "run")
    shutil.copy(folder / "rows.jsonl", tmp_path / "rows-1.jsonl")
    run = verbs.make_run(recipe | {"data": {"train": str(tmp_path / "rows-*.jsonl"), "max_length": 64}})
    assert changed(run) == []
    shutil.copy(folder / "rows.jsonl", tmp_path / "rows-2.jsonl")
    (found,) = changed(run)
    assert "matches other files than before" in found
    for file in tmp_path.glob("rows-*"):
        file.unlink()
    assert changed(run) == []


def test_of_a_large_file_a_sample_is_read(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(fingerprints.WHOLE_BYTES + 10)
    before = fingerprints.digest_of(file)
    last = fingerprints.WHOLE_BYTES + 9
    for place, is_seen in (
        (0, True),
        (fingerprints.HEAD_BYTES - 1, True),
        (last, True),
        (fingerprints.HEAD_BYTES, False),
    ):
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"x")
        assert (fingerprints.digest_of(file) != before) == is_seen
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"\0")


def work_on(run):
    num = run.plan.layout.num_processes
    if num == 1:
        worked(run.path.resolve())
    else:
        work_in(run.path.resolve(), num)


ALONE, DDP, FSDP2, FSDP2_3 = ("single", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("adapter", "spread", "train"),
    [
        ("lora", [ALONE, DDP, ALONE, FSDP2, ALONE], {}),
        ("full", [FSDP2, ALONE], {}),
        pytest.param("qlora", [FSDP2, FSDP2_3, ALONE, FSDP2], {}, marks=pytest.mark.slow),
        pytest.param("full", [ALONE, FSDP2, ALONE], {"optim": "adam_mini"}, marks=pytest.mark.slow),
        pytest.param(
            "full",
            [ALONE, FSDP2, ALONE],
            {"optim": "apollo_adamw", "optim_args": {"rank": 1, "scale_type": "tensor", "scale": 128}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lora", "full", "qlora", "adam_mini", "apollo"],
)
def test_a_run_goes_on_in_other_processes_as_if_it_had_always_been_in_one(adapter, spread, train, folder, tmp_path):
    calm = verbs.train(recipe_for(folder, tmp_path / "calm", adapter=adapter, steps=2 * len(spread), **train))
    strategy, num = spread[0]
    parallel = {"strategy": strategy, "num_processes": num}
    run = verbs.make_run(recipe_for(folder, tmp_path / "run", adapter=adapter, steps=2, parallel=parallel, **train))
    work_on(run)
    for part, (strategy, num) in enumerate(spread[1:], start=2):
        notes = said(
            run, f"parallel.strategy={strategy}", f"parallel.num_processes={num}", f"train.max_steps={2 * part}"
        )
        assert (run.plan.layout.strategy, run.plan.layout.num_processes) == (strategy, num)
        assert any("random state" in note and "derived from the seed" in note for note in notes)
        work_on(run)
    wanted, found = losses(calm), losses(run)
    assert list(found) == list(wanted)
    torch.testing.assert_close(list(found.values()), list(wanted.values()), rtol=0, atol=1e-5)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(calm.model_path), rtol=0, atol=1e-5)
    assert [event["learning_rate"] for event in events(run, "log")] == [1e-3] * len(wanted)


def test_what_deepspeed_divided_is_taken_back_as_it_was(full, tmp_path):
    run = copied(full, tmp_path / "run")
    with pytest.raises(RunError, match="DeepSpeed cannot load a checkpoint of single device") as refused:
        verbs.resume(run, ["parallel.strategy=zero2", "parallel.num_processes=2", "train.max_steps=8"])
    assert "parallel.strategy=single parallel.num_processes=1" in refused.value.hint


def ended_early(run):
    """Have a finished run look like one that ended behind its first checkpoint."""
    shutil.rmtree(run.path / "checkpoints" / "checkpoint-4")
    run.update_status(phase="interrupted", exit_reason="by the user", step=3)
    return run


@pytest.fixture
def named_recipe(folder, tmp_path, monkeypatch):
    """A recipe file without a folder for its runs, and a run of it that has ended early."""
    monkeypatch.chdir(tmp_path)
    values = recipe_for(folder, "none", scheduler="cosine")
    del values["output"]["dir"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    return ended_early(verbs.train("mine.yaml"))


def test_the_same_command_goes_on_with_a_run_where_it_is_asked_to(named_recipe, full):
    run = named_recipe
    assert verbs.unfinished("mine.yaml").path == run.path
    assert verbs.unfinished("mine.yaml", ["train.logging_steps=3"]) is None
    told = []
    other = verbs.train("mine.yaml", ["train.logging_steps=3"], resume=True)
    assert other.path != run.path
    assert verbs.train("mine.yaml", resume=True, on_event=told.append).path == run.path
    assert "resuming from step 2 of 4" in told[0]["notes"]
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(full.model_path), rtol=0, atol=0)
    assert verbs.unfinished("mine.yaml") is None


def test_a_new_run_says_that_another_one_ended_early(named_recipe):
    told = []
    run = verbs.train("mine.yaml", on_event=told.append)
    assert run.path != named_recipe.path
    plan = next(event for event in told if event["event"] == "plan")
    assert f"a run of this recipe ended early: `tunekit resume {named_recipe.path}` resumes it" in plan["notes"]


def test_a_folder_that_is_taken_says_how_to_go_on_in_it(full, folder, tmp_path):
    run = ended_early(copied(full, tmp_path / "run"))
    recipe = recipe_for(folder, run.path, scheduler="cosine")
    with pytest.raises(RunError, match="contains a run, which is interrupted") as refused:
        verbs.train(recipe)
    assert f"`tunekit resume {run.path}`, or --resume here, resumes it" in refused.value.hint
    # What the command says counts, and what the run has does not fit is refused as ever.
    with pytest.raises(RunError, match=r"adapter.type full -> lora"):
        verbs.train(recipe | {"adapter": "lora"}, resume=True)
    run = verbs.train(recipe, ["train.max_steps=5"], resume=True)
    assert (run.state, run.status()["step"]) == ("finished", 5)


def test_what_ended_before_its_first_checkpoint_begins_in_its_folder(full, folder, tmp_path):
    run = copied(full, tmp_path / "run")
    shutil.rmtree(run.path / "checkpoints")
    run.update_status(phase="interrupted", exit_reason="by the user", step=1)
    run = verbs.train(recipe_for(folder, run.path, scheduler="cosine"), resume=True)
    assert run.state == "finished"
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(full.model_path), rtol=0, atol=0)


@pytest.mark.slow
def test_on_a_terminal_the_command_asks(named_recipe):
    main, there = pty.openpty()
    command = [sys.executable, "-m", "tunekit", "train", "mine.yaml"]
    with subprocess.Popen(command, stdin=there, stdout=there, stderr=there, start_new_session=True) as process:
        os.close(there)
        shown = b""
        while b"resume it?" not in shown:
            shown += os.read(main, 1000)
        os.write(main, b"y\n")
        with contextlib.suppress(OSError):
            while True:
                shown += os.read(main, 1000)
        assert process.wait(LIMIT_SECONDS) == 0, shown.decode()
    assert b"ended after step 3 of 4" in shown
    assert named_recipe.state == "finished"


def test_a_run_says_what_can_be_done_next(full, tmp_path):
    run = copied(full, tmp_path / "run")
    assert prospects(run) == f"`tunekit resume {run.path} train.max_steps=N` trains further"
    ended_early(run)
    assert prospects(run) == f"`tunekit resume {run.path}` resumes from step 2 of 4"
    without_optimizer(run, 2)
    assert f"`tunekit resume {run.path} --weights-only`" in prospects(run)
    shutil.rmtree(run.path / "checkpoints")
    assert "no checkpoint to resume from" in prospects(run)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*run_report(run, 200), sep="\n")
    assert "no checkpoint to resume from" in console.export_text()


@pytest.mark.parametrize("group", [{"low_rank": True}, {}], ids=["low rank", "plain"])
def test_states_of_a_low_rank_are_whole_in_each_process_and_others_divided(group):
    init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        weight = DTensor.from_local(torch.zeros(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)])
        saved = torch.arange(8.0 * 6).reshape(8, 6)[: 8 if not group else 2]
        state = _state_as_is("exp_avg", saved, weight, group)
        local = state.to_local() if isinstance(state, DTensor) else state
    finally:
        destroy_process_group()
    assert torch.equal(local, saved if group else saved[4:])
