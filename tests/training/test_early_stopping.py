"""A run stops where transformers' own callback would, on the figures of the same run trained to its end."""

import json
import math
import os
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerControl

from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tunekit.api import verbs
from tunekit.display.console import make_console, run_report
from tunekit.errors import RunError
from tunekit.estimates.memory.memory import Saving
from tunekit.planner.resume import rescheduled
from tunekit.recipe.sections.section import TrainSection
from tunekit.runs.checkpoints.complete import MANIFEST, Best, newest_complete
from tunekit.runs.run import Run
from tunekit.training.early_stopping import EarlyStopping, is_better

STEPS, EVERY = 16, 2
RISING = {"greater_is_better": True}
"""The loss falls from evaluation to evaluation: where a greater one is better, none improves on the first."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopping")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


def recipe_for(folder, train=None, **parallel):
    asked = {"max_steps": STEPS, "eval_steps": EVERY, "save_steps": EVERY, "save_total_limit": 20, **(train or {})}
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64, "eval_size": 0.2},
        "adapter": "full",
        "train": {"global_batch_size": 8, "learning_rate": 1e-3, **asked},
        "parallel": parallel,
        "output": {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())},
    }


def events(run, kind):
    return [event for event in run.events() if event["event"] == kind]


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def whole(folder):
    """The run that trains to its end."""
    run = Run(made(recipe_for(folder)))
    worked(run.path)
    return run


@pytest.fixture(scope="module")
def stopped(folder):
    """The run that stops after its third evaluation, at step 6."""
    run = Run(made(recipe_for(folder, {**RISING, "early_stopping_patience": 2})))
    worked(run.path)
    return run


@pytest.fixture
def copied(stopped, tmp_path):
    shutil.copytree(stopped.path, tmp_path / "run")
    run = Run(tmp_path / "run")
    shutil.rmtree(run.model_path)
    run.update_status(phase="failed", exit_reason="the power is gone")
    return run


class Figures:
    """Takes the place of a trainer: where it is, and whether it is to stop."""

    def __init__(self):
        self.state, self.control = SimpleNamespace(global_step=0, max_steps=1000), TrainerControl()

    def wrap(self, name, around):
        pass


@pytest.mark.parametrize("greater", [True, False])
@pytest.mark.parametrize(("patience", "threshold"), [(1, 0.0), (3, 0.0), (2, 0.25)])
def test_any_figures_stop_at_the_step_at_which_transformers_would(patience, threshold, greater):
    quiet = SimpleNamespace(write=lambda *_, **__: None)
    draw = random.Random(f"{patience} {threshold} {greater}")
    for _ in range(50):
        # One that is no number is no improvement either; transformers takes it for one where it is the first.
        figures = [draw.random(), *(draw.choice([draw.random(), draw.random(), math.nan]) for _ in range(30))]
        evals = [{"step": step, "eval_loss": value} for step, value in enumerate(figures, 1)]
        train = TrainSection(early_stopping_patience=patience, early_stopping_threshold=threshold)
        trainer = Figures()
        stopping = EarlyStopping(quiet, train, Saving(greater_is_better=greater), None)
        stopping.attach(trainer)
        best = None
        for event in evals:
            trainer.state.global_step = event["step"]
            stopping.count(event["eval_loss"], best, trainer.control)
            if trainer.control.should_training_stop:
                break
            if is_better(event["eval_loss"], best, greater=greater):
                best = Best(metric="eval_loss", value=event["eval_loss"], step=event["step"])
        ended = trainer.state.global_step if trainer.control.should_training_stop else None
        assert ended == transformers_stop(evals, patience, threshold, greater=greater)


def transformers_stop(evals, patience, threshold, *, greater):
    """The step at which transformers' callback stops; the best is kept beside it, as its trainer does."""
    callback = EarlyStoppingCallback(patience, threshold)
    args = SimpleNamespace(metric_for_best_model="eval_loss", greater_is_better=greater)
    state = SimpleNamespace(best_metric=None)
    for event in evals:
        control = TrainerControl()
        callback.on_evaluate(args, state, control, {"eval_loss": event["eval_loss"]})
        if control.should_training_stop:
            return event["step"]
        values = [value for value in (state.best_metric, event["eval_loss"]) if value is not None and value == value]
        state.best_metric = (max(values) if greater else min(values)) if values else None
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {**RISING, "early_stopping_patience": 1},
        {"early_stopping_patience": 2, "early_stopping_threshold": 0.3},
    ],
    ids=["patience", "threshold"],
)
def test_a_run_stops_where_transformers_would_and_its_result_is_the_state_of_that_step(asked, folder, whole):
    greater = asked.get("greater_is_better", False)
    after_start = [event for event in events(whole, "eval") if event["step"]]
    threshold = asked.get("early_stopping_threshold", 0.0)
    step = transformers_stop(after_start, asked["early_stopping_patience"], threshold, greater=greater)
    assert step is not None
    run = Run(made(recipe_for(folder, asked)))
    worked(run.path)
    assert [event["step"] for event in events(run, "log")] == list(range(1, step + 1))
    assert [event["step"] for event in events(run, "early_stop")] == [step]
    assert run.state == "finished"
    assert run.status()["exit_reason"] == events(run, "early_stop")[0]["message"] == run.result()["stopped_early"]
    assert_same(saved_weights(run.model_path), saved_weights(whole.path / "checkpoints" / f"checkpoint-{step}"))


