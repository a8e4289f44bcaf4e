"""Full fine-tuning resumes where the hub's names of weights are not those of the model's modules."""

import json

import pytest
import torch
from safetensors import safe_open

import tunekit
from tests.tiny import save_tiny_model_like, saved_weights
from tests.training.engines import made, worked
from tests.vision import save_tiny_vision_model
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow


@pytest.fixture(params=["llava", "gemma3", "qwen3_moe"])
def saved(request, tmp_path):
    """A folder with a model whose saved weights have other names than its parameters, and chats."""
    if request.param == "qwen3_moe":
        save_tiny_model_like(tmp_path / "model", request.param)
    else:
        save_tiny_vision_model(tmp_path / "model", request.param)
    chats = [
        [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]
        for word in ("red", "green", "blue", "yellow") * 2
    ]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def recipe(saved, name, **sections):
    train = {"global_batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-2, "max_steps": 4, "save_steps": 2}
    return {
        "model": str(saved / "model"),
        "data": {"train": str(saved / "chats.jsonl"), "max_length": 64},
        "adapter": "full",
        "train": {**train, "lr_scheduler_type": "constant", "warmup_steps": 0} | sections.pop("train", {}),
        "output": {"dir": str(saved / name), "sample_prompts": []},
        **sections,
    }


def assert_other_names(folder, model):
    """The saved names are not the modules': else the test would show nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        own = set(auto.from_config(config).state_dict())
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) - own


def test_a_resumed_run_ends_with_the_bits_of_one_that_went_through(saved):
    whole = tunekit.train(recipe(saved, "whole"))
    part = tunekit.train(recipe(saved, "part", train={"max_steps": 2}))
    assert_other_names(part.path / "checkpoints" / "checkpoint-2", saved / "model")
    resumed = tunekit.resume(part, ["train.max_steps=4"])
    after, before = saved_weights(resumed.model_path), saved_weights(whole.model_path)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_weights_alone_are_those_of_the_checkpoint(saved):
    sgd = {"optim": "sgd", "learning_rate": 0.1}
    run = tunekit.train(recipe(saved, "whole", train=sgd | {"max_steps": 2}))
    tunekit.resume(run, from_="2", weights_only=True)
    losses = [event["loss"] for event in run.events() if event["event"] == "log"]
    # Two steps twice, on the same rows.
    assert len(losses) == 4
    assert losses[2] < losses[0] - 1e-4


def test_a_checkpoint_of_one_process_is_resumed_in_two_with_fsdp2(saved):
    whole = made(recipe(saved, "whole"))
    worked(whole)
    part = tunekit.train(recipe(saved, "part", train={"max_steps": 2}))
    parallel = ["parallel.strategy=fsdp2", "parallel.num_processes=2", "train.max_steps=4"]
    tunekit.resume(part, parallel)
    torch.testing.assert_close(saved_weights(part.model_path), saved_weights(Run(whole).model_path), atol=2e-3, rtol=0)
