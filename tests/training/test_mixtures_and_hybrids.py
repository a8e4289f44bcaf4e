"""Experts in 4 bits, and packed rows of hybrids, train alike in one process and in two."""

import pytest

import tunekit
from benchmarks.tiny_models import tiny_model
from tests.rows import save_rows
from tests.tiny import make_tokenizer
from tunekit.errors import PlanError

PACKED = {"model": "qwen3_next", "adapter": {"type": "full"}, "data": {"packing": True}}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    for family in ("qwen3_moe", "qwen3_next"):
        tiny_model(family).save_pretrained(folder / family)
        make_tokenizer().save_pretrained(folder / family)
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
def test_packed_rows_of_a_hybrid_train_alike_in_two_processes(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    one = losses_of("packed", **PACKED)
    two = losses_of("packed-fsdp2", **PACKED, parallel={"num_processes": 2, "strategy": "fsdp2"})
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-4)


def test_layers_that_run_once_for_each_document_are_not_given_to_zero3(workspace, monkeypatch):
    """It gathers weights each time that a layer runs, and processes have other numbers of documents."""
    monkeypatch.chdir(workspace)
    with pytest.raises(PlanError, match="ZeRO-3 gathers weights each time that a layer runs: in qwen3_next, once for"):
        losses_of("packed-zero3", **PACKED, parallel={"num_processes": 2, "strategy": "zero3"})
