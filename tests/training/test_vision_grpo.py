"""GRPO and RLOO on prompts with pictures: rewards see them, and the gradient is that of plain Transformers."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import tunekit
from tests.tiny import saved_weights
from tests.training.engines import made, work_in
from tests.vision import FAMILIES, is_of_tower, save_rows, save_tiny_vision_model, tiny_vision_model
from tunekit.errors import DataError, PlanError
from tunekit.methods.generation import _keep_unpadded
from tunekit.runs.run import Run

RATE, NUM_TOKENS, GROUP = 0.01, 6, 4
REWARD = """
import json
from pathlib import Path

def judge(prompts, completions, images, completion_ids, name, **columns):
    kinds = [[part["type"] for message in prompt for part in message["content"]] for prompt in prompts]
    rewards = [float(sum(ids) % 97) / 97 for ids in completion_ids]
    lines = [
        json.dumps({"name": n, "kinds": k, "sizes": [list(picture.size) for picture in own], "ids": list(map(int, ids)),
                    "reward": reward})
        for n, k, own, ids, reward in zip(name, kinds, images, completion_ids, rewards)
    ]
    with Path(__file__).with_name("judged.jsonl").open("a") as file:
        file.write("\\n".join(lines) + "\\n")
    return rewards
"""


@pytest.fixture(params=sorted(FAMILIES.keys() - {"mllama", "ovis2"}))
def saved(request, tmp_path, monkeypatch):
    """A folder with a model, prompts with pictures and a module of rewards."""
    save_tiny_vision_model(tmp_path / "model", request.param)
    rows = [json.loads(line) for line in save_rows(tmp_path / "data", 2, without=None).read_text().splitlines()]
    lines = [json.dumps({"prompt": row["messages"][:1], "name": f"{i}.png"}) for i, row in enumerate(rows)]
    (tmp_path / "data" / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "picture_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("picture_rewards", None)


def recipe(saved, method="grpo", **sections):
    train = {"max_steps": 1, "global_batch_size": 2 * GROUP, "micro_batch_size": 2 * GROUP, "optim": "sgd"}
    train |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 1e9, "learning_rate": RATE}
    own = {"loss_type": "grpo"} if method == "grpo" else {}
    rewards = {"rewards": ["picture_rewards:judge"], "num_generations": GROUP, "max_completion_length": NUM_TOKENS}
    return {
        "model": str(saved / "model"),
        "data": {"train": str(saved / "data" / "prompts.jsonl"), "max_length": 256},
        "method": {"type": method, **rewards, **own},
        "adapter": "full",
        "train": train,
        "output": {"dir": str(saved / "run"), "sample_prompts": []},
        **sections,
    }


def expected_changes(saved, judged, method):
    """Changes of weights by one step of gradient descent, without the KL term, which is 0 before the first.

    GRPO's loss (arXiv 2402.03300) is a mean over the tokens of an answer, RLOO's (arXiv 2402.14740) their sum.
    """
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(saved / "model")
    model = AutoModelForImageTextToText.from_pretrained(saved / "model", dtype=torch.float32)
    rows = {row["name"]: row for row in map(json.loads, (saved / "data" / "prompts.jsonl").read_text().splitlines())}
    loss = torch.zeros(())
    for name, row in rows.items():
        own = [line for line in judged if line["name"] == name]
        assert len(own) == GROUP
        rewards = torch.tensor([line["reward"] for line in own])
        advantages = rewards - (rewards.sum() - rewards) / (GROUP - 1)
        if method == "grpo":
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        parts = [{"type": "image"} if "image" in part else part for part in row["prompt"][0]["content"]]
        text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        image = Image.open(saved / "data" / name).convert("RGB")
        for line, advantage in zip(own, advantages, strict=True):
            inputs = processor(text=[text], images=[[image]], return_tensors="pt", add_special_tokens=False)
            asked, ids = inputs.pop("input_ids"), torch.tensor([line["ids"]])
            mask = torch.ones(1, asked.shape[1] + ids.shape[1], dtype=torch.long)
            inputs |= {"input_ids": torch.cat([asked, ids], 1), "attention_mask": mask}
            for kind in ("token_type_ids", "mm_token_type_ids"):
                if kind in inputs:
                    inputs[kind] = torch.nn.functional.pad(inputs[kind], (0, ids.shape[1]))
            scores = model(**inputs).logits[0, asked.shape[1] - 1 : -1].log_softmax(-1)
            chosen = scores.gather(1, ids.T)
            loss = loss - advantage * (chosen.mean() if method == "grpo" else chosen.sum()) / (GROUP * len(rows))
    loss.backward()
    return {name: -RATE * p.grad for name, p in model.named_parameters() if p.grad is not None}, model


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_rewards_see_the_pictures_and_the_step_is_that_of_plain_transformers(method, saved):
    from transformers import AutoModelForImageTextToText

    run = tunekit.train(recipe(saved, method))
    judged, prompts = (
        [json.loads(line) for line in (saved / file).read_text().splitlines()]
        for file in ("judged.jsonl", "data/prompts.jsonl")
    )
    from PIL import Image

    kinds = {row["name"]: [part["type"] for part in row["prompt"][0]["content"]] for row in prompts}
    for line in judged:
        assert line["kinds"] == kinds[line["name"]]
        assert line["sizes"] == [list(Image.open(saved / "data" / line["name"]).size)]
    assert len({line["reward"] for line in judged}) > 2
    changes, before = expected_changes(saved, judged, method)
    after = dict(AutoModelForImageTextToText.from_pretrained(run.model_path).named_parameters())
    largest = max(float(change.abs().max()) for change in changes.values())
    for name, weight in before.named_parameters():
        moved = (after[name] - weight).detach()
        if is_of_tower(name):
            assert not moved.any(), name
        else:
            torch.testing.assert_close(moved, changes[name], rtol=0, atol=2e-3 * largest, msg=name)


REFUSED = {
    "mllama": "GRPOTrainer does not pass aspect_ratio_ids, aspect_ratio_mask, cross_attention_mask to the model",
    "ovis2": "GRPOTrainer needs lists of tokens, which the processor of .*model does not return: 'list' object",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(REFUSED))
def test_models_that_trl_does_not_give_all_of_their_pictures_are_refused(family, tmp_path):
    save_tiny_vision_model(tmp_path / "model", family)
    row = json.loads(save_rows(tmp_path / "data", 1, without=None).read_text())
    line = json.dumps({"prompt": row["messages"][:1], "answer": "red"}) + "\n"
    (tmp_path / "data" / "prompts.jsonl").write_text(2 * line)
    wanted = recipe(tmp_path)
    wanted["method"]["rewards"] = ["exact_match"]
    with pytest.raises(DataError, match=REFUSED[family]):
        tunekit.train(wanted)


@pytest.mark.slow
def test_prompts_without_pictures_beside_others_are_refused(llava):
    lines = (llava / "data" / "prompts.jsonl").read_text().splitlines()
    bare = json.dumps({"prompt": [{"role": "user", "content": "say hi"}], "answer": "hi"})
    (llava / "data" / "prompts.jsonl").write_text("\n".join([*lines, bare]) + "\n")
    with pytest.raises(DataError, match=r"prompts\.jsonl:5: a prompt without images, but other prompts have images"):
        tunekit.train(with_lengths(llava))


def test_vllm_is_refused_for_prompts_with_pictures(saved):
    wanted = recipe(saved)
    wanted["method"]["generation"] = {"use_vllm": True}
    with pytest.raises(
        PlanError, match=r"method.generation.use_vllm: (unsupported for rows with images|vLLM loads the talker)"
    ):
        tunekit.plan(wanted, on="1xh100")


@pytest.fixture
def llava(tmp_path):
    save_tiny_vision_model(tmp_path / "model", "llava")
    rows = [json.loads(line) for line in save_rows(tmp_path / "data", 4, without=None).read_text().splitlines()]
    lines = [json.dumps({"prompt": row["messages"][:1], "answer": "red"}) for row in rows]
    (tmp_path / "data" / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def with_lengths(folder, **sections):
    """Steps whose rewards differ by the letters of an answer."""
    wanted = recipe(folder, **sections)
    wanted["method"]["rewards"] = [{"type": "regex", "pattern": "[a-m]", "where": "search"}]
    wanted["train"] |= {"max_steps": 4, "learning_rate": 0.1, "micro_batch_size": GROUP}
    return wanted


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_bits_of_one_that_went_through(llava, tmp_path):
    whole = tunekit.train({**with_lengths(llava), "output": {"dir": str(tmp_path / "whole"), "sample_prompts": []}})
    wanted = {**with_lengths(llava), "output": {"dir": str(tmp_path / "part"), "sample_prompts": []}}
    wanted["train"] |= {"max_steps": 2}
    resumed = tunekit.resume(tunekit.train(wanted), ["train.max_steps=4"])
    after, before = saved_weights(resumed.model_path), saved_weights(whole.model_path)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert resumed.metrics()["reward"].nunique() > 1


@pytest.mark.slow
def test_two_processes_generate_from_pictures_and_learn(llava, tmp_path):
    path = made({**with_lengths(llava), "parallel": {"strategy": "ddp", "num_processes": 2}})
    work_in(path, 2)
    logs = [event for event in Run(path).events() if event["event"] == "log"]
    assert len(logs) == 4
    assert any(event["grad_norm"] > 0 for event in logs)


def test_prompts_are_left_unpadded_by_a_processor_that_pads():
    from PIL import Image

    processor = tiny_vision_model("aya_vision")[1]
    picture = {"type": "image", "image": Image.new("RGB", (28, 28))}
    prompts = [[{"role": "user", "content": [picture, {"type": "text", "text": text}]}] for text in ("hi", "hello")]
    given = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    trainer = SimpleNamespace(chat_template_kwargs={"processor_kwargs": {"add_special_tokens": False}})
    padded = processor.apply_chat_template(prompts, **given)["input_ids"]
    _keep_unpadded(trainer)
    ids = processor.apply_chat_template(prompts, **given, **trainer.chat_template_kwargs)["input_ids"]
    assert [len(row) for row in padded] == [len(ids[1])] * 2
    assert len(ids[1]) == len(ids[0]) + 3
    assert padded[0][3:] == ids[0]
    assert trainer.chat_template_kwargs["processor_kwargs"] == {"add_special_tokens": False, "padding": False}
