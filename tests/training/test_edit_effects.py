"""The checkpoints of a run, and what becomes of edits when it goes on from one of them."""

import shutil

import pytest

import tunekit
from tests.tiny import save_chats, save_tiny_model
from tunekit import frontend
from tunekit.api import verbs
from tunekit.errors import RunError, TunekitError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("effects")
    save_tiny_model(folder / "model", hidden=32, layers=1)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(20)))
    rows = str(folder / "rows.jsonl")
    return verbs.train(
        {
            "model": str(folder / "model"),
            "data": {"train": rows, "eval": rows, "max_length": 64},
            "adapter": "lora",
            "train": {"max_steps": 4, "global_batch_size": 4, "save_steps": 2, "eval_steps": 2},
            "output": {"sample_prompts": [], "dir": str(folder / "run")},
        }
    )


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained.path, tmp_path / "run")
    return tunekit.Run(tmp_path / "run")


def test_checkpoints_are_told_with_their_losses_and_sizes_the_newest_first(run):
    found = tunekit.checkpoints(run)
    assert [(one.name, one.step, one.fault) for one in found] == [("checkpoint-4", 4, None), ("checkpoint-2", 2, None)]
    losses = {event["step"]: event["loss"] for event in run.events() if event["event"] == "log"}
    evaluated = {event["step"]: event["eval_loss"] for event in run.events() if event["event"] == "eval"}
    assert [one.loss for one in found] == [losses[4], losses[2]]
    assert [one.eval_loss for one in found] == [evaluated[4], evaluated[2]]
    best = min((4, 2), key=lambda step: evaluated[step])
    assert [one.step for one in found if one.is_best] == [best]
    for one in found:
        manifest = (one.path / "manifest.json").stat().st_size
        assert one.size_bytes + manifest == sum(file.stat().st_size for file in one.path.rglob("*") if file.is_file())


def test_a_damaged_checkpoint_says_what_is_wrong(run):
    (run.path / "checkpoints" / "checkpoint-4" / "optimizer.pt").unlink()
    shutil.copytree(run.path / "checkpoints" / "checkpoint-2", run.path / "checkpoints" / "checkpoint-3.bad")
    found = {one.name: one.fault for one in tunekit.checkpoints(run)}
    assert list(found) == ["checkpoint-4", "checkpoint-2", "checkpoint-3.bad"]
    assert found["checkpoint-4"] == "optimizer.pt is missing"
    assert found["checkpoint-2"] is None
    assert found["checkpoint-3.bad"] == "set aside as damaged"


def test_checkpoints_that_were_left_behind_are_told_and_can_be_gone_on_from(run):
    verbs.resume(run, ["train.max_steps=6"], from_="2")
    names = [one.name for one in tunekit.checkpoints(run)]
    assert names[-1] == "aside-1/checkpoint-4"
    assert tunekit.checkpoints(run)[-1].fault is None
    (effect,) = frontend.effects_of(run, ["train.max_steps=8"], from_="aside-1/checkpoint-4")
    assert (effect.key, effect.before, effect.now) == ("train.max_steps", "4", "8")
    verbs.resume(run, ["train.max_steps=8"], from_="aside-1/checkpoint-4")
    assert run.status()["step"] == 8


def test_each_edit_is_told_with_what_becomes_of_it_and_a_resume_agrees(run):
    asked = ["train.max_steps=8", "train.learning_rate=1e-5", "adapter.rank=4", "train.micro_batch_size=2"]
    found = {one.key: one for one in frontend.effects_of(run, asked)}
    assert {key: one.effect for key, one in found.items()} == {
        "adapter.rank": "refused",
        "train.learning_rate": "saved state",
        "train.max_steps": "takes effect",
        "train.micro_batch_size": "takes effect",
    }
    assert found["train.micro_batch_size"].replans and not found["train.max_steps"].replans
    for key in ("adapter.rank", "train.learning_rate"):
        override = next(one for one in asked if one.startswith(key))
        with pytest.raises(RunError) as caught:
            verbs.resume(run, [override])
        assert f"{key} {found[key].before} -> {found[key].now}: {found[key].why}" in caught.value.problem
    assert frontend.effects_of(run) == []


def test_with_the_weights_alone_what_the_state_holds_takes_effect(run):
    (effect,) = frontend.effects_of(run, ["train.learning_rate=1e-5"], weights_only=True)
    assert (effect.effect, effect.why) == ("takes effect", "")


@pytest.mark.parametrize(
    ("overrides", "from_", "words"),
    [
        (["train.max_stepz=3"], None, "did you mean"),
        ([], "7", "has no checkpoint 7; available: checkpoint-4, checkpoint-2"),
        ([], "../../other", "has no checkpoint"),
    ],
)
def test_edits_and_checkpoints_that_there_are_not_are_refused_in_words(run, overrides, from_, words):
    with pytest.raises(TunekitError, match=words):
        frontend.effects_of(run, overrides, from_=from_)
