"""Real runs whose adapters begin with what rows or 4 bits tell: cut off, resumed, gone on from, merged."""

import os

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tunekit
from tests.processes import in_processes
from tests.rows import save_rows
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in
from tests.training.test_base_parts import logits_of
from tests.training.test_resume import SAVED, cut_off, events, recipe_for
from tunekit.errors import TunekitError
from tunekit.inference.inference_model import find_trained, load_trained
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow

STARTS = {
    "corda": {"type": "lora", "rank": 4, "init_lora_weights": "corda", "num_init_rows": 8},
    "eva": {"type": "lora", "rank": 4, "init_lora_weights": "eva", "num_init_rows": 8},
    "eva on 4 bits": {"type": "qlora", "rank": 4, "init_lora_weights": "eva"},
    "loftq": {"type": "qlora", "rank": 4, "init_lora_weights": "loftq"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("initial")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", [(f"double {n}", f"{2 * n} it is, as anybody can see") for n in range(20)])
    return folder


def answers_of(run, **how):
    return logits_of(load_trained(find_trained(run, **how), dtype="float32", device="cpu"))


@pytest.mark.parametrize("start", STARTS)
def test_a_run_resumes_to_the_bit_and_all_that_is_made_of_it_answers_alike(start, folder):
    adapter = STARTS[start]
    whole, cut = (Run(made(recipe_for(folder, adapter))) for _ in range(2))
    work_in(whole.path, 1)
    in_processes(1, cut_off, cut.path)
    early = answers_of(cut, checkpoint=str(SAVED))
    work_in(cut.path, 1)
    assert [event["step"] for event in events(cut, "resume")] == [SAVED]
    first, second = saved_weights(whole.model_path), saved_weights(cut.model_path)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    ranks = {min(tensor.shape) for tensor in first.values()}
    assert ranks == {8} if start == "corda" else ranks == {4} if start == "loftq" else len(ranks) > 1
    assert sum(tensor.numel() for tensor in first.values()) <= (2 if start == "corda" else 1) * (
        whole.plan.num_trainable_params
    )
    assert events(whole, "saved")[0]["logit_error"] < 1e-4
    # As tunekit loads it, and merged.
    wanted = answers_of(whole)
    bare = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert (early - wanted).abs().max() > 1e-3 and (wanted - logits_of(bare)).abs().max() > 1e-3
    if adapter["type"] == "lora":
        torch.testing.assert_close(logits_of(PeftModel.from_pretrained(bare, whole.model_path)), wanted)
    merged = tunekit.export(whole, folder / f"out-{start.replace(' ', '-')}", kind="merged", dtype="float32")
    if start != "eva on 4 bits":
        torch.testing.assert_close(
            logits_of(AutoModelForCausalLM.from_pretrained(merged.folder)), wanted, rtol=1e-4, atol=1e-4
        )
    quiet = {"max_steps": 1, "learning_rate": 1e-12, "global_batch_size": 8}
    onward = recipe_for(folder, adapter) | {"model": str(whole.path), "train": quiet, "adapter": adapter["type"]}
    onward["output"] = {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())}
    further = tunekit.train(onward)
    assert load_file(further.model_path / "adapter_model.safetensors").keys() == first.keys()
    torch.testing.assert_close(answers_of(Run(further.path)), wanted)


@pytest.mark.parametrize("start", ["corda", "eva"])
def test_several_processes_begin_alike_and_train_and_resume_as_one(start, folder):
    alone = Run(made(recipe_for(folder, STARTS[start])))
    work_in(alone.path, 1)
    run = Run(made(recipe_for(folder, STARTS[start], num_processes=2, strategy="ddp")))
    in_processes(2, cut_off, run.path)
    work_in(run.path, 2)
    assert [event["step"] for event in events(run, "resume")] == [SAVED]
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(alone.model_path), rtol=0, atol=1e-5)


def test_an_adapter_of_loftq_goes_on_on_the_base_in_4_bits_alone(folder):
    recipe = recipe_for(folder, STARTS["loftq"])
    recipe["train"] |= {"max_steps": 1}
    run = tunekit.train(recipe)
    for adapter in ("lora", {"type": "qlora", "quant_type": "fp4"}):
        onward = recipe_for(folder, adapter) | {"model": str(run.path)}
        with pytest.raises(TunekitError, match=r"adapter\.(type|quant_type)"):
            tunekit.train(onward)
    whole = recipe_for(folder, "full") | {"model": str(run.path)}
    whole["train"] = {"max_steps": 1, "learning_rate": 1e-12, "global_batch_size": 8}
    trained = tunekit.train(whole)
    torch.testing.assert_close(answers_of(Run(trained.path)), answers_of(Run(run.path)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo"])
def test_an_embedding_that_is_trained_on_a_quantized_base_begins_with_its_own_values(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model", hidden=32, layers=1)
    save_rows(tmp_path / "rows.jsonl", method, num=8)
    section = {"type": method} | (
        {"rewards": ["numeric_match"], "max_completion_length": 8} if method == "grpo" else {}
    )
    trainer = tunekit.trainer(
        {
            "model": {"path": "model", "dtype": "float32"},
            "data": {"train": "rows.jsonl", "max_length": 64},
            "method": section,
            "adapter": {"type": "qlora", "rank": 2, "modules_to_save": ["embed_tokens"]},
            "train": {"max_steps": 1, "global_batch_size": 8},
        }
    )
    names = dict(trainer.model.named_parameters())
    (copy,) = (value for name, value in names.items() if name.endswith("embed_tokens.modules_to_save.default.weight"))
    stored = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(stored, stored.bfloat16().float())
    assert copy.dtype == torch.float32
    assert torch.equal(copy.detach().cpu(), stored)