@pytest.mark.slow
def test_the_end_is_told_with_the_step_of_the_best_and_the_way_to_its_model(stopped):
    words = "stopped early at step 6: eval_loss has not improved since step 2"
    assert stopped.status()["exit_reason"] == words
    console = make_console()
    console.width = 500
    with console.capture() as shown:
        console.print(*run_report(stopped, 500))
    assert words in shown.get()
    assert f"of step 6; for the best, of step 2: tunekit export {stopped.path} --checkpoint 2" in shown.get()
    assert "train.early_stopping_patience=null` trains further" in shown.get()


@pytest.mark.slow
def test_a_stopped_run_that_lost_its_result_takes_no_further_step(stopped, copied):
    worked(copied.path)
    assert copied.status()["exit_reason"] == stopped.status()["exit_reason"]
    assert [event["step"] for event in events(copied, "log")] == [1, 2, 3, 4, 5, 6]
    assert_same(saved_weights(copied.model_path), saved_weights(stopped.model_path))


@pytest.mark.slow
def test_a_run_resumed_before_its_end_stops_at_the_same_step(stopped, copied):
    shutil.rmtree(copied.path / "checkpoints" / "checkpoint-6")
    assert newest_complete(copied.path).patience.counter == 1
    worked(copied.path)
    assert [event["step"] for event in events(copied, "log")] == [1, 2, 3, 4, 5, 6, 5, 6]
    assert copied.status()["exit_reason"] == stopped.status()["exit_reason"]
    assert_same(saved_weights(copied.model_path), saved_weights(stopped.model_path))


@pytest.mark.slow
def test_an_evaluation_that_the_checkpoint_came_before_is_made_up_for_and_counted(stopped, copied):
    file = copied.path / "checkpoints" / "checkpoint-6" / MANIFEST
    manifest = json.loads(file.read_text())
    before = json.loads((copied.path / "checkpoints" / "checkpoint-4" / MANIFEST).read_text())
    file.write_text(json.dumps(manifest | {"patience": before["patience"]}))
    worked(copied.path)
    assert [event["step"] for event in events(copied, "log")] == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in events(copied, "eval")] == [0, 2, 4, 6, 6]
    assert copied.status()["exit_reason"] == stopped.status()["exit_reason"]
    assert newest_complete(copied.path).patience.counter == 2
    assert_same(saved_weights(copied.model_path), saved_weights(stopped.model_path))


@pytest.mark.slow
def test_a_run_that_stopped_early_goes_on_where_its_patience_is_taken_away(stopped):
    with pytest.raises(RunError, match="stopped early after 6 steps: eval_loss had not improved for 2") as refused:
        verbs.resume(stopped.path)
    assert "train.early_stopping_patience=null" in refused.value.hint
    recipe = stopped.recipe
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"early_stopping_patience": None})})
    plan = rescheduled(stopped.plan, longer)
    (steps,) = (reason for reason in plan.reasons if reason.topic == "steps")
    assert "stops early" not in steps.why


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_all_processes_stop_at_the_same_step(strategy, folder, stopped):
    asked = {**RISING, "early_stopping_patience": 2}
    run = Run(made(recipe_for(folder, asked, num_processes=2, strategy=strategy)))
    work_in(run.path, 2)
    assert run.status()["exit_reason"] == stopped.status()["exit_reason"]
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(stopped.model_path), rtol=0, atol=1e-5)
