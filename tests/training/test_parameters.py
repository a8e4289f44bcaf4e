"""Adapters of fused experts that a recipe names: as PEFT makes them, trained, resumed, gone on from and merged."""

import math
import os

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import tunekit
from benchmarks.tiny_models import tiny_model
from tests.processes import in_processes
from tests.tiny import make_tokenizer, save_chats, saved_weights
from tests.training.engines import made, work_in
from tests.training.test_base_parts import logits_of
from tests.training.test_resume import SAVED, cut_off, events, recipe_for
from tunekit.estimates.memory.states import trained_tensors
from tunekit.inference.inference_model import find_trained, load_trained
from tunekit.models.load import attach_adapter, num_trained
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.adapters import LoraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.run import Run

pytestmark = pytest.mark.filterwarnings("ignore")

NAMED = ["experts.gate_up_proj", "experts.down_proj"]
OPTIONS = {
    "both alone": {"target_modules": [], "target_parameters": NAMED},
    "one beside attention": {"target_modules": ["q_proj", "v_proj"], "target_parameters": NAMED[1:]},
    "ranks": {"target_modules": [], "target_parameters": NAMED, "rank_pattern": {"layers.0.mlp.experts.down_proj": 2}},
}


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text", "qwen3_moe"])
@pytest.mark.parametrize("option", OPTIONS)
def test_named_stacks_are_adapted_as_pefts_and_planned(option, kind, tmp_path):
    options = dict(OPTIONS[option])
    if kind == "llama4_text" and "rank_pattern" in options:
        options["rank_pattern"] = {"layers.0.feed_forward.experts.down_proj": 2}
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    facts, adapter = probe_model(ModelSection(path=str(tmp_path))), LoraAdapter(rank=4, alpha=8, **options)
    ours = attach_adapter(model, adapter, seed=3)
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = get_peft_model(plain, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    ours_shapes, theirs_shapes = (
        {name: tensor.shape for name, tensor in one.state_dict().items()} for one in (ours, theirs)
    )
    assert ours_shapes == theirs_shapes
    assert num_trained(ours) == sum(map(math.prod, trained_tensors(facts, adapter).values()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parameters")
    tiny_model("gpt_oss").save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_all_that_is_made_of_it_answers_alike(folder):
    adapter = {"type": "lora", "rank": 4, **OPTIONS["both alone"]}
    whole, cut = (Run(made(recipe_for(folder, adapter))) for _ in range(2))
    work_in(whole.path, 1)
    in_processes(1, cut_off, cut.path)
    work_in(cut.path, 1)
    assert [event["step"] for event in events(cut, "resume")] == [SAVED]
    first, second = saved_weights(whole.model_path), saved_weights(cut.model_path)
    assert first and all(torch.equal(first[name], second[name]) for name in first)
    assert sum(tensor.numel() for tensor in first.values()) == whole.plan.num_trainable_params
    bare = AutoModelForCausalLM.from_pretrained(folder / "model")
    before = logits_of(bare)
    wanted = logits_of(PeftModel.from_pretrained(bare, whole.model_path))
    assert (wanted - before).abs().max() > 1e-3
    ours = load_trained(find_trained(whole), dtype="float32", device="cpu")
    torch.testing.assert_close(logits_of(ours), wanted)
    merged = tunekit.export(whole, folder / "out", kind="merged", dtype="float32")
    torch.testing.assert_close(
        logits_of(AutoModelForCausalLM.from_pretrained(merged.folder)), wanted, rtol=1e-4, atol=1e-4
    )
    onward = recipe_for(folder, "lora") | {"model": str(whole.path)}
    onward["train"] = {"max_steps": 1, "learning_rate": 1e-12, "global_batch_size": 8}
    onward["output"] = {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())}
    further = tunekit.train(onward)
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(base, further.model_path)), wanted)
