"""The trainer for a loop of one's own is that of a run."""

from pathlib import Path

import pytest

import tunekit
from tests.tiny import save_chats, save_tiny_model
from tunekit.errors import RunError
from tunekit.runs.record import RESERVE
from tunekit.runs.run import Run

RECIPE = {
    "model": "model",
    "adapter": "full",
    "data": {"train": "rows.jsonl", "max_length": 64},
    "train": {"max_steps": 3, "global_batch_size": 4, "save_steps": 1, "learning_rate": 1e-3},
    "output": {"sample_prompts": []},
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(12)))
    return tmp_path


def values(run):
    return [(event["step"], event["loss"], event["grad_norm"]) for event in run.events() if event["event"] == "log"]


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_as_a_run_does_and_its_run_can_be_finished(here):
    whole = tunekit.train(RECIPE)
    heard = []
    trainer = tunekit.trainer(RECIPE, on_event=lambda event: heard.append(event["event"]))
    run = Run(Path(trainer.args.output_dir).parent)
    assert run.state == "loading"
    assert trainer.train().global_step == 3
    assert values(run) == values(whole)
    assert {"plan", "engine", "log", "checkpoint"} <= set(heard)
    assert run.state == "interrupted" and not run.model_path.exists()
    assert not (run.path / RESERVE).exists()
    trainer.save_model(here / "mine")
    assert (here / "mine" / "model.safetensors").is_file()
    assert tunekit.resume(run).state == "finished"
    ours, theirs = ((one.model_path / "model.safetensors").read_bytes() for one in (run, whole))
    assert ours == theirs


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"output.report_to": ["tensorboard"]},
            "output.report_to: unsupported for a trainer in this process; unset it",
        ),
        ({"parallel.num_processes": 2}, "which needs separate processes; set parallel.num_processes=1, or use"),
    ],
)
def test_what_needs_more_than_this_process_is_refused(here, overrides, words):
    with pytest.raises(RunError, match=words):
        tunekit.trainer(RECIPE, overrides)
    assert not (here / "runs").exists()
