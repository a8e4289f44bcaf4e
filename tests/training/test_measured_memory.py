"""Memory of real runs: what they held by part, and what they say when it runs out."""

import json
import math
import os
import platform
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tunekit
from tests.tiny import make_tokenizer, save_chats
from tunekit import frontend
from tunekit.estimates.memory.states import (
    adapters_bytes,
    states_bytes,
    trained_tensors,
    weights_bytes,
)
from tunekit.probe.model import probe_model
from tunekit.runs.run import Run
from tunekit.training.measured_memory import is_out_of_memory, shortage

limits_memory = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of a process")

ROWS = 16

BY_TRL = {"model": {"path": "model", "kernels": "torch"}}
"""TRL's head holds the logits of whole tiles, which is most of what a step needs; tunekit's holds less than the model,
so that memory that was freed may do for it."""


def save_llama(folder, **sizes):
    """Save a Llama of random weights, with the byte-level tokenizer."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        **{"vocab_size": len(tokenizer), **sizes},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A model with a vocabulary as wide as the tiles of TRL's head, so that what it allocates it also fills."""
    folder = tmp_path_factory.mktemp("workspace")
    save_llama(
        folder / "model",
        vocab_size=32768,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    save_chats(folder / "rows.jsonl", ((f"double {n} " * 7, f"{2 * n}") for n in range(ROWS)))
    return folder


def recipe(adapter, **train):
    return {
        "model": "model",
        "data": {"train": "rows.jsonl", "max_length": 128},
        "adapter": adapter,
        "train": {"max_steps": 2, "global_batch_size": ROWS, **train},
        "output": {"sample_prompts": []},
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit"])
@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_a_run_records_what_it_held_and_it_is_what_was_planned(adapter, optim, workspace, monkeypatch, tmp_path):
    monkeypatch.chdir(workspace)
    run = tunekit.train(recipe(adapter, optim=optim), [f"output.dir={tmp_path / 'run'}"])
    plan, result = run.plan, run.result()
    facts = probe_model(run.recipe.model)
    trained = trained_tensors(facts, run.recipe.adapter)
    planned = {
        "weights": weights_bytes(facts, run.recipe.adapter, plan.dtype),
        "adapters": adapters_bytes(trained, run.recipe.adapter),
        "gradients": sum(4 * math.prod(shape) for shape in trained.values()),
        "optimizer": states_bytes(trained, optim),
    }
    assert result["held_bytes"] == {part: size for part, size in planned.items() if size}
    for part in ("weights", "adapters", "optimizer"):
        assert plan.memory.parts.get(part, 0) == planned[part]
    # torch counts what is allocated on accelerators alone.
    assert result["peak_allocated_bytes"] is result["peak_reserved_bytes"] is None
    assert sum(planned.values()) < result["peak_memory_bytes"]


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the sizes are glibc's")
def test_checkpointing_on_a_cpu_holds_no_more_than_is_planned(tmp_path):
    """In a process of its own, whose peak is not that of another run."""
    save_llama(
        tmp_path / "model",
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    save_chats(tmp_path / "rows.jsonl", (("x " * 200, "y z " * 180) for _ in range(16)))
    asked = recipe("lora", gradient_checkpointing=True, global_batch_size=4, micro_batch_size=4, max_steps=1)
    asked["data"] |= {"max_length": 1024, "packing": True}
    (tmp_path / "recipe.yaml").write_text(json.dumps(asked), encoding="utf-8")
    command = [sys.executable, "-m", "tunekit", "train", "recipe.yaml", "output.dir=run"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    run = Run(tmp_path / "run")
    assert run.result()["peak_memory_bytes"] < run.plan.memory.total_bytes


LIMITED = """
import json, psutil, resource, sys, tunekit
# Memory is to run out for the model, not for the libraries.
import peft, transformers.trainer, trl.trainer.sft_trainer
import tunekit.training.callbacks, tunekit.training.checkpointing.save
recipe, when, room, folder = json.loads(sys.argv[1])
def listen(event):
    if when == event.get("phase", event["event"]):
        now = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (now + room * 2**20, resource.RLIM_INFINITY))
try:
    tunekit.train(recipe, [f"output.dir={folder}"], on_event=listen)
except tunekit.TunekitError as error:
    sys.exit(str(error))
finally:
    # torch imports more as the process ends.
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def train_within(workspace, recipe, when, room, folder) -> Run:
    """A run in which the process may not take more than `room` MiB from an event on."""
    arguments = json.dumps([recipe, when, room, str(folder)])
    # The limit is one of address space, of which every further thread reserves some that no plan counts: of its
    # own, and for what it allocates.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", LIMITED, arguments]
    answer = subprocess.run(command, cwd=workspace, env=one_thread, capture_output=True, text=True, check=False)
    assert "Traceback" not in answer.stderr, answer.stderr
    return Run(folder)


@limits_memory
@pytest.mark.slow
def test_what_would_have_fitted_does_fit(workspace, tmp_path):
    run = train_within(workspace, recipe("full") | BY_TRL, "training", 500, tmp_path / "first")
    assert run.state == "failed"
    first, heads, weights, *_, total = run.status()["exit_reason"].splitlines()
    asked, _, change = first.partition(" requested; set ")
    assert asked.startswith("step 1: CPU") and "is out of memory: " in asked
    assert heads.split() == ["planned", "measured"]
    name, planned, _, measured, _ = weights.split()
    assert name == "weights" and planned == measured
    assert total.startswith("  total  ")
    # The same limit, and what was said to fit.
    settings = change.partition(": needs ")[0].split(" and ")
    found = frontend.diagnose_run(run)
    assert found.cause == "memory" and list(found.changes) == settings
    changed = {name: json.loads(value) for name, value in (s.removeprefix("train.").split("=") for s in settings)}
    changed_recipe = recipe("full", **changed) | BY_TRL
    assert train_within(workspace, changed_recipe, "training", 500, tmp_path / "second").state == "finished"


@pytest.mark.slow
@limits_memory
@pytest.mark.parametrize(
    ("when", "said"), [("loading", "loading: CPU"), ("log", "evaluation after step 1: CPU")], ids=["load", "evaluate"]
)
def test_memory_that_runs_out_elsewhere_is_said_so(when, said, workspace, tmp_path):
    asked = recipe("full", eval_steps=1) | BY_TRL
    asked["data"]["eval"] = "rows.jsonl"
    run = train_within(workspace, asked, when, 4, tmp_path / "run")
    assert run.state == "failed"
    assert run.status()["exit_reason"].startswith(said)
    assert "is out of memory" in run.status()["exit_reason"]


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ..."), 2 * 2**30),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes."),
            4000,
        ),
        (RuntimeError("CUDA error: out of memory"), 0),
        (MemoryError(), 0),
    ],
    ids=["allocator", "cpu", "driver", "python"],
)
def test_errors_of_memory_are_known_with_what_was_asked_for(error, asked, workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    assert is_out_of_memory(error)
    assert shortage(tunekit.plan(recipe("lora")), {}, None, error).asked_bytes == asked


def test_other_errors_are_none_of_memory():
    assert not is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."))
