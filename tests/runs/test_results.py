"""What a run leaves behind: each kind of result loads with plain transformers and peft, elsewhere, and is the same."""

import json
import subprocess
import sys

import pytest
import torch

import tunekit
from tests.tiny import save_chats, save_tiny_model, watching_models

LOAD_ELSEWHERE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
folder, base, kind, ids = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
if kind == "full":
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
else:
    from peft import PeftModel
    config = None
    if kind == "qlora":
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    model = PeftModel.from_pretrained(model, folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
# In evaluation mode bitsandbytes repacks 4-bit weights for another kernel of lower precision, where the processor has
# one; the models have no dropout, so training mode computes the same without that.
model.train(kind == "qlora")
with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0]
text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
print(json.dumps({"logits": logits.tolist(), "text": text}))
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    # Rows of whole blocks of 64: bitsandbytes, which reads what was trained, is wrong of others on some processors
    # (tests/kernels/test_nf4.py).
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=64, intermediate=128)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, numbers in (("train", range(64)), ("eval", range(64, 72))):
        save_chats(folder / f"{name}.jsonl", ((f"say {n}", f"{n} it is, {n}.") for n in numbers))
    return folder


def train_and_keep_model(recipe):
    """The run, and the model as it was at the end of it."""
    kept = {}
    # What is loaded at the end, to be compared with it, is another one.
    with watching_models(lambda module, _: kept.setdefault(type(module).__name__, module)):
        run = tunekit.train(recipe)
    return run, kept.get("PeftModelForCausalLM", kept["LlamaForCausalLM"])


def recipe_for(kind, model_folder, data, folder, **train):
    return {
        "model": str(model_folder),
        "data": {"train": str(data / "train.jsonl"), "eval": str(data / "eval.jsonl"), "max_length": 128},
        "adapter": kind,
        "train": {"max_steps": 8, "global_batch_size": 8, "learning_rate": 5e-3, **train},
        "output": {"dir": str(folder)},
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_result_loads_elsewhere_and_gives_the_same_logits(kind, model_folder, data, tmp_path):
    run, model = train_and_keep_model(recipe_for(kind, model_folder, data, tmp_path / "run"))
    ids = list(range(5, 60))
    with torch.no_grad():
        here = model.eval()(input_ids=torch.tensor([ids])).logits[0]
    command = [sys.executable, "-c", LOAD_ELSEWHERE, str(run.model_path), str(model_folder), kind, json.dumps(ids)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = json.loads(answer.stdout.splitlines()[-1])
    there = torch.tensor(loaded["logits"])
    assert torch.allclose(here, there, atol=1e-5, rtol=1e-5), (here - there).abs().max()
    assert loaded["text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    untrained = tunekit_base_logits(model_folder, ids)
    assert (here - untrained).abs().max() > 0.05


def tunekit_base_logits(model_folder, ids):
    """Logits of the model before training: the result must not be that."""
    from transformers import LlamaForCausalLM

    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(model_folder).eval()(torch.tensor([ids])).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_evaluation_does_not_change_training(kind, model_folder, data, tmp_path):
    """On some processors bitsandbytes repacks 4-bit weights in the first evaluation; gradients are wrong after it."""
    often = recipe_for(kind, model_folder, data, tmp_path / "often", eval_steps=2)
    never = recipe_for(kind, model_folder, data, tmp_path / "never")
    del never["data"]["eval"]
    never["output"]["sample_prompts"] = []
    with_evaluation = tunekit.train(often).metrics()
    without = tunekit.train(never).metrics()
    assert with_evaluation["eval_loss"].notna().sum() == 5
    losses = with_evaluation["loss"].dropna().tolist()
    assert losses == without["loss"].tolist()
    assert losses[-1] < losses[0]


def test_quantised_layers_are_told_to_keep_their_layout(model_folder):
    """The repacking itself needs a processor with AVX512-BF16; that it is switched off can be seen on any."""
    from bitsandbytes.nn import Linear4bit

    from tunekit.models.load import load_model
    from tunekit.recipe.sections.adapters import QloraAdapter
    from tunekit.recipe.sections.model import ModelSection

    model = load_model(
        ModelSection(path=str(model_folder)),
        dtype="float32",
        attn_implementation="sdpa",
        device="cpu",
        quantization=QloraAdapter(),
    )
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 14
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_rows_that_end_within_a_block_of_4_bits_are_multiplied_as_they_were_quantised(quant_type, tmp_path):
    """Rows of 48 and 112 values and blocks of 64, which bitsandbytes misreads on processors with AVX-512."""
    from bitsandbytes.nn import Linear4bit

    from tunekit.models.load import load_model
    from tunekit.recipe.sections.adapters import QloraAdapter
    from tunekit.recipe.sections.model import ModelSection

    section = ModelSection(path=str(save_tiny_model(tmp_path / "model")))
    adapter = QloraAdapter(quant_type=quant_type, double_quant=False)
    model = load_model(section, dtype="float32", device="cpu", quantization=adapter)
    plain = load_model(section, dtype="float32", device="cpu")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    for name, layer in layers.items():
        rows = torch.randn(3, layer.in_features, requires_grad=True)
        scales, values = layer.weight.quant_state.absmax, plain.get_submodule(name).weight.detach()
        code = layer.weight.quant_state.code
        nearest = (values.view(-1, 64, 1) / scales[:, None, None] - code).abs().argmin(-1)
        weight = (code[nearest] * scales[:, None]).view(values.shape)
        product = layer(rows)
        assert torch.allclose(product, rows @ weight.T, atol=1e-5)
        assert torch.allclose(torch.autograd.grad(product.sum(), rows)[0], weight.sum(0).expand(3, -1), atol=1e-5)
    assert {layer.in_features for layer in layers.values()} == {48, 112}


@pytest.mark.slow
def test_trained_parameters_stay_in_float32(model_folder, data, tmp_path):
    for kind in ("lora", "qlora"):
        _, model = train_and_keep_model(recipe_for(kind, model_folder, data, tmp_path / kind))
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.slow
def test_packing_keeps_the_loss_of_the_first_step(model_folder, data, tmp_path):
    """All rows in one batch: packed or padded, the mean over the same tokens is the same, as no row sees another."""
    losses = {}
    for packing in (False, True):
        recipe = recipe_for("lora", model_folder, data, tmp_path / str(packing), max_steps=2, global_batch_size=64)
        recipe["data"]["packing"] = packing
        run = tunekit.train(recipe)
        losses[packing] = run.metrics()["loss"].dropna().tolist()
        if packing:
            assert run.plan.data.num_train < 64
    # The two packs differ in how many sequences make a batch, so only what both see is compared: the first step.
    assert losses[True][0] == pytest.approx(losses[False][0], abs=1e-5)
