"""Each engine computes what one process does, and what it saves is what it trained."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

import tunekit
from benchmarks.tiny_models import tiny_model
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tunekit.errors import PlanError
from tunekit.runs.run import Run
from tunekit.training.engines.fsdp2 import hide_shared_head, show_shared_head

HEAD_TOO = {"type": "lora", "modules_to_save": ["lm_head"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, one whose head is tied to its embedding, and rows of unequal lengths."""
    folder = tmp_path_factory.mktemp("engines")
    save_tiny_model(folder / "model")
    save_tiny_model(folder / "tied")
    tie(folder / "tied")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(24)))
    return folder


def tie(folder):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def recipe_for(folder, adapter="full", model="model", prompts=(), train=None, **parallel):
    return {
        "model": model if isinstance(model, dict) else str(folder / model),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": adapter,
        "train": {"max_steps": 6, "global_batch_size": 8, "learning_rate": 1e-3, **(train or {})},
        "parallel": parallel,
        "output": {"sample_prompts": list(prompts), "dir": str(folder / "runs" / os.urandom(4).hex())},
    }


def losses(run):
    return [event["loss"] for event in run.events() if event["event"] == "log"]


def parts(trainer):
    """What this process holds of each weight; and the model is saved in the trainer's own way besides."""
    trainer.save_model(str(Path(trainer.args.output_dir).parent / "by_trainer"))
    return {name: tensor.to_local().numpy() for name, tensor in trainer.model.state_dict().items()}


CASES = [
    (
        "full",
        "tied",
        2,
        {"reshard_after_forward": False},
        {"micro_batch_size": 2, "gradient_checkpointing": True},
        True,
    ),
    (HEAD_TOO, "model", 2, {"reshard_after_forward": True}, {"micro_batch_size": 1}, False),
    ("lora", "model", 4, {"dp_shard_size": 2}, {"gradient_checkpointing": True}, False),
    ("full", "model", 2, {"tp_size": 2}, {"micro_batch_size": 4}, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "model", "num", "parallel", "train", "synced"),
    CASES,
    ids=["full, kept", "lora and head", "lora, hybrid", "tensor parallel"],
)
def test_divided_weights_are_trained_and_saved_as_those_of_one_process(
    adapter, model, num, parallel, train, synced, folder
):
    alone = made(recipe_for(folder, adapter, model, ["hi"]))
    worked(alone)
    recipe = recipe_for(folder, adapter, model, ["hi"], train, strategy="fsdp2", num_processes=num, **parallel)
    divided = made(recipe, {"sync_each_batch": synced})
    work_in(divided, num)
    one, many = Run(alone), Run(divided)
    torch.testing.assert_close(losses(many), losses(one), rtol=0, atol=1e-5)
    assert saved_weights(many.model_path).keys() == saved_weights(one.model_path).keys()
    torch.testing.assert_close(saved_weights(many.model_path), saved_weights(one.model_path), rtol=0, atol=1e-5)
    answers = [[event["answer"] for event in run.events() if event["event"] == "sample"] for run in (one, many)]
    assert answers[0] == answers[1]
    (engine,) = [event for event in many.events() if event["event"] == "engine"]
    assert engine["engine"] == "fsdp2"
    assert engine["sync_each_batch"] == synced
    assert engine["local_share"] == pytest.approx(1 / 2, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "packing", "how"),
    [(2, False, {}), (2, True, {"quant_type": "fp4"}), (3, True, {}), (3, False, {"double_quant": False})],
    ids=["two", "two, packed, fp4", "three, packed", "three, single"],
)
def test_weights_in_4_bits_are_sharded_and_train_as_in_one_process(num, packing, how, folder):
    """Ten losses, with recomputed layers and evaluations; no process holds more than its part of the bytes."""
    train = {"max_steps": 10, "global_batch_size": 6, "gradient_checkpointing": True, "eval_steps": 5}
    runs = []
    for parallel in ({}, {"strategy": "fsdp2", "num_processes": num}):
        recipe = recipe_for(folder, {"type": "qlora", **how}, "model", ["hi"], train, **parallel)
        recipe["data"] |= {"packing": packing, "eval": str(folder / "rows.jsonl")}
        runs.append(Run(made(recipe)))
    one, many = runs
    worked(one.path)
    shares = work_in(many.path, num, bytes_of_packed_weights)
    torch.testing.assert_close(losses(many), losses(one), rtol=0, atol=1e-5)
    torch.testing.assert_close(saved_weights(many.model_path), saved_weights(one.model_path), rtol=0, atol=1e-5)
    evaluations = [[event["eval_loss"] for event in run.events() if event["event"] == "eval"] for run in runs]
    torch.testing.assert_close(evaluations[0], evaluations[1], rtol=0, atol=1e-5)
    whole = shares[0][1]
    assert whole > 0
    assert sum(held for held, _ in shares) == whole
    assert all(held == pytest.approx(whole / num, rel=0.01) for held, _ in shares)


