"""Prompts of rows with pictures are answered before and after training as plain Transformers answers them."""

import json

import pytest
import torch

import tunekit
from tests.training.engines import made, work_in
from tests.vision import FAMILIES, save_rows, save_tiny_vision_model
from tunekit.runs.run import Run
from tunekit.training.samples import SAMPLE_TOKENS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def saved(request, tmp_path_factory):
    """A folder with the model of a family and rows of pictures."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision_model(folder / "model", request.param)
    save_rows(folder / "data", 4, without=None if request.param == "mllama" else 1)
    return folder


def recipe(saved, folder, **sections):
    train = {"max_steps": 1, "global_batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-2}
    return {
        "model": str(saved / "model"),
        "data": {"train": str(saved / "data" / "rows.jsonl"), "max_length": 512},
        "train": train,
        "output": {"dir": str(folder / "run")},
        **sections,
    }


def answers(saved, path):
    """Greedy answers to the first three rows by a model, each by itself, with the words of the prompts."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(saved / "model")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    for line in (saved / "data" / "rows.jsonl").read_text().splitlines()[:3]:
        content = json.loads(line)["messages"][0]["content"]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [{"type": "image"} if "image" in part else part for part in content]
        text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        images = [Image.open(saved / "data" / part["image"]).convert("RGB") for part in content if "image" in part]
        given = {"images": [images] if images else None, "return_tensors": "pt", "add_special_tokens": False}
        inputs = processor(text=[text], **given)
        ids = model.generate(**inputs, max_new_tokens=SAMPLE_TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        words = "".join(part.get("text", f"[image {part.get('image')}] ") for part in content)
        yield words, processor.tokenizer.decode(ids, skip_special_tokens=True).strip()


def samples_of(run, when):
    return [(sample["prompt"], sample[when]) for sample in run.samples()]


def test_answers_before_and_after_are_those_of_plain_transformers(saved, tmp_path):
    run = tunekit.train(recipe(saved, tmp_path, adapter="full"))
    before, after = ([*answers(saved, path)] for path in (saved / "model", run.model_path))
    assert samples_of(run, "before") == before
    assert samples_of(run, "after") == after
    pictures = [sample["pictures"] for sample in run.samples() if "pictures" in sample]
    assert [len(digests) for digests in pictures] == [1] * sum("[image" in words for words, _ in before)
    assert len(run.thumbnails(digest for digests in pictures for digest in digests)) == len(pictures)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_answer_as_one(strategy, tmp_path):
    save_tiny_vision_model(tmp_path / "model", "llava")
    save_rows(tmp_path / "data", 4, without=1)
    parallel = {"strategy": strategy, "num_processes": 2}
    run = Run(made(recipe(tmp_path, tmp_path, adapter="full", parallel=parallel)))
    work_in(run.path, 2)
    assert samples_of(run, "before") == [*answers(tmp_path, tmp_path / "model")]
    assert samples_of(run, "after") == [*answers(tmp_path, run.model_path)]
