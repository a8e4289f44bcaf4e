"""Rows that a caller holds, through the verbs: named by the recipe, kept in the folder of the run."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tunekit
from tunekit.api import verbs
from tunekit.api.plan_inputs import is_same
from tunekit.cli.app import app
from tunekit.data.sources.in_memory import clear_rows
from tunekit.errors import RecipeError
from tunekit.runs.fingerprints import fingerprints_of
from tunekit.sweeps.folder import runs_of

RECIPE = {"model": "pico", "train": {"max_steps": 2, "global_batch_size": 4}, "data": {"max_length": 64}}
ROWS = [{"prompt": f"What is {n} plus 1?", "completion": f"{n + 1}"} for n in range(8)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_verbs_that_read_rows_take_them(here):
    plan = tunekit.plan(RECIPE, train_dataset=ROWS, eval_dataset=ROWS[:3])
    assert (plan.data.num_train, plan.data.num_eval) == (8, 3)
    preview = tunekit.preview(RECIPE, train_dataset=iter(ROWS), num_rows=1)
    assert json.loads(preview.rows[0].source)["prompt"] == ROWS[0]["prompt"]
    assert tunekit.plan(RECIPE, ["data.eval_size=0.5"], train_dataset=ROWS).recipe.data.train == plan.recipe.data.train


def test_a_run_keeps_its_rows_and_names_them(here):
    recipe = tunekit.plan(RECIPE, train_dataset=ROWS, eval_dataset=ROWS[:3]).recipe
    run = verbs.make_run(recipe)
    files = sorted((run.path / "inputs").iterdir())
    assert [file.name.partition("-")[0] for file in files] == ["eval_dataset", "train_dataset"]
    stored = run.recipe.data
    assert [stored.eval.path, stored.train.path] == [str(file.resolve()) for file in files]
    assert {(one.what, one.path) for one in fingerprints_of(run)} >= {
        ("data.train", stored.train.path),
        ("data.eval", stored.eval.path),
    }
    told = CliRunner().invoke(app, ["data", "cache"]).output
    assert "2 dataset files" in told
    clear_rows()
    assert [json.loads(line) for line in files[1].read_text().splitlines()] == ROWS
    # The same rows are the same run, by which `resume=True` finds it; others are another.
    assert is_same(tunekit.plan(RECIPE, train_dataset=ROWS, eval_dataset=ROWS[:3]).recipe, run)
    assert not is_same(tunekit.plan(RECIPE, train_dataset=ROWS[1:], eval_dataset=ROWS[:3]).recipe, run)
    # Its recipe makes a run of its own, that needs the first no more.
    again = verbs.make_run(run.recipe, ["output.dir=null", "output.name=again"])
    shutil.rmtree(run.path)
    assert [json.loads(line) for line in Path(again.recipe.data.train.path).read_text().splitlines()] == ROWS


@pytest.mark.parametrize("key", ["train", "eval"])
def test_rows_beside_those_that_the_recipe_names_are_refused(key):
    given = {f"{key}_dataset": ROWS}
    with pytest.raises(RecipeError) as caught:
        tunekit.plan("sft/quickstart", **given)
    assert str(caught.value) == (
        f"data.{key}: given as well as {key}_dataset; remove one; the override data.{key}=null unsets it"
    )
    plan = tunekit.plan("sft/quickstart", ["data.train=null", "data.eval=null"], train_dataset=ROWS, eval_dataset=ROWS)
    assert (plan.data.num_train, plan.data.num_eval) == (8, 8)


@pytest.mark.slow
def test_training_on_rows_is_repeated_to_the_last_bit_and_resumed(here):
    run = tunekit.train(RECIPE, train_dataset=ROWS)
    assert run.state == "finished"
    clear_rows()
    assert tunekit.rerun(run).agrees
    assert tunekit.resume(run, ["train.max_steps=3"]).status()["step"] == 3


@pytest.mark.slow
def test_a_detached_run_takes_rows_too(here):
    run = tunekit.start(RECIPE, train_dataset=ROWS)
    tunekit.stop(run)
    assert run.recipe.data.train.path == str(next((run.path / "inputs").iterdir()).resolve())


def test_the_largest_batch_for_rows_is_looked_for(here):
    first, *_ = tunekit.fit(RECIPE, "batch", train_dataset=ROWS)
    assert first.plan.data.num_train == 8


@pytest.mark.slow
def test_the_runs_of_a_sweep_train_on_rows(here):
    sweep = tunekit.sweep(RECIPE, {"train.learning_rate": [1e-4, 1e-3]}, train_dataset=ROWS, eval_dataset=ROWS[:2])
    runs = [run for _, run in runs_of(sweep)]
    assert [run.state for run in runs] == ["finished", "finished"]
    assert all(run.result()["eval_loss"] > 0 for run in runs)
    held = {Path(run.recipe.data.train.path).read_text() for run in runs}
    assert [[json.loads(line) for line in text.splitlines()] for text in held] == [ROWS]
