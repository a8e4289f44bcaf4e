"""Callbacks of the user's own: found, called by a real run, and named where they raise."""

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

import tunekit
from tests.tiny import save_chats
from tunekit.errors import RecipeError, RunError
from tunekit.recipe.load import load_recipe
from tunekit.training.own_callbacks import EVENTS, OwnCallback

CODE = """
from transformers import TrainerCallback

class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        with open("steps.txt", "a") as file:
            print(state.global_step, model is not None, file=file)
        control.should_training_stop = state.global_step == 2

def raises():
    class Raises(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            raise ValueError(f"loss {logs['loss']:.0f}")
    return Raises()

def number():
    return 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_callbacks.py").write_text(CODE)
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(8)))
    return tmp_path


def recipe(*names):
    return {
        "model": "pico",
        "data": {"train": "rows.jsonl", "max_length": 64},
        "train": {"max_steps": 4, "global_batch_size": 4, "callbacks": [f"my_callbacks:{name}" for name in names]},
        "output": {"sample_prompts": [], "dir": "run"},
    }


def test_every_event_of_a_trainer_reaches_a_callback(here):
    callback = OwnCallback("my_callbacks:Stops")
    assert set(EVENTS) == {name for name in dir(TrainerCallback) if name.startswith("on_")}
    control = TrainerControl()
    callback.on_step_end(None, TrainerState(global_step=2), control)
    assert control.should_training_stop
    assert (here / "steps.txt").read_text() == "2 False\n"


def test_an_event_that_raises_is_named_with_its_place(here):
    callback = OwnCallback("my_callbacks:raises")
    words = r"my_callbacks:raises\.on_log raised ValueError: loss 3 \(.*my_callbacks\.py:13\)"
    with pytest.raises(RunError, match=words):
        callback.on_log(None, None, None, logs={"loss": 3.0})


def test_what_is_no_callback_is_refused(here):
    with pytest.raises(RunError, match="my_callbacks:number returned int, not a TrainerCallback"):
        OwnCallback("my_callbacks:number")


def test_a_callback_that_is_not_there_is_found_out_when_the_recipe_is_read(here):
    (here / "recipe.yaml").write_text(
        "model: pico\ndata: {train: rows.jsonl}\ntrain: {callbacks: [my_callbacks:Stop]}\n"
    )
    with pytest.raises(
        RecipeError, match=r"recipe\.yaml:3:21: train\.callbacks\[0\]: module 'my_callbacks' has no function 'Stop'"
    ):
        load_recipe("recipe.yaml")


@pytest.mark.slow
def test_a_run_calls_it_and_stops_where_it_says(here):
    run = tunekit.train(recipe("Stops"))
    assert (run.state, run.status()["step"]) == ("finished", 2)
    assert (here / "steps.txt").read_text() == "1 True\n2 True\n"
    with pytest.raises(RunError, match="raised ValueError"):
        tunekit.train({**recipe("raises"), "output": {"sample_prompts": [], "dir": "other"}})
