"""What Optuna is told of a sweep and chooses next, from runs that are written down and not trained."""

import json

import optuna
import pytest

from tunekit.recipe.load import load_recipe
from tunekit.sweeps.folder import Outcome, Spec, Sweep, Trial
from tunekit.sweeps.measure import Measure
from tunekit.sweeps.study import Study
from tunekit.sweeps.values import Span

AXES = {"train.learning_rate": Span(1e-6, 1e-1, log=True), "adapter.rank": (4, 8)}


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A sweep of which no run has begun."""
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe({"model": "pico", "data": {"train": "rows.jsonl"}, "adapter": "lora"})
    spec = Spec(AXES, "optuna", 30, 5, Measure("eval_loss", False), 1, False)
    return Sweep.create(recipe, spec, [])


def ended(sweep, number, changes, losses):
    """A combination whose run has written some evaluations down, and finished."""
    trial = Trial(number, changes)
    sweep.write(trial)
    folder = sweep.run_path(trial)
    folder.mkdir(parents=True)
    steps = len(losses) - 1
    status = {"phase": "finished", "step": steps, "num_steps": steps, "started": 0.0, "pid": 1, "identity": None}
    status |= {"host": "here", "exit_reason": "finished"}
    (folder / "status.json").write_text(json.dumps(status), encoding="utf-8")
    lines = [{"event": "eval", "time": 0, "step": step, "eval_loss": loss} for step, loss in enumerate(losses)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return trial


def test_what_a_sweep_is_written_down_as_reads_back(sweep):
    assert sweep.spec.axes == AXES and sweep.spec.measure == Measure("eval_loss", False)
    assert sweep.trials() == [] and sweep.recipe.data.sources[0].path.endswith("rows.jsonl")


def test_what_comes_next_follows_from_what_there_is_and_is_another_one(sweep):
    first = Study(sweep).ask([])
    assert first == Study(sweep).ask([])
    assert 1e-6 <= first["train.learning_rate"] <= 1e-1 and first["adapter.rank"] in (4, 8)
    ended(sweep, 1, first, [3.0, 2.0])
    second = Study(sweep).ask(sweep.outcomes())
    assert second == Study(sweep).ask(sweep.outcomes()) != first
    (told,) = optuna.load_study(study_name=sweep.name, storage=f"sqlite:///{sweep.path / 'study.db'}").trials
    assert (told.value, told.intermediate_values) == (2.0, {0: 3.0, 1: 2.0})


def test_it_looks_where_runs_did_well(sweep):
    for number in range(1, 16):
        rate = 10 ** -(1 + number / 3)
        ended(sweep, number, {"train.learning_rate": rate, "adapter.rank": 4}, [9.0, abs(number - 9)])
    study = Study(sweep)
    outcomes = sweep.outcomes()
    drawn = []
    for number in range(16, 24):
        changes = study.ask(outcomes)
        drawn.append(changes["train.learning_rate"])
        outcomes.append(Outcome(Trial(number, changes), None, "waiting"))
    # The best was at 1e-4; by chance, two of eight would be within a factor of ten of it on either side... of five.
    assert sum(1e-5 <= rate <= 1e-3 for rate in drawn) >= 5


def test_a_run_behind_the_median_of_the_others_is_to_be_ended(sweep):
    for number in range(1, 7):
        ended(sweep, number, {"train.learning_rate": number * 1e-4, "adapter.rank": 4}, [5.0, 4.0, 3.0 + number / 10])
    ended(sweep, 7, {"train.learning_rate": 1e-2, "adapter.rank": 8}, [5.0, 4.9, 4.8])
    ended(sweep, 8, {"train.learning_rate": 1e-3, "adapter.rank": 8}, [5.0, 3.0, 2.0])
    behind, ahead = sweep.outcomes()[-2:]
    study = Study(sweep)
    assert study.falls_behind(behind) and not study.falls_behind(ahead)
