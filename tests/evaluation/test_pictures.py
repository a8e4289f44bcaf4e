"""Evaluation on rows with pictures: losses are those of the trainer and of plain Transformers, answers see pictures."""

import json

import pytest
import torch

import tunekit
from tests.training.engines import made
from tests.training.test_vision import loss_of
from tests.vision import save_rows, save_tiny_vision_model
from tunekit.data.prepare import read_dataset
from tunekit.errors import DataError, ModelError
from tunekit.evaluation.tasks import Wish, parts_of_run
from tunekit.inference.inference_model import Trained
from tunekit.models.load import load_tokenizer
from tunekit.runs.prepared_data import FILES
from tunekit.runs.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny LLaVA and rows with pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    save_tiny_vision_model(folder / "model", "llava")
    save_rows(folder / "data")
    return folder


def recipe(folder, name):
    rows = str(folder / "data" / "rows.jsonl")
    return {
        "model": str(folder / "model"),
        "data": {"train": rows, "eval": rows, "max_length": 512},
        "adapter": {"type": "lora", "rank": 4},
        "train": {"max_steps": 4, "global_batch_size": 4, "learning_rate": 1e-2, "eval_steps": 4},
        "output": {"dir": str(folder / name), "sample_prompts": []},
    }


@pytest.fixture(scope="module")
def run(folder):
    """A run of the model that is evaluated on its own rows."""
    return tunekit.train(recipe(folder, "run"))


def test_held_out_rows_keep_their_pictures(folder):
    run = Run(made(recipe(folder, "untrained")))
    model = Trained("run", run.recipe.model, None, run.recipe.model.path, run)
    wish = Wish(limit=3, max_new_tokens=None, temperature=0.0, seed=0, batch_size=1, device="cpu")
    part = parts_of_run(model, load_tokenizer(run.recipe.model), [], wish)
    stored = read_dataset(run.path / "data" / FILES["eval"])["media"][:3]
    assert any(stored) and [row.media for row in part.rows] == stored


@pytest.mark.slow
def test_the_loss_on_held_out_rows_is_that_of_the_trainer_and_of_transformers(run):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = run.path.parent
    scores = {score.name: score for score in tunekit.evaluate(run, device="cpu").scores}
    of_trainer = [event["eval_loss"] for event in run.events() if "eval_loss" in event]
    assert scores["loss"].after.value == pytest.approx(of_trainer[-1], rel=1e-5)
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = loss_of(model, AutoProcessor.from_pretrained(folder / "model"), folder).item()
    assert scores["loss"].before.value == pytest.approx(expected, rel=1e-5)
    of_file = tunekit.evaluate(run, data=str(folder / "data" / "rows.jsonl"), device="cpu")
    assert of_file.scores[0].after.value == pytest.approx(scores["loss"].after.value, rel=1e-6)
    few = tunekit.evaluate(run, limit=3, before=False, device="cpu")
    assert few.scores[0].num_rows == 3


@pytest.mark.slow
def test_metrics_judge_answers_that_see_the_pictures(run, tmp_path):
    rows = run.path.parent / "data" / "rows.jsonl"
    tunekit.generate(run, rows, tmp_path / "out.jsonl", max_new_tokens=6, device="cpu")
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    options = {"data": str(rows), "metrics": ["exact_match"], "max_new_tokens": 6, "before": False, "device": "cpu"}
    scores = {score.name: score for score in tunekit.evaluate(run, **options).scores}
    mean = sum(answer["num_tokens"] for answer in answers) / len(answers)
    assert scores["completions/mean_length"].after.value == pytest.approx(mean)


@pytest.mark.slow
def test_a_model_of_texts_is_not_evaluated_on_pictures(run):
    folder = run.path.parent / "data"
    with pytest.raises(DataError, match="only text is supported"):
        tunekit.evaluate("pico", data=str(folder / "rows.jsonl"), device="cpu")
    (folder / "metadata.csv").write_text("file_name,text\n0.png,a picture\n")
    with pytest.raises(ModelError, match="is a text-only model"):
        tunekit.evaluate("pico", data=str(folder / "metadata.csv"), device="cpu")
