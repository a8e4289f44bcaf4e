"""Between the forward and the backward pass of a micro-batch the host does not wait for the device.

Found on a CPU, where a wait would be the same operation: a number or places read from a tensor.
"""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import tunekit
from tests.rows import save_rows
from tests.tiny import save_tiny_model
from tunekit.methods.run_trainer import RunTrainer


class Waits(TorchDispatchMode):
    """Operations whose result the host has to know."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(func.overloadpacket.__name__.startswith(name) for name in self.NAMES):
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.sample(1)
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_no_micro_batch_of_sft_waits(adapter, packing, tmp_path, monkeypatch):
    """Of rows one behind the other, as on CUDA; of padded ones transformers asks whether all are whole."""
    save_tiny_model(tmp_path / "model")
    save_rows(tmp_path / "rows.jsonl", "sft", 8)
    compute, found = RunTrainer.training_step, []

    def training_step(trainer, *given, **named):
        with Waits() as waits:
            loss = compute(trainer, *given, **named)
        found.append(waits.found)
        return loss

    monkeypatch.setattr(RunTrainer, "training_step", training_step)
    tunekit.train(
        {
            "model": str(tmp_path / "model"),
            "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64, "packing": packing, "padding_free": True},
            "adapter": adapter,
            "train": {"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 2},
            "output": {"dir": str(tmp_path / "run"), "sample_prompts": []},
        }
    )
    # Two steps of two micro-batches. At the beginning of each, before a layer is computed, transformers asks whether
    # positions begin anew (5.24, `find_packed_sequence_indices`).
    assert found == [["_local_scalar_dense"]] * 4
