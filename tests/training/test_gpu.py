"""The same runs on an accelerator."""

import pytest

import tunekit
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_quickstart_learns_on_an_accelerator(adapter, tmp_path):
    run = tunekit.train("sft/quickstart", [f"adapter.type={adapter}", f"output.dir={tmp_path / 'run'}"])
    plan, result = run.plan, run.result()
    assert plan.device.kind == "cuda"
    assert plan.autocast == (plan.dtype != "float32")
    assert result["eval_loss"] < 0.2 * result["first_eval_loss"]
    assert 0 < result["ranks"][0]["forward_seconds"] < result["step_seconds"]
    assert (result["mfu"] is None) == (plan.speed.peak_flops_per_second is None)
    assert 0 < result["peak_memory_bytes"] < plan.device.memory_total_bytes
    assert sum(result["held_bytes"].values()) < result["peak_allocated_bytes"] <= result["peak_reserved_bytes"]


@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_rows_one_behind_the_other_have_the_losses_of_padded_ones_on_an_accelerator(adapter, tmp_path):
    losses = []
    for padding_free in ("false", "true"):
        overrides = ["train.max_steps=4", "train.global_batch_size=16", "train.micro_batch_size=4"]
        overrides += ["model.dtype=float32", f"data.padding_free={padding_free}", f"adapter.type={adapter}"]
        run = tunekit.train("sft/quickstart", [*overrides, f"output.dir={tmp_path / padding_free}"])
        assert run.plan.padding_free == (padding_free == "true")
        losses.append(run.metrics()["loss"].dropna().tolist())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_packing_on_an_accelerator_keeps_the_loss_of_the_first_step(adapter, tmp_path):
    """One batch of all rows, in float32: packed or padded, the mean over the same tokens is the same."""
    losses = []
    for packing in ("false", "true"):
        overrides = ["train.max_steps=1", "train.global_batch_size=800", "train.micro_batch_size=8"]
        if packing == "true":
            overrides = ["train.max_steps=1", "train.global_batch_size=800", "train.micro_batch_size=4"]
        overrides += ["model.dtype=float32", f"data.packing={packing}", f"adapter.type={adapter}"]
        run = tunekit.train("sft/quickstart", [*overrides, f"output.dir={tmp_path / packing}"])
        losses.append(run.metrics()["loss"].dropna().iloc[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_the_peak_on_an_accelerator_is_what_was_planned(adapter, checkpointing, tmp_path):
    """With rows as long as planned: tensors within 5 % of the plan, and what the allocator reserved within 10 %."""
    save_tiny_model(tmp_path / "model", hidden=2048, layers=8)
    rows = "\n\n\n".join("the sea is wide and the boat is small. " * 64 for _ in range(64))
    (tmp_path / "rows.txt").write_text(rows, encoding="utf-8")
    recipe = {
        "model": str(tmp_path / "model"),
        "data": {"train": str(tmp_path / "rows.txt"), "max_length": 256},
        "adapter": adapter,
        "train": {"max_steps": 4, "global_batch_size": 32, "micro_batch_size": 16},
        "output": {"dir": str(tmp_path / "run"), "sample_prompts": []},
    }
    run = tunekit.train(recipe, [f"train.gradient_checkpointing={checkpointing}"])
    memory, result = run.plan.memory, run.result()
    assert result["peak_allocated_bytes"] == pytest.approx(memory.tensor_bytes, rel=0.05)
    reserve = memory.parts["reserve"]
    assert result["peak_reserved_bytes"] == pytest.approx(memory.tensor_bytes + reserve, rel=0.10)


def test_offloaded_activations_and_tiled_mlps_keep_losses_and_need_no_more_than_planned(tmp_path):
    save_tiny_model(tmp_path / "model", hidden=1024, layers=16, positions=4096)
    rows = "\n\n\n".join("the sea is wide and the boat is small. " * 512 for _ in range(16))
    (tmp_path / "rows.txt").write_text(rows, encoding="utf-8")
    runs = []
    for saves in ("false", "true"):
        recipe = {
            "model": str(tmp_path / "model"),
            "data": {"train": str(tmp_path / "rows.txt"), "max_length": 4096},
            "adapter": "lora",
            "train": {"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 4, "gradient_checkpointing": True},
            "output": {"dir": str(tmp_path / saves), "sample_prompts": []},
        }
        runs.append(tunekit.train(recipe, [f"train.activation_offloading={saves}", f"train.tiled_mlp={saves}"]))
    without, run = runs
    assert run.metrics()["loss"].tolist() == pytest.approx(without.metrics()["loss"].tolist(), rel=1e-3)
    assert run.result()["peak_allocated_bytes"] <= 1.05 * run.plan.memory.tensor_bytes
    assert run.result()["peak_allocated_bytes"] < without.result()["peak_allocated_bytes"]
