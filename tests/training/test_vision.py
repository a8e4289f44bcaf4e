"""A model with a vision tower, that transformers loads as a causal language model, is trained on text."""

import pytest

import tunekit
from tests.tiny import save_chats, save_tiny_model_with_vision
from tests.training.engines import made, work_in
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_a_model_that_sees_learns_text(adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_model_with_vision(tmp_path / "model")
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n} it is") for n in range(32)))
    run = tunekit.train(
        {
            "model": "model",
            "data": {"train": "rows.jsonl", "max_length": 64},
            "adapter": {"type": adapter},
            "train": {"max_steps": 12, "global_batch_size": 8, "learning_rate": 1e-2},
            "output": {"sample_prompts": []},
        }
    )
    losses = run.metrics()["loss"].tolist()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("adapter", ["lora", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_it_learns_the_same_in_two_processes(strategy, adapter, tmp_path):
    save_tiny_model_with_vision(tmp_path / "model")
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n} it is") for n in range(16)))

    def recipe(**parallel):
        return {
            "model": str(tmp_path / "model"),
            "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64},
            "adapter": {"type": adapter},
            "train": {"max_steps": 3, "global_batch_size": 4, "micro_batch_size": 1, "learning_rate": 1e-3},
            "parallel": parallel,
            "output": {"sample_prompts": [], "dir": str(tmp_path / (strategy if parallel else "alone"))},
        }

    folder = made(recipe(num_processes=2, strategy=strategy))
    work_in(folder, 2)
    alone = tunekit.train(recipe()).metrics()["loss"].tolist()
    assert Run(folder).metrics()["loss"].tolist() == pytest.approx(alone, abs=1e-4)
