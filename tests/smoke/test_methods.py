"""Each method trains, with all weights and with LoRA, and saves what it trained: a short real run of each."""

import math

import pytest
import torch
import yaml
from safetensors.torch import load_file

import tunekit
from tests.photographs.losses import check_losses
from tests.photographs.recorded import FOLDER, LOSSES, check_recorded
from tests.photographs.shapes import shape_of_run, written
from tests.rows import save_rows
from tests.smoke.methods import METHODS
from tests.tiny import save_tiny_model
from tests.two_tokenizers import save_teachers

FIRST_LOSS = {"dpo": math.log(2), "kto": 0.5}
"""The loss of a policy that is still its reference: -log sigmoid(0), and 1 - sigmoid(0)."""


SCORING = ("reward", "prm", "classification")
"""Methods whose models have a score for a head."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    save_tiny_model(folder / "model")
    save_teachers(folder)
    # Its rows are whole blocks of 4 bits: bitsandbytes misreads others on processors with AVX-512.
    save_tiny_model(folder / "blocks", hidden=64, intermediate=128)
    for method in METHODS:
        save_rows(folder / f"{method}.jsonl", method, 8)
    return folder


def train(workspace, method, adapter, *overrides):
    """Return the run of a method with an adapter, trained by the first test that needs it."""
    folder = workspace / "-".join([method, adapter, *overrides])
    if folder.exists():
        return tunekit.Run(folder)
    recipe = {
        "model": str(workspace / ("blocks" if adapter == "qlora" else "model")),
        "data": {"train": str(workspace / f"{method}.jsonl"), "eval": str(workspace / f"{method}.jsonl")},
        "method": {"type": method, **METHODS[method]},
        "adapter": adapter,
        "train": {"max_steps": 3, "global_batch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-2},
        "output": {"dir": str(folder), "sample_prompts": []},
    }
    recipe["data"]["max_length"] = 64
    if "teacher" in METHODS[method]:
        recipe["method"]["teacher"] = str(workspace / METHODS[method]["teacher"])
    return tunekit.train(recipe, overrides)


def change(before, after):
    """Return the names of the weights that differ."""
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_and_saves_its_weights(method, adapter, workspace):
    run = train(workspace, method, adapter)
    assert run.status()["phase"] == "finished"
    logged = [event for event in run.events() if event["event"] == "log"]
    assert [event["step"] for event in logged] == [1, 2, 3]
    assert all(math.isfinite(event["loss"]) and event["grad_norm"] > 0 for event in logged)
    check_losses(f"{method}-{adapter}", run)
    if (method, adapter) == ("sft", "lora"):
        check_recorded("shapes-run.yaml", written(shape_of_run(run.path)))
    assert logged[0]["loss"] == pytest.approx(FIRST_LOSS.get(method, logged[0]["loss"]), abs=1e-3)
    if adapter == "lora":
        saved = load_file(run.model_path / "adapter_model.safetensors")
        second = [tensor for name, tensor in saved.items() if "lora_B" in name]
        # B begins with zeros.
        assert len(second) == 2 * 7
        assert all(tensor.abs().max() > 0 for tensor in second)
    else:
        before = load_file(workspace / "model" / "model.safetensors")
        after = load_file(run.model_path / "model.safetensors")
        unused = {"lm_head.weight"} if method in SCORING else set()
        assert before.keys() - after.keys() <= unused
        assert change({name: before[name] for name in before.keys() - unused}, after) == before.keys() - unused


def transformers_loss(model, tokenizer, rows):
    """Return the mean loss of the answers' tokens, by transformers and the template alone."""
    total, num_tokens = 0.0, 0
    for row in rows:
        encoded = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
        )
        mask = torch.as_tensor(encoded["assistant_masks"]).bool().reshape(1, -1)
        labels = encoded["input_ids"].masked_fill(~mask, -100)
        with torch.no_grad():
            loss = model(input_ids=encoded["input_ids"], labels=labels).loss
        num_answer = int((labels[:, 1:] != -100).sum())
        total, num_tokens = total + loss.item() * num_answer, num_tokens + num_answer
    return total / num_tokens


@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_the_saved_model_has_the_loss_that_the_run_reported(adapter, workspace):
    from bitsandbytes.nn import Linear4bit
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from tests.rows import row_for

    run = train(workspace, "sft", adapter)
    reported = [event["eval_loss"] for event in run.events() if event["event"] == "eval"]
    path, options = run.model_path, {}
    if adapter == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    if adapter == "full":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    else:
        base = AutoModelForCausalLM.from_pretrained(run.recipe.model.path, dtype=torch.float32, **options)
        model = PeftModel.from_pretrained(base, path)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            # Its layout for inference computes in bfloat16.
            module.support_avx512bf16_for_cpu = False
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    expected = transformers_loss(model.eval(), tokenizer, [row_for("sft", number) for number in range(8)])
    assert reported[-1] == pytest.approx(expected, abs=1e-4)
    assert reported[-1] < reported[0]


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_losses_of_a_cpu_on_an_accelerator(method, adapter, workspace):
    """In float32; answers that are drawn, and a reward model's new score, are others there."""
    run = train(workspace, method, adapter, "model.dtype=float32", "train.micro_batch_size=2")
    assert run.plan.device.kind == "cuda"
    logged = [event for event in run.events() if event["event"] == "log"]
    assert all(math.isfinite(event["loss"]) and event["grad_norm"] > 0 for event in logged)
    if "max_completion_length" not in METHODS[method] and method not in SCORING:
        recorded = yaml.safe_load((FOLDER / LOSSES).read_text(encoding="utf-8"))[f"{method}-{adapter}"]
        assert [event["loss"] for event in logged] == pytest.approx(recorded["loss"], rel=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_a_method_trains_in_4_bits_on_an_accelerator(method, workspace):
    run = train(workspace, method, "qlora")
    logged = [event for event in run.events() if event["event"] == "log"]
    assert all(math.isfinite(event["loss"]) and event["grad_norm"] > 0 for event in logged)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("adapter", "override"),
    [
        ("full", "train.torch_compile=true"),
        ("lora", "train.torch_compile=true"),
        ("full", "train.pure_bf16=true"),
        ("full", "train.optim=tunekit_adamw"),
        ("full", "train.optim=tunekit_adamw_8bit"),
        ("full", "train.optim=tunekit_adamw_4bit"),
        ("full", "train.optim=adamw_8bit"),
        ("full", "train.optim=paged_adamw_8bit"),
        ("full", "train.optim=muon"),
        ("full", "train.optim=adam_mini"),
        ("full", "train.optim=galore_adamw"),
        ("full", "train.optim=apollo_adamw"),
        ("lora", "train.gradient_checkpointing=true"),
        ("lora", "model.kernels=liger"),
        ("lora", "model.kernels=torch"),
        ("full", "train.fp8=true"),
        ("lora", "data.packing=true"),
        ("full", "data.packing=true"),
    ],
)
def test_an_option_trains_on_an_accelerator(adapter, override, workspace):
    run = train(workspace, "sft", adapter, override)
    losses = [event["loss"] for event in run.events() if event["event"] == "log"]
    recorded = yaml.safe_load((FOLDER / LOSSES).read_text(encoding="utf-8"))[f"sft-{adapter}"]
    # In bfloat16, which rounds to 2^-9.
    assert losses[0] == pytest.approx(recorded["loss"][0], rel=2e-2)
    assert all(map(math.isfinite, losses))
