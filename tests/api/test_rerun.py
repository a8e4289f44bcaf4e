"""A run repeated from its folder: the same bits, or the first step that differs."""

import json
import shutil

import pytest
from typer.testing import CliRunner

import tunekit
from tests.rows import save_rows
from tests.tiny import save_chats, save_tiny_model
from tests.training.watching import own_signals
from tunekit.api.rerun import agreement_of
from tunekit.cli.app import app


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    return tunekit.train(
        {
            "model": "pico",
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
            "train": {"max_steps": 3, "global_batch_size": 4, "logging_steps": 1, "save_steps": 2},
            "output": {"dir": str(folder / "runs" / "one"), "sample_prompts": []},
        }
    )


@pytest.fixture(scope="module")
def repeated(run):
    with pytest.MonkeyPatch.context() as patch, own_signals():
        patch.chdir(run.path.parents[1])
        done = CliRunner().invoke(app, ["rerun", "one", "--name", "again"], catch_exceptions=False)
    return done, tunekit.Run(run.path.parent / "again")


def test_a_repetition_has_the_same_losses_and_weights_to_the_last_bit(run, repeated):
    done, again = repeated
    assert done.exit_code == 0, done.output
    assert "are bit-identical, and so are the weights\nreproduced exactly" in done.output
    losses = [[event["loss"] for event in one.events() if event["event"] == "log"] for one in (run, again)]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    assert json.loads((again.path / "rerun.json").read_text())["agrees"]


@pytest.mark.slow
def test_a_run_that_was_gone_on_with_as_it_was_is_repeated_from_its_beginning(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(run.path, tmp_path / "runs" / "other")
    resumed = tunekit.resume(other, from_="2")
    assert [event["step"] for event in resumed.events() if event["event"] == "resume"] == [2]
    found = tunekit.rerun(resumed)
    assert found.agrees and found.first is None and found.num_values == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "judged"),
    [
        ({"type": "dpo"}, "rewards/margins"),
        ({"type": "grpo", "rewards": ["numeric_match"], "max_completion_length": 8}, "reward"),
    ],
)
def test_what_is_drawn_from_the_model_is_drawn_again(method, judged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model", hidden=32, layers=1)
    save_rows(tmp_path / "rows.jsonl", method["type"], num=8)
    once = tunekit.train(
        {
            "model": str(tmp_path / "model"),
            "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64},
            "method": method,
            "train": {"max_steps": 2, "global_batch_size": 8, "logging_steps": 1},
            "output": {"sample_prompts": []},
        }
    )
    found = tunekit.rerun(once)
    assert found.agrees and found.first is None and found.same_weights and found.num_values == 4
    logged = [[event[judged] for event in one.events() if event["event"] == "log"] for one in (once, found.again)]
    assert len(logged[0]) == 2 and logged[0] == logged[1]
    name = once.recipe.output.name
    assert found.again.name.startswith(f"{name}-rerun-") and tunekit.find_run(name).name == once.name


def test_weights_that_are_gone_are_not_said_to_differ(run, repeated, tmp_path):
    other = shutil.copytree(run.path, tmp_path / "other")
    shutil.rmtree(other / "model")
    found = agreement_of(tunekit.Run(other), repeated[1])
    assert found.agrees and found.same_weights is None
    assert "3 losses and metrics are bit-identical, the run's weights are missing" in list(found.lines())


def test_the_first_step_whose_loss_differs_is_named(run, repeated, tmp_path):
    other = shutil.copytree(run.path, tmp_path / "other")
    events = [json.loads(line) for line in (other / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "log" and event["step"] >= 2:
            event["loss"] *= 1.0001
    (other / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = agreement_of(tunekit.Run(other), repeated[1])
    assert not found.agrees and found.first.step == 2 and found.first.name == "loss"
    assert "loss at step 2 was" in " ".join(found.lines())


@pytest.mark.slow
def test_a_repetition_that_does_not_agree_is_exit_code_3(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(run.path, tmp_path / "other")
    (other / "events.jsonl").write_text((other / "events.jsonl").read_text().replace('"loss": ', '"loss": 1'))
    with own_signals():
        done = CliRunner().invoke(app, ["rerun", str(other)])
    assert done.exit_code == 3, done.output
    assert "first difference: loss at step 1" in done.output and "not reproduced" in done.output


def test_with_other_versions_losses_may_differ_by_what_is_said(run, repeated, tmp_path):
    other = shutil.copytree(run.path, tmp_path / "other")
    known = json.loads((other / "made_with.json").read_text())
    known["versions"]["torch"] = "1.0"
    (other / "made_with.json").write_text(json.dumps(known))
    found = agreement_of(tunekit.Run(other), repeated[1])
    assert found.agrees and any("torch was 1.0" in words for words in found.otherwise)


@pytest.mark.parametrize(
    ("file", "words"), [("recipe.yaml", "recipe.yaml has changed"), ("data/train.arrow", "train.arrow has changed")]
)
def test_a_run_whose_folder_was_changed_is_not_repeated(file, words, run, tmp_path):
    other = shutil.copytree(run.path, tmp_path / "other")
    (other / file).write_bytes((other / file).read_bytes() + b"\n")
    with pytest.raises(tunekit.TunekitError, match=words):
        tunekit.rerun(other)


def test_rows_that_were_changed_since_are_named(run):
    rows = run.path.parents[1] / "rows.jsonl"
    text = rows.read_text()
    rows.write_text(text.replace("double 3", "double 4"))
    try:
        with pytest.raises(tunekit.TunekitError, match=r"data\.train: .*rows\.jsonl has changed"):
            tunekit.rerun(run)
    finally:
        rows.write_text(text)


def test_a_run_that_has_not_finished_is_not_repeated(run, tmp_path):
    other = shutil.copytree(run.path, tmp_path / "other")
    (other / "status.json").write_text(json.dumps({**run.status(), "phase": "interrupted"}))
    with pytest.raises(
        tunekit.TunekitError, match=r"only finished runs can be repeated; `tunekit resume .*` resumes from step"
    ):
        tunekit.rerun(other)


def test_a_run_without_its_events_is_not_repeated_in_vain(run, tmp_path):
    other = shutil.copytree(run.path, tmp_path / "other")
    (other / "events.jsonl").unlink()
    with pytest.raises(tunekit.TunekitError, match=r"events\.jsonl has no result"):
        tunekit.rerun(other)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden"])
def test_a_repetition_lies_in_runs_under_a_name_of_its_own(name, run):
    with pytest.raises(tunekit.TunekitError, match="is not a valid folder name in runs"):
        tunekit.rerun(run, name=name)
