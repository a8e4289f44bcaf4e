"""Losses and norms of two processes are the recorded ones, whatever divides them; those of one are in `tests/smoke`."""

from pathlib import Path

import pytest

from tests.photographs.losses import check_losses
from tests.tiny import save_chats, save_tiny_model
from tests.training.engines import made, work_in
from tunekit.runs.run import Run

STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}" * (1 + n % 3), f"{2 * n}") for n in range(20)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_have_the_recorded_losses(strategy: str, adapter: str, folder: Path) -> None:
    recipe = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": adapter,
        "train": {"max_steps": 3, "global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-2},
        "parallel": {"strategy": strategy, "num_processes": 2},
        "output": {"dir": str(folder / f"{strategy}-{adapter}"), "sample_prompts": []},
    }
    run = Run(made(recipe))
    work_in(run.path, 2)
    check_losses(f"sft-{adapter}-{strategy}", run)
