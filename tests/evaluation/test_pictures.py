"""Evaluation on rows with pictures: losses are those of the trainer and of plain Transformers, answers see pictures."""

import json

import pytest
import torch

import tunekit
from tests.training.test_vision import loss_of
from tests.vision import save_rows, save_tiny_vision_model
from tunekit.errors import DataError, ModelError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a tiny LLaVA that is evaluated on its own rows."""
    folder = tmp_path_factory.mktemp("pictures")
    save_tiny_vision_model(folder / "model", "llava")
    rows = str(save_rows(folder / "data"))
    return tunekit.train(
        {
            "model": str(folder / "model"),
            "data": {"train": rows, "eval": rows, "max_length": 512},
            "adapter": {"type": "lora", "rank": 4},
            "train": {"max_steps": 4, "global_batch_size": 4, "learning_rate": 1e-2, "eval_steps": 4},
            "output": {"dir": str(folder / "run"), "sample_prompts": []},
        }
    )


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


def test_metrics_judge_answers_that_see_the_pictures(run, tmp_path):
    rows = run.path.parent / "data" / "rows.jsonl"
    tunekit.generate(run, rows, tmp_path / "out.jsonl", max_new_tokens=6, device="cpu")
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    options = {"data": str(rows), "metrics": ["exact_match"], "max_new_tokens": 6, "before": False, "device": "cpu"}
    scores = {score.name: score for score in tunekit.evaluate(run, **options).scores}
    mean = sum(answer["num_tokens"] for answer in answers) / len(answers)
    assert scores["completions/mean_length"].after.value == pytest.approx(mean)


def test_a_model_of_texts_is_not_evaluated_on_pictures(run):
    folder = run.path.parent / "data"
    with pytest.raises(DataError, match="only text is supported"):
        tunekit.evaluate("pico", data=str(folder / "rows.jsonl"), device="cpu")
    (folder / "metadata.csv").write_text("file_name,text\n0.png,a picture\n")
    with pytest.raises(ModelError, match="is a text-only model"):
        tunekit.evaluate("pico", data=str(folder / "metadata.csv"), device="cpu")
