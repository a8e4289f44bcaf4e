"""Real runs whose adapters begin with parts of the base weights: cut off, resumed, gone on from, merged."""

import os

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in
from tests.training.test_resume import SAVED, cut_off, events, recipe_for
from tunekit.inference.inference_model import find_trained, load_trained
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow

IDS = torch.arange(40)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", [(f"double {n}", f"{2 * n} it is") for n in range(20)])
    return folder


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_run_resumes_to_the_bit_and_all_that_is_made_of_it_answers_alike(start, folder):
    adapter = {"type": "lora", "rank": 4, "init_lora_weights": start}
    whole, cut = (Run(made(recipe_for(folder, adapter))) for _ in range(2))
    work_in(whole.path, 1)
    in_processes(1, cut_off, cut.path)
    early = logits_of(load_trained(find_trained(cut, checkpoint=str(SAVED)), dtype="float32", device="cpu"))
    work_in(cut.path, 1)
    assert [event["step"] for event in events(cut, "resume")] == [SAVED]
    first, second = saved_weights(whole.model_path), saved_weights(cut.model_path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {min(tensor.shape) for tensor in first.values()} == {8}
    assert events(whole, "saved")[0]["logit_error"] < 1e-4
    # As users of PEFT load it, as tunekit does, and merged.
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    bare = logits_of(base)
    wanted = logits_of(PeftModel.from_pretrained(base, whole.model_path))
    assert (wanted - bare).abs().max() > 1e-3
    torch.testing.assert_close(logits_of(load_trained(find_trained(whole), dtype="float32", device="cpu")), wanted)
    assert 1e-3 < (early - bare).abs().max() < (wanted - bare).abs().max() * 2
    merged = tunekit.export(whole, folder / f"out-{start}", kind="merged", dtype="float32")
    torch.testing.assert_close(
        logits_of(AutoModelForCausalLM.from_pretrained(merged.folder)), wanted, rtol=1e-4, atol=1e-4
    )
    quiet = {"max_steps": 1, "learning_rate": 1e-12, "global_batch_size": 8}
    onward = recipe_for(folder, adapter) | {"model": str(whole.path), "train": quiet, "adapter": "lora"}
    onward["output"] = {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())}
    further = tunekit.train(onward)
    assert load_file(further.model_path / "adapter_model.safetensors").keys() == first.keys()
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(base, further.model_path)), wanted)


def test_several_processes_that_each_hold_all_weights_train_and_resume_as_one(folder):
    adapter = {"type": "lora", "rank": 4, "init_lora_weights": "pissa_niter_4"}
    alone = Run(made(recipe_for(folder, adapter)))
    work_in(alone.path, 1)
    run = Run(made(recipe_for(folder, adapter, num_processes=2, strategy="ddp")))
    in_processes(2, cut_off, run.path)
    work_in(run.path, 2)
    assert [event["step"] for event in events(run, "resume")] == [SAVED]
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(alone.model_path), rtol=0, atol=1e-5)
