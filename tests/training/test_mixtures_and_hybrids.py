"""Experts in 4 bits, and packed rows of hybrids, train alike in one process and in two."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tunekit
from benchmarks.tiny_models import tiny_model
from tests.rows import save_rows
from tests.tiny import make_tokenizer, save_in_mxfp4
from tunekit.errors import PlanError, RunError
from tunekit.runs.run import Run

PACKED = {"model": "qwen3_next", "adapter": {"type": "full"}, "data": {"packing": True}}

WEIGHTS = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    changes = {
        "deepseek_v4": {"layer_types": ["heavily_compressed_attention"] * 2, "compress_rates": RATES},
        "bert": {"num_hidden_layers": 3},
    }
    for family in ("qwen3_moe", "qwen3_next", "deepseek_v4", "bert"):
        tiny_model(family, **changes.get(family, {})).save_pretrained(folder / family)
        make_tokenizer().save_pretrained(folder / family)
    save_in_mxfp4(tiny_model("gpt_oss", hidden_size=64, intermediate_size=32), folder / "gpt_oss")
    make_tokenizer().save_pretrained(folder / "gpt_oss")
    save_rows(folder / "rows.jsonl", "sft", 64)
    return folder


def losses_of(name, **sections):
    recipe = {
        "data": {"train": "rows.jsonl", "max_length": 64, **sections.pop("data", {})},
        "train": {"max_steps": 3, "global_batch_size": 4, "learning_rate": 1e-3},
        "output": {"dir": name, "sample_prompts": []},
        **sections,
    }
    run = tunekit.train(recipe)
    assert run.state == "finished"
    return [event["loss"] for event in run.events() if event["event"] == "log"]


@pytest.mark.slow
def test_experts_in_4_bits_train_alike_in_two_processes(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    asked = {"model": "qwen3_moe", "adapter": {"type": "qlora", "rank": 8}}
    one = losses_of("qlora", **asked)
    two = losses_of("qlora-ddp", **asked, parallel={"num_processes": 2, "strategy": "ddp"})
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_in_4_bits_are_sharded_and_train_as_in_one_process(family, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    asked = {"model": family, "adapter": {"type": "qlora", "rank": 8, "target_modules": targets}}
    one = losses_of(f"{family}-alone", **asked)
    two = losses_of(f"{family}-fsdp2", **asked, parallel={"num_processes": 2, "strategy": "fsdp2"})
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-5)
    events = Run(Path(f"{family}-fsdp2")).events()
    (engine,) = [event for event in events if event["event"] == "engine"]
    assert engine["local_share"] == pytest.approx(1 / 2, abs=0.01)


def test_adapted_experts_in_4_bits_are_not_sharded(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    with pytest.raises(PlanError, match="PEFT adapts only unsharded 4-bit experts; use ddp, or exclude experts"):
        losses_of(
            "adapted",
            model="qwen3_moe",
            adapter={"type": "qlora", "rank": 8},
            parallel={"num_processes": 2, "strategy": "fsdp2"},
        )


@pytest.mark.slow
def test_packed_rows_of_a_hybrid_train_alike_in_two_processes(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    one = losses_of("packed", **PACKED)
    two = losses_of("packed-fsdp2", **PACKED, parallel={"num_processes": 2, "strategy": "fsdp2"})
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_head_whose_bias_another_module_has_is_sharded(adapter, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    # Adam would make steps of the rounding of gradients that are 0, as those of the biases of keys are.
    train = {"max_steps": 3, "global_batch_size": 4, "learning_rate": 0.1, "optim": "sgd"}
    asked = {"model": "bert", "adapter": {"type": adapter}, "train": train}
    one = losses_of(f"bert-{adapter}", **asked)
    two = losses_of(f"bert-{adapter}-fsdp2", **asked, parallel={"num_processes": 2, "strategy": "fsdp2"})
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-5)
    weights, sharded = (
        load_file(Path(name) / "model" / WEIGHTS[adapter]) for name in (f"bert-{adapter}", f"bert-{adapter}-fsdp2")
    )
    assert weights.keys() == sharded.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(sharded[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_gradients_that_ddp_does_not_sum_are_an_error_at_the_first_step(workspace, monkeypatch):
    """Rows of 64 tokens are too short for the compressors of DeepSeek V4, which get no gradient."""
    monkeypatch.chdir(workspace)
    # The tiny model's layers choose experts by token alone, so that there is nothing to balance.
    method = {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.0}}
    asked = {"model": "deepseek_v4", "adapter": {"type": "lora", "rank": 4}, "method": method}
    one = losses_of("short", **asked)
    two = losses_of("short-fsdp2", **asked, parallel={"num_processes": 2, "strategy": "fsdp2"})
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-4)
    with pytest.raises(RunError, match=r"the rows of the first step do not use .*compressor\..* and 7 more, so DDP"):
        losses_of("short-ddp", **asked, parallel={"num_processes": 2, "strategy": "ddp"})


def test_layers_that_run_once_for_each_document_are_not_given_to_zero3(workspace, monkeypatch):
    """It gathers weights each time that a layer runs, and processes have other numbers of documents."""
    monkeypatch.chdir(workspace)
    with pytest.raises(PlanError, match="ZeRO-3 gathers weights each time a layer runs: in qwen3_next, once per"):
        losses_of("packed-zero3", **PACKED, parallel={"num_processes": 2, "strategy": "zero3"})
