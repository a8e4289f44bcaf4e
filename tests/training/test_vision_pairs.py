"""Pairs with pictures are trained on as TRL's own trainer does with the model's processor."""

import json

import pytest
import torch

import tunekit
from tests.tiny import saved_weights
from tests.training.by_trl import PLAIN
from tests.training.engines import made, work_in, worked
from tests.vision import FAMILIES, as_trl, is_of_tower, save_pairs, save_tiny_vision_model
from tunekit.errors import DataError
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow

RATE, NUM_STEPS, BETA = 0.05, 3, 0.5


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def saved(request, tmp_path_factory):
    """A folder with the model of a family and pairs with pictures."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision_model(folder / "model", request.param)
    # Llama 3.2 Vision reads texts otherwise beside pictures, and TRL's collator wants a picture in every row of most.
    save_pairs(folder / "data", without=None)
    return folder


def recipe(saved, folder, **sections):
    train = {"max_steps": NUM_STEPS, "global_batch_size": 8, "micro_batch_size": 4, "optim": "sgd"}
    train |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 1e9, "learning_rate": RATE}
    return {
        "model": str(saved / "model"),
        "data": {"train": str(saved / "data" / "pairs.jsonl"), "max_length": 512},
        "method": {"type": "dpo", "beta": BETA} | sections.pop("method", {}),
        "train": train | sections.pop("train", {}),
        "output": {"dir": str(folder / "run"), "sample_prompts": []},
        **sections,
    }


def trained_by_trl(saved, folder):
    """Losses of the steps, and the model, by TRL alone."""
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in (saved / "data" / "pairs.jsonl").read_text().splitlines()]
    model = AutoModelForImageTextToText.from_pretrained(saved / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_of_tower(name))
    reference = AutoModelForImageTextToText.from_pretrained(saved / "model", dtype=torch.float32)
    trainer = DPOTrainer(
        model,
        reference,
        args=DPOConfig(
            str(folder),
            per_device_train_batch_size=8,
            max_steps=NUM_STEPS,
            learning_rate=RATE,
            max_length=None,
            beta=BETA,
            **PLAIN,
        ),
        train_dataset=Dataset.from_list(as_trl(rows, saved / "data", "chosen", "rejected")),
        processing_class=AutoProcessor.from_pretrained(saved / "model"),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


def trained_by_formula(saved):
    """Losses of the steps, and the model, by plain Transformers and the loss of arXiv 2305.18290."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(saved / "model")
    model, reference = (
        AutoModelForImageTextToText.from_pretrained(saved / "model", dtype=torch.float32) for _ in range(2)
    )
    trained = [parameter for name, parameter in model.named_parameters() if not is_of_tower(name)]
    optimizer = torch.optim.SGD(trained, lr=RATE)

    def log_probability(model, content, answer):
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [{"type": "image"} if "image" in part else part for part in content]
        asked = [{"role": "user", "content": parts}]
        start = processor.apply_chat_template(asked, add_generation_prompt=True)
        whole = [*asked, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        images = [Image.open(saved / "data" / part["image"]).convert("RGB") for part in content if "image" in part]
        text = processor.apply_chat_template(whole)
        given = {"images": [images] if images else None, "return_tensors": "pt", "add_special_tokens": False}
        inputs, num_asked = processor(text=[text], **given), processor(text=[start], **given)["input_ids"].shape[1]
        scores = model(**inputs).logits[0, num_asked - 1 : -1].log_softmax(-1)
        return scores.gather(1, inputs["input_ids"][0, num_asked:, None]).sum()

    losses = []
    for _ in range(NUM_STEPS):
        margins = []
        for line in (saved / "data" / "pairs.jsonl").read_text().splitlines():
            row = json.loads(line)
            content = row["prompt"][0]["content"]
            better, worse = (
                log_probability(model, content, row[name][0]["content"])
                - log_probability(reference, content, row[name][0]["content"]).detach()
                for name in ("chosen", "rejected")
            )
            margins.append(better - worse)
        loss = -torch.nn.functional.logsigmoid(BETA * torch.stack(margins)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


BY_FORMULA = {"mllama", "aya_vision"}
"""Types that TRL 1.16 trains otherwise. Its collator fails on Llama 3.2 Vision, and its fused head scales the logits of
Aya Vision by the `logit_scale` of the text decoder, which the model's own code does not (transformers 5.24)."""


def test_losses_and_weights_are_those_of_trl(saved, tmp_path):
    from transformers import AutoModelForImageTextToText

    run = tunekit.train(recipe(saved, tmp_path, adapter="full"))
    model_type = json.loads((saved / "model" / "config.json").read_text())["model_type"]
    by_formula = model_type in BY_FORMULA
    losses, theirs = trained_by_formula(saved) if by_formula else trained_by_trl(saved, tmp_path / "trl")
    assert run.metrics()["loss"].tolist() == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    before = dict(AutoModelForImageTextToText.from_pretrained(saved / "model").named_parameters())
    ours = dict(AutoModelForImageTextToText.from_pretrained(run.model_path).named_parameters())
    moved = {name: (weight - before[name]).detach() for name, weight in theirs.named_parameters()}
    largest = max(float(change.abs().max()) for change in moved.values())
    assert largest > 0
    for name, change in moved.items():
        torch.testing.assert_close((ours[name] - before[name]).detach(), change, rtol=0, atol=2e-3 * largest, msg=name)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_tiny_vision_model(folder / "model", "llava")
    save_pairs(folder / "data")
    return folder


def test_rows_without_pictures_mix_with_them(llava, tmp_path):
    losses = tunekit.train(recipe(llava, tmp_path, adapter="full")).metrics()["loss"].tolist()
    expected, _ = trained_by_formula(llava)
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_precomputed_reference_gives_the_same_losses(llava, tmp_path):
    sections = {"adapter": {"type": "lora", "rank": 4}}
    both = [
        tunekit.train(recipe(llava, tmp_path / str(early), method={"precompute_ref_log_probs": early}, **sections))
        for early in (False, True)
    ]
    losses, early = (run.metrics()["loss"].tolist() for run in both)
    assert losses[0] == pytest.approx(0.693147, rel=1e-4)
    assert losses[-1] < losses[0]
    assert early == pytest.approx(losses, rel=1e-5)


def test_pairs_too_long_are_left_out_whole(llava, tmp_path):
    wanted = recipe(llava, tmp_path, adapter="full")
    wanted["data"]["max_length"] = 20
    with pytest.raises(DataError, match="none of 8 rows is short enough: limit 20 tokens"):
        tunekit.train(wanted)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(strategy, llava, tmp_path):
    train = {"optim": "adamw_torch", "learning_rate": 1e-2, "micro_batch_size": 2}
    one = made(recipe(llava, tmp_path / "one", train=train, adapter="full"))
    worked(one)
    parallel = {"strategy": strategy, "num_processes": 2}
    two = made(recipe(llava, tmp_path / "two", train=train, adapter="full", parallel=parallel))
    work_in(two, 2)
    losses = [[event["loss"] for event in Run(path).events() if event["event"] == "log"] for path in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    torch.testing.assert_close(
        saved_weights(Run(two).model_path), saved_weights(Run(one).model_path), atol=1e-4, rtol=0
    )


def test_a_resumed_run_ends_with_the_bits_of_one_that_went_through(llava, tmp_path):
    sections = {"adapter": {"type": "lora", "rank": 4}}
    whole = tunekit.train(recipe(llava, tmp_path / "whole", train={"max_steps": 4}, **sections))
    part = tunekit.train(recipe(llava, tmp_path / "part", train={"max_steps": 2}, **sections))
    resumed = tunekit.resume(part, ["train.max_steps=4"])
    after, before = saved_weights(resumed.model_path), saved_weights(whole.model_path)
    assert all(torch.equal(after[name], before[name]) for name in before)
