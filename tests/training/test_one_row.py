"""Rows laid one behind the other train as padded ones do, and a model that lets them see each other is not trained."""

import json
from types import SimpleNamespace

import pytest
import torch

import tunekit
from benchmarks.isolation import small_model
from tests.tiny import plain_accelerator, save_tiny_model, watching_models
from tunekit.errors import RunError
from tunekit.training import train as training
from tunekit.training.check_reference import check_isolation


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A tiny model, and conversations of very different lengths."""
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model", hidden=64)
    rows = []
    for n in range(40):
        turns = [("user", "?" * (1 + n * 7 % 23)), ("assistant", f"{n * n} is " + "ok " * (1 + n * 5 % 17))]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def train(workspace, folder, *overrides):
    recipe = {
        "model": str(workspace / "model"),
        "data": {"train": str(workspace / "rows.jsonl"), "eval": str(workspace / "rows.jsonl"), "max_length": 128},
        "train": {"max_steps": 6, "global_batch_size": 8, "learning_rate": 3e-3},
        "output": {"dir": str(folder), "sample_prompts": []},
    }
    return tunekit.train(recipe, overrides)


def losses(run):
    metrics = run.metrics()
    return metrics["loss"].dropna().tolist() + metrics["eval_loss"].dropna().tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("micro_batch_size", [2, 4])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_rows_one_behind_the_other_have_the_losses_of_padded_ones(
    adapter, micro_batch_size, attention, workspace, tmp_path
):
    shapes = {"true": set(), "false": set()}
    found = {}
    for free in shapes:

        def watch(model, inputs, free=free):
            if model.training:
                masked = inputs.get("attention_mask") is not None
                shapes[free].add((len(inputs["input_ids"]), masked, "cu_seq_lens_q" in inputs))

        options = [f"adapter={adapter}", f"train.micro_batch_size={micro_batch_size}", f"data.padding_free={free}"]
        with watching_models(watch):
            run = train(workspace, tmp_path / free, *options, f"model.attn_implementation={attention}")
        assert run.plan.padding_free == (free == "true")
        own = attention == "auto" and free == "true"
        assert (run.plan.attn_implementation == "tunekit_varlen") == own
        assert [event["event"] for event in run.events()].count("attention") == own
        found[free] = losses(run)
    assert shapes == {"true": {(1, False, True)}, "false": {(micro_batch_size, True, False)}}
    assert len(found["true"]) > 8
    assert found["true"] == pytest.approx(found["false"], abs=1e-5)
    assert found["true"][5] < found["true"][0]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["data.packing=true", "data.padding_free=true"])
@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_the_look_before_training_changes_nothing(adapter, option, workspace, tmp_path, monkeypatch):
    options = [option, f"adapter={adapter}", "model.dtype=bfloat16", "train.micro_batch_size=2"]
    if adapter != "full":
        options.append("adapter.dropout=0.2")
    looked = []

    def look(trainer, model, **told):
        before, was_training = torch.get_rng_state(), trainer.model.training
        check_isolation(trainer, model, **told)
        looked.append(torch.equal(before, torch.get_rng_state()) and trainer.model.training == was_training)

    monkeypatch.setattr(training, "check_isolation", look)
    with_look = losses(train(workspace, tmp_path / "with", *options))
    monkeypatch.setattr(training, "check_isolation", lambda *_, **__: None)
    without = losses(train(workspace, tmp_path / "without", *options))
    assert looked == [True]
    assert with_look == without


@pytest.mark.sample(1)
@pytest.mark.parametrize("option", ["data.packing", "data.padding_free"])
def test_a_model_that_ignores_positions_is_not_trained(option, workspace, tmp_path, monkeypatch):
    from transformers.models.llama import modeling_llama

    original = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda **given: original(**{**given, "position_ids": None})
    )
    with pytest.raises(RunError) as caught:
        train(workspace, tmp_path / "run", f"{option}=true", "model.attn_implementation=sdpa")
    path = workspace / "model"
    assert str(caught.value) == f"{path}: attention leaks between packed documents; set {option}=false"
    (status,) = (tunekit.Run(tmp_path / "run").status(),)
    assert (status["phase"], status.get("step", 0)) == ("failed", 0)
    monkeypatch.undo()
    assert (
        train(workspace, tmp_path / "again", f"{option}=true", "model.attn_implementation=sdpa").status()["phase"]
        == "finished"
    )


def trainer_of(model):
    """As much of a trainer as the check looks at."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return SimpleNamespace(
        model=model,
        data_collator=DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
        accelerator=plain_accelerator(),
        args=SimpleNamespace(bf16=False, fp16=False),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mixtral", "qwen3_moe"])
def test_rounding_is_not_taken_for_another_document(model_type, dtype):
    model = small_model(model_type, "sdpa").to(dtype).train()
    check_isolation(trainer_of(model), model, vocabulary=256, path="m", asked="data.packing")
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["afmoe", "gpt_oss", "jamba", "recurrent_gemma", "opt"])
def test_every_kind_of_leak_is_seen(model_type, dtype):
    model = small_model(model_type, "eager").to(dtype)
    with pytest.raises(RunError, match=r"m: attention leaks between packed documents; set data\.packing=false"):
        check_isolation(trainer_of(model), model, vocabulary=256, path="m", asked="data.packing")


@pytest.mark.parametrize("model_type", ["lfm3", "qwen3_next"])
def test_what_a_library_says_of_packed_documents_is_passed_on(model_type):
    with pytest.raises(RunError) as caught:
        model = small_model(model_type, "sdpa")
        check_isolation(trainer_of(model), model, vocabulary=256, path="m", asked="data.packing")
    assert str(caught.value) == (
        "m does not support packed documents: `causal_conv1d_fn` can't keep packed sequences apart without "
        "`causal_conv1d`. Install `causal_conv1d` to train on packed sequences.; set data.packing=false"
    )
