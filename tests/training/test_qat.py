"""Quantization-aware training: torchao's gradients, the life of a run, and an export that answers as it was trained."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)
from torchao.quantization.qat import Int8DynActInt4WeightQATQuantizer, QATConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import tunekit
from tests.processes import in_processes
from tests.tiny import make_tokenizer, save_chats, saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.test_learning_rates import recipe_for
from tests.training.test_resume import cut_off
from tunekit.errors import PlanError, RunError
from tunekit.inference.inference_model import find_trained, load_trained
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow

INT4 = {"activation_dtype": "int8", "group_size": 16}
BY_TORCHAO = {
    "int4": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(16)),
    "int8": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
}
RECIPES = {"int4": INT4, "int8": {"weight_dtype": "int8", "group_size": None}}
LORA = {"type": "lora", "rank": 4, "alpha": 8}
IDS = torch.arange(40)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qat")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(make_tokenizer()), **sizes)).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """Runs that nothing interrupts, by the type of their weights."""
    runs = {}
    for name, qat in RECIPES.items():
        runs[name] = Run(made(recipe_for(folder, "full", {"qat": qat})))
        worked(runs[name].path)
    return runs


@pytest.fixture(scope="module")
def adapted(folder):
    """A run of LoRA that nothing interrupts."""
    run = Run(made(recipe_for(folder, LORA, {"qat": INT4})))
    worked(run.path)
    return run


def layers(model):
    head = model.get_output_embeddings()
    return lambda module, _: isinstance(module, torch.nn.Linear) and module is not head


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_is_one_along_torchaos_gradients(name, folder):
    once = {"max_steps": 1, "save_steps": 1, "warmup_steps": 0, "lr_scheduler_type": "constant", "optim": "sgd"}
    more = {"learning_rate": 1.0, "global_batch_size": 20, "weight_decay": 0.0, "max_grad_norm": 1e9}
    run = Run(made(recipe_for(folder, "full", {**once, **more, "qat": RECIPES[name]})))
    worked(run.path)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    quantize_(model, QATConfig(BY_TORCHAO[name], step="prepare"), filter_fn=layers(model))
    loss = mean_loss(model, folder)
    loss.backward()
    logged = next(event["loss"] for event in run.events() if event["event"] == "log" and "loss" in event)
    assert logged == pytest.approx(float(loss), abs=1e-5)
    after = saved_weights(run.model_path)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(before[key] - after[key], parameter.grad, rtol=1e-3, atol=2e-5)


def mean_loss(model, folder):
    """Mean loss of the answers of all rows, each row alone."""
    tokenizer, losses = AutoTokenizer.from_pretrained(folder / "model"), []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        row = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([row["input_ids"]]), torch.tensor(row["assistant_masks"][1:]).bool()
        logits = model(input_ids=ids).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits[mask], ids[0, 1:][mask], reduction="none"))
    return torch.cat(losses).mean()


def test_a_step_of_lora_is_one_along_the_gradients_on_weights_that_torchtunes_quantizer_rounds(folder):
    once = {"max_steps": 1, "save_steps": 1, "warmup_steps": 0, "lr_scheduler_type": "constant", "optim": "sgd"}
    more = {"learning_rate": 1.0, "global_batch_size": 20, "weight_decay": 0.0, "max_grad_norm": 1e9}
    qat = {"activation_dtype": "int8", "group_size": 32}
    run = Run(made(recipe_for(folder, LORA, {**once, **more, "qat": qat})))
    worked(run.path)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    head = model.lm_head
    model = Int8DynActInt4WeightQATQuantizer(groupsize=32).prepare(model)
    assert type(model.model.layers[0].mlp.up_proj) is not torch.nn.Linear
    model.lm_head = head
    every = {"target_modules": "all-linear", "exclude_modules": ["lm_head"]}
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **every))
    # At the start matrices B are zero, and so are the gradients of A: A is as it was drawn.
    for name, value in load_file(run.model_path / "adapter_model.safetensors").items():
        if "lora_A" in name:
            model.get_parameter(name.replace(".weight", ".default.weight")).data.copy_(value)
    loss = mean_loss(model, folder)
    loss.backward()
    logged = next(event["loss"] for event in run.events() if event["event"] == "log" and "loss" in event)
    assert logged == pytest.approx(float(loss), abs=1e-5)
    after = load_file(run.model_path / "adapter_model.safetensors")
    found = {name: value for name, value in after.items() if "lora_B" in name}
    assert len(found) == 14
    for name, value in found.items():
        gradient = model.get_parameter(name.replace(".weight", ".default.weight")).grad
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(-value, gradient, rtol=1e-3, atol=2e-5)


def test_the_export_of_lora_is_the_quantized_base_with_the_adapter_beside(folder, adapted, tmp_path):
    export = tunekit.export(adapted, tmp_path / "quantized", kind="quantized")
    assert export.check.logit_error < 1e-6 < export.check.adapter_change
    assert any("adapter/" in note for note in export.notes)
    beside = tmp_path / "quantized" / "adapter"
    assert json.loads((beside / "adapter_config.json").read_text())["base_model_name_or_path"] == str(beside.parent)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    quantize_(base, BY_TORCHAO["int4"], filter_fn=layers(base))
    with torch.no_grad():
        plain = base(input_ids=IDS).logits
        expected = PeftModel.from_pretrained(base, adapted.model_path)(input_ids=IDS).logits
        assert (expected - plain).abs().max() > 1e-3
        exported = AutoModelForCausalLM.from_pretrained(beside.parent)
        torch.testing.assert_close(exported(input_ids=IDS).logits, plain, rtol=0, atol=1e-6)
        exported = PeftModel.from_pretrained(exported, beside)
        torch.testing.assert_close(exported(input_ids=IDS).logits, expected, rtol=0, atol=1e-6)
        mine = load_trained(find_trained(adapted), dtype="float32", device="cpu")
        torch.testing.assert_close(mine(input_ids=IDS).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_the_export_is_what_torchao_makes_of_the_trained_weights(name, runs, tmp_path):
    export = tunekit.export(runs[name], tmp_path / "quantized", kind="quantized")
    assert export.check.logit_error < 1e-6
    assert not (tmp_path / "quantized" / "Modelfile").exists()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    plain = AutoModelForCausalLM.from_pretrained(runs[name].model_path, dtype=torch.float32)
    with torch.no_grad():
        unrounded = plain(input_ids=IDS).logits
        quantize_(plain, BY_TORCHAO[name], filter_fn=layers(plain))
        expected = plain(input_ids=IDS).logits
        assert (expected - unrounded).abs().max() > 1e-3
        torch.testing.assert_close(exported(input_ids=IDS).logits, expected, rtol=0, atol=1e-6)
        mine = load_trained(find_trained(runs[name]), dtype="float32", device="cpu")
        torch.testing.assert_close(mine(input_ids=IDS).logits, expected, rtol=0, atol=1e-6)


def test_the_unrounded_weights_are_exported_too(runs, tmp_path):
    export = tunekit.export(runs["int4"], tmp_path / "merged")
    assert any("unrounded" in note for note in export.notes)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(runs["int4"].model_path, dtype=torch.float32)
    torch.testing.assert_close(merged(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=0, atol=1e-6)


def test_a_run_without_it_has_no_such_export(folder):
    run = Run(made(recipe_for(folder, "full", {"max_steps": 1, "save_steps": 1})))
    worked(run.path)
    with pytest.raises(RunError, match=r"was not trained for quantized weights; set train\.qat"):
        tunekit.export(run, kind="quantized")


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_a_run_that_was_cut_off_resumes_exactly(adapter, folder, runs, adapted):
    run = Run(made(recipe_for(folder, {"full": "full", "lora": LORA}[adapter], {"qat": INT4})))
    in_processes(1, cut_off, run.path)
    worked(run.path)
    expected = saved_weights({"full": runs["int4"], "lora": adapted}[adapter].model_path)
    assert all(torch.equal(value, expected[name]) for name, value in saved_weights(run.model_path).items())


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_take_the_steps_of_one(strategy, adapter, folder):
    few = {"qat": RECIPES["int8"], "max_steps": 2, "save_steps": 2}
    alone, run = (
        Run(made(recipe_for(folder, {"full": "full", "lora": LORA}[adapter], few, **parallel)))
        for parallel in ({}, {"num_processes": 2, "strategy": strategy})
    )
    worked(alone.path)
    work_in(run.path, 2)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(alone.model_path), rtol=0, atol=2e-4)
    losses = [
        [event["loss"] for event in one.events() if event["event"] == "log" and "loss" in event] for one in (alone, run)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize(
    ("adapter", "train", "words"),
    [
        ("qlora", {}, r"train\.qat: unsupported with adapter\.type qlora"),
        ({"type": "lora", "use_dora": True}, {}, r"train\.qat: untested with adapter\.use_dora"),
        ({"type": "full", "last_layers": 1}, {}, r"train\.qat: requires that all parameters are trained, or LoRA"),
        ("full", {"pure_bf16": True}, "train.qat: untested with train.pure_bf16"),
        (
            "full",
            {"qat": {"group_size": 40}},
            "train.qat.group_size: 40 does not divide the inputs of all linear layers: 64, 96",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(adapter, train, words, folder):
    with pytest.raises(PlanError, match=words):
        made(recipe_for(folder, adapter, {"qat": INT4, **train}))


def test_zero_is_refused(folder):
    with pytest.raises(PlanError, match="untested with DeepSpeed ZeRO"):
        made(recipe_for(folder, "full", {"qat": INT4}, num_processes=2, strategy="zero2"))
