"""A part of a model is trained as it is in the whole one, and nothing else changes."""

import os

import pytest
import torch

from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.test_resume import CUT, SAVED, STEPS, cut_off
from tunekit.estimates.memory.states import states_bytes
from tunekit.runs.run import Run

LAST = {"type": "full", "last_layers": 1}
GATES = {"type": "full", "unfrozen_parameters": [r"layers\.1\.mlp\.gate_proj", r"norm\.weight$"]}
PARTS = {"last layer": LAST, "gates and norms": GATES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("part")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


def recipe_for(folder, adapter, train=None, model=None, **parallel):
    return {
        "model": {"path": str(folder / "model"), **(model or {})},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": adapter,
        "train": {
            "max_steps": STEPS,
            "global_batch_size": 8,
            "learning_rate": 1e-3,
            "save_steps": SAVED,
            **(train or {}),
        },
        "parallel": parallel,
        "output": {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())},
    }


def trained(folder, *args, **kwargs):
    run = Run(made(recipe_for(folder, *args, **kwargs)))
    worked(run.path)
    return run


def is_trained(name, adapter):
    gate_or_norm = name == "model.layers.1.mlp.gate_proj.weight" or name.endswith("norm.weight")
    return ".layers.1." in name if adapter is LAST else gate_or_norm


ONE_STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 1e6}


@pytest.fixture(scope="module")
def whole(folder):
    """One step of gradient descent on all parameters."""
    return saved_weights(trained(folder, "full", {**ONE_STEP, "warmup_steps": 0}).model_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("kernels", ["torch", "tunekit"])
@pytest.mark.parametrize("adapter", PARTS.values(), ids=PARTS)
def test_a_step_changes_the_part_as_a_step_on_the_whole_does_and_nothing_else(
    adapter, kernels, checkpointing, folder, whole
):
    asked = {**ONE_STEP, "warmup_steps": 0, "gradient_checkpointing": checkpointing}
    result = saved_weights(trained(folder, adapter, asked, {"kernels": kernels}).model_path)
    before = saved_weights(folder / "model")
    assert result.keys() == before.keys()
    for name, value in result.items():
        if is_trained(name, adapter):
            assert not torch.equal(value, before[name]), name
            torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-6)
        else:
            assert torch.equal(value, before[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("adapter", PARTS.values(), ids=PARTS)
def test_a_run_holds_the_bytes_of_its_part(adapter, folder):
    result = trained(folder, adapter).result()
    tensors = {name: value.shape for name, value in saved_weights(folder / "model").items()}
    part = {name: shape for name, shape in tensors.items() if is_trained(name, adapter)}
    size = sum(shape.numel() for shape in part.values())
    assert result["held_bytes"]["weights"] == 4 * sum(shape.numel() for shape in tensors.values())
    assert result["held_bytes"]["gradients"] == 4 * size
    assert result["held_bytes"]["optimizer"] == 8 * size + 4 * len(part) == states_bytes(part, "adamw_torch_fused")


@pytest.mark.slow
def test_a_run_on_a_part_that_was_cut_off_goes_on_exactly(folder):
    alone = trained(folder, LAST)
    run = Run(made(recipe_for(folder, LAST)))
    in_processes(1, cut_off, run.path)
    worked(run.path)
    assert CUT > SAVED
    expected = saved_weights(alone.model_path)
    assert all(torch.equal(value, expected[name]) for name, value in saved_weights(run.model_path).items())


@pytest.mark.slow
@pytest.mark.parametrize("adapter", PARTS.values(), ids=PARTS)
def test_two_processes_train_a_part_as_one_does(adapter, folder):
    alone = saved_weights(trained(folder, adapter).model_path)
    run = Run(made(recipe_for(folder, adapter, num_processes=2, strategy="ddp")))
    work_in(run.path, 2)
    torch.testing.assert_close(saved_weights(run.model_path), alone, rtol=0, atol=1e-5)
