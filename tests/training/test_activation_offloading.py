"""Activations in host memory change no loss and no weight, and are as many bytes as planned.

TRL's own copies run here on a CPU: of its two ways the one without streams, which another accelerator is faked for.
"""

from types import SimpleNamespace

import pytest
import torch
from trl.models import activation_offloading
from trl.trainer import sft_trainer

import tunekit
from tests.tiny import saved_weights
from tests.training import long_rows
from tests.training.long_rows import TOKENS
from tunekit.planner.decisions import backends

pytestmark = pytest.mark.slow

HIDDEN, LAYERS = 64, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return long_rows.save_inputs(tmp_path_factory.mktemp("offloading"), hidden=HIDDEN, layers=LAYERS)


@pytest.fixture
def copies(monkeypatch):
    """Sizes of what TRL copies, in the order in which it is saved; plans for a CPU are allowed to have it copy."""
    sizes = []

    def contexts(model):
        with monkeypatch.context() as patch:
            patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
            offloading = activation_offloading.get_act_offloading_ctx_manager
            context = offloading(model, use_pin_memory=False, use_streams=False, warn_if_no_head=False)
        stream, current_stream = torch.cpu.stream, torch.cpu.current_stream
        context.device_module = SimpleNamespace(stream=stream, current_stream=current_stream, empty_cache=lambda: None)
        pack = context.pack_hook

        def noted(tensor):
            number = pack(tensor)
            copied, was_copied, *_ = context.tracker[number]
            if was_copied:
                assert copied.data_ptr() != tensor.data_ptr()
                sizes.append(tensor.numel() * tensor.element_size())
            return number

        context.pack_hook = noted
        return context

    monkeypatch.setattr(sft_trainer, "get_act_offloading_ctx_manager", contexts)
    monkeypatch.setattr(backends, "why_not_offloaded", lambda *_: None)
    return sizes


def train(folder, name, **changes):
    return long_rows.train(folder, name, **{"gradient_checkpointing": True, "learning_rate": 1e-2, **changes})


@pytest.mark.parametrize(
    ("adapter", "kernels", "tiled"), [("full", "auto", False), ("lora", "torch", False), ("lora", "auto", True)]
)
def test_offloaded_activations_change_no_loss_and_no_weight_and_are_as_planned(adapter, kernels, tiled, folder, copies):
    name, how = f"{adapter}-{kernels}", {"adapter": adapter, "kernels": kernels, "tiled_mlp": tiled}
    without = train(folder, f"{name}-without", **how, activation_offloading=False)
    assert not copies
    run = train(folder, f"{name}-with", **how, activation_offloading=True)
    assert (run.plan.mlp_tile_tokens is not None) == tiled
    assert run.plan.activation_offloading and not without.plan.activation_offloading
    assert run.metrics()["loss"].tolist() == without.metrics()["loss"].tolist()
    expected = saved_weights(without.model_path)
    for parameter, weight in saved_weights(run.model_path).items():
        assert torch.equal(weight, expected[parameter]), parameter
    # Every micro-batch copies its layers' inputs, 2 x 64 x 64 values in float32 each, and what norm and head keep.
    num_micro_batches, stream = 6, 2 * TOKENS * HIDDEN * 4
    assert run.plan.memory.offloaded_bytes == LAYERS * stream
    assert copies.count(stream) >= LAYERS * num_micro_batches
    pinned = sum(1 << (size - 1).bit_length() for size in copies) / num_micro_batches
    assert LAYERS * stream < pinned <= run.plan.memory.host_bytes <= 2 * pinned


def test_a_run_with_offloaded_activations_resumes_to_the_bit(folder, copies):
    constant = {"adapter": "lora", "activation_offloading": True, "lr_scheduler_type": "constant", "warmup_steps": 0}
    whole = train(folder, "whole", **constant)
    cut = train(folder, "cut", **constant, max_steps=2)
    resumed = tunekit.resume(cut, ["train.max_steps=3"])
    assert resumed.metrics()["loss"].tolist() == whole.metrics()["loss"].tolist()
    expected = saved_weights(whole.model_path)
    assert all(torch.equal(weight, expected[name]) for name, weight in saved_weights(resumed.model_path).items())