def bytes_of_packed_weights(trainer):
    """Bytes of weights in 4 bits that this process holds, and that there are."""
    weights = [module.weight for module in trainer.model.modules() if isinstance(module, Linear4bit)]
    return sum(weight.to_local().nbytes for weight in weights), sum(weight.numel() for weight in weights)


@pytest.mark.slow
def test_fsdp2_saves_the_parts_of_all_put_together(folder):
    """What each process held at the end is laid side by side here, and a checkpoint has all that goes on."""
    run = Run(made(recipe_for(folder, train={"max_steps": 4, "save_steps": 2}, strategy="fsdp2", num_processes=2)))
    first, second = work_in(run.path, 2, parts)
    whole = {name: torch.from_numpy(np.concatenate([part, second[name]])) for name, part in first.items()}
    torch.testing.assert_close(saved_weights(run.model_path), whole, rtol=0, atol=0)
    # With sharded states the trainer's own way of saving writes nothing, and says nothing.
    assert not (run.path / "by_trainer").exists()
    reloaded = AutoModelForCausalLM.from_pretrained(run.model_path)
    torch.testing.assert_close(dict(reloaded.state_dict()), whole, rtol=0, atol=0)
    checkpoint = run.path / "checkpoints" / "checkpoint-2"
    names = {file.name for file in checkpoint.iterdir()}
    assert {"scheduler.pt", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"} <= names
    stored = FileSystemReader(checkpoint / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in stored} == whole.keys()
    stored = FileSystemReader(checkpoint / "optimizer_0").read_metadata().state_dict_metadata
    for state in ("exp_avg", "exp_avg_sq", "step"):
        assert {name for name in whole if f"optimizer.state.{name}.{state}" in stored} == whole.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "raw", "refused", "parallel"),
    [
        (
            {"offload_param_device": "cpu", "offload_optimizer_device": "cpu"},
            "Cannot access accelerator device when none is available",
            "needs an accelerator",
            {"offload_param_device": "cpu"},
        ),
        (
            {"dp_shard_size": 1, "cp_size": 2},
            "_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered",
            "torch cannot split attention on a CPU",
            {"cp_size": 2},
        ),
    ],
    ids=["offload", "context parallel"],
)
def test_what_fsdp2_cannot_do_on_a_cpu_is_refused_and_fails_as_said(layout, raw, refused, parallel, folder):
    """The plan refuses it. Started nevertheless, it gets past Accelerate's own checks and fails as the plan says."""
    asked = recipe_for(folder, train={"global_batch_size": 8}, strategy="fsdp2", num_processes=2, **parallel)
    with pytest.raises(PlanError, match=refused):
        tunekit.plan(asked)
    run = made(recipe_for(folder, strategy="fsdp2", num_processes=2), layout)
    with pytest.raises(AssertionError, match=raw):
        work_in(run, 2)


@pytest.mark.parametrize(("family", "is_shared"), [("bert", True), ("llama", False)])
def test_a_head_whose_bias_another_module_has_too_is_no_unit_of_its_own(family, is_shared):
    trainer = SimpleNamespace(model=tiny_model(family))
    head = trainer.model.get_output_embeddings()
    hide_shared_head(trainer)
    assert (trainer.model.get_output_embeddings() is None) == is_shared
    show_shared_head(trainer)
    assert trainer.model.get_output_embeddings() is head
