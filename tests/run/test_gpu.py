"""The same runs on an accelerator."""

import pytest

import tunekit

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_quickstart_learns_on_an_accelerator(adapter, tmp_path):
    run = tunekit.train("sft/quickstart", [f"adapter.type={adapter}", f"output.dir={tmp_path / 'run'}"])
    plan, result = run.plan, run.result()
    assert plan.device.kind == "cuda"
    assert plan.autocast == (plan.dtype != "float32")
    assert result["eval_loss"] < 0.2 * result["first_eval_loss"]
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
