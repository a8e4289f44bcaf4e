"""Shipped recipes train: ten steps by their own settings, on a tiny model of their architecture and a few rows."""

import math

import pytest

import tunekit
from benchmarks.tiny_models import tiny_model
from tests.rows import save_rows
from tests.tiny import make_tokenizer
from tunekit.estimates.models.model_config import known_models
from tunekit.files import list_recipes
from tunekit.recipe.load import load_recipe
from tunekit.recipe.schema import Recipe

NUM_STEPS = 10


def architecture(recipe: Recipe) -> str:
    """The `model_type` of a recipe's model."""
    known = known_models().get(recipe.model.path)
    return "llama" if known is None else str(known.config["model_type"])


NAMES = [recipe.name for recipe in list_recipes()]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shipped")
    for model_type in sorted({architecture(load_recipe(name)) for name in NAMES}):
        tiny_model(model_type).save_pretrained(folder / model_type)
        make_tokenizer().save_pretrained(folder / model_type)
    for method in sorted({load_recipe(name).method.type for name in NAMES}):
        save_rows(folder / f"{method}.jsonl", method)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_trains_ten_steps(name, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    recipe = load_recipe(name)
    method = recipe.method.type
    changes = [f"model={architecture(recipe)}", f"data.train={method}.jsonl", "data.eval=null", "data.eval_size=null"]
    changes += ["data.max_length=64", "train.num_epochs=null", f"train.max_steps={NUM_STEPS}", "train.eval_steps=null"]
    changes += ["train.global_batch_size=8", "output.sample_prompts=[]"]
    if recipe.train.optimizer.startswith("paged"):  # what is paged lies in an accelerator's memory
        changes.append(f"train.optim={recipe.train.optimizer.removeprefix('paged_')}")
    if "max_completion_length" in type(recipe.method).model_fields:
        changes.append("method.max_completion_length=8")
    if dict(recipe.method).get("environment") is not None:  # The tiny model's template writes no calls.
        changes += ["model=pico", "data.max_length=192"]
    if method == "ebft":
        changes += ["data.format=null", "data.columns={}"]
    if method == "classification":
        changes.append("method.labels=[low, middle, high]")
    if method in ("distillation", "gkd", "gold"):
        changes.append(f"method.teacher={architecture(recipe)}")
    run = tunekit.train(name, changes)
    logged = [event for event in run.events() if event["event"] == "log"]
    assert [event["step"] for event in logged] == list(range(1, NUM_STEPS + 1))
    assert all(math.isfinite(event["loss"]) and math.isfinite(event["grad_norm"]) for event in logged)
    assert run.state == "finished"
    assert list(run.model_path.glob("*.safetensors"))
