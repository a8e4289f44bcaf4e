"""Adapters on real architectures: which layers have one, and what PEFT reads of them."""

import ast
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch.nn import Linear
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

import tunekit
from benchmarks.tiny_models import tiny_model
from tests.tiny import make_tokenizer, save_chats
from tunekit.errors import ModelError, PlanError
from tunekit.estimates.memory.states import num_trainable_params, quantised_bytes, trained_tensors
from tunekit.estimates.models.model_config import model_types
from tunekit.models.load import attach_adapter, load_model, num_trained, read_adapter
from tunekit.models.quantization import stored_tensors
from tunekit.planner.decisions.adapters import adapter_faults
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.adapters import (
    AdaloraAdapter,
    FullAdapter,
    Ia3Adapter,
    LoraAdapter,
    OftAdapter,
    QloraAdapter,
    VeraAdapter,
)
from tunekit.recipe.sections.model import ModelSection

SIZES = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_local_experts": 4,
    "pad_token_id": 0,
}


def tiny(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).eval()


@pytest.mark.parametrize("kind", ["phimoe", "llama4_text", "gpt_oss"])
def test_routers_have_no_adapter_and_what_was_saved_is_what_peft_loads(kind, tmp_path):
    ids = torch.arange(24).reshape(2, 12)
    before = tiny(kind)(input_ids=ids).logits
    model = attach_adapter(tiny(kind), LoraAdapter(rank=4, target_modules="all-linear"), seed=0)
    adapted = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    assert adapted
    assert not [name for name in adapted if "router" in name]
    torch.testing.assert_close(model(input_ids=ids).logits, before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny(kind), tmp_path)
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not torch.allclose(model(input_ids=ids).logits, before, atol=1e-3)


@pytest.mark.parametrize("kind", sorted(model_types().read_past.keys() - {"gemma3n"}))
def test_modules_whose_weights_are_read_past_them_get_no_adapter_and_are_refused_before(kind, tmp_path):
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    save_chats(tmp_path / "chats.jsonl", [("1 + 1?", "2"), ("2 + 2?", "4")])
    facts = probe_model(ModelSection(path=str(tmp_path / "model")))
    past = {name.rpartition(".")[2] for name in facts.linears} & model_types().read_past[kind]
    assert past == model_types().read_past[kind] - {"conv1d"}
    adapted = attach_adapter(model, LoraAdapter(rank=4, target_modules="all-linear"), seed=0)
    names = [name for name, module in adapted.named_modules() if isinstance(module, BaseTunerLayer)]
    assert not {name.rpartition(".")[2] for name in names} & past
    planned = trained_tensors(facts, LoraAdapter(rank=4, target_modules="all-linear"))
    assert num_trained(adapted) == sum(math.prod(shape) for shape in planned.values())

    recipe = {"model": str(tmp_path / "model"), "data": {"train": str(tmp_path / "chats.jsonl"), "max_length": 64}}
    target = min(past)
    with pytest.raises(PlanError, match=f"the code of {kind} models reads the weights of {target} directly"):
        tunekit.plan(recipe | {"adapter": {"type": "lora", "target_modules": [target]}})


@pytest.mark.parametrize("kind", ["falcon_h1", "falcon_mamba", "mamba", "mamba2"])
def test_what_peft_refuses_of_mamba_layers_is_refused_before(kind):
    assert {"conv1d", "out_proj"} <= model_types().read_past[kind]
    with pytest.raises(ValueError, match="'out_proj' is incompatible"):
        get_peft_model(tiny_model(kind), LoraConfig(target_modules=["in_proj", "out_proj"]))


SAYS_NOTHING = {"dtype", "device", "shape", "is_cuda"}
"""Attributes of a weight that do not read its values."""

OTHERWISE = {
    "data2vec": "its audio model",
    "bloom": "its slow products of pretraining, which no configuration that is published asks for",
    "reformer": "refused",
}


def linears_read_past(code):
    """The last names of linear layers whose weights a file reads past them, by ways that say more than a type."""
    # Most files name no such weight, and parsing all of them takes a while.
    if not re.search(rf"self\.\w+\.weight(?!\.({'|'.join(SAYS_NOTHING)})\b)", code):
        return set()
    tree = ast.parse(code)
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    read = set()
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        linears = {
            target.attr
            for node in ast.walk(kind)
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(("nn.Linear(", "torch.nn.Linear("))
            for target in node.targets
            if isinstance(target, ast.Attribute)
        }
        forwards = [node for node in kind.body if isinstance(node, ast.FunctionDef) and "init" not in node.name]
        for node in (node for forward in forwards for node in ast.walk(forward)):
            is_weight = isinstance(node, ast.Attribute) and node.attr == "weight"
            if not is_weight or ast.unparse(node.value).removeprefix("self.") not in linears:
                continue
            use = above[node]
            attribute = use.attr if isinstance(use, ast.Attribute) else ""
            is_type_check = isinstance(use, ast.Call) and ast.unparse(use.func) == "isinstance"
            if attribute not in SAYS_NOTHING and not is_type_check:
                read.add(node.value.attr)
    return read


@pytest.mark.slow
def test_no_other_code_of_a_causal_model_reads_weights_past_its_modules():
    """Read from transformers' own files, since some ways are only taken on CUDA with kernels that are not here."""
    kinds = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    folders = {model_type_to_module_name(kind) for kind in kinds}
    known = {model_type_to_module_name(kind): names - {"conv1d"} for kind, names in model_types().read_past.items()}
    read = {}
    for folder in sorted(folders - OTHERWISE.keys()):
        for file in (Path(transformers.__file__).parent / "models" / folder).glob("modeling_*.py"):
            read.setdefault(folder, set()).update(linears_read_past(file.read_text(encoding="utf-8")))
    heads = model_types().heads
    assert {folder: names - heads for folder, names in read.items() if names - heads} == known


def test_linear_layers_that_transformers_never_quantizes_are_known():
    """Read from transformers' own files: importing all of its models takes minutes."""
    kept = {}
    for kind in {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}:
        folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(kind)
        for file in folder.glob("modeling_*.py"):
            code = file.read_text(encoding="utf-8")
            lists = re.findall(r"^    _keep_in_fp32_modules = (\[[^\]]*\])", code, re.MULTILINE)
            names = {name for one in lists for name in ast.literal_eval(one) if name.endswith("_proj")}
            kept |= {kind: names} if names else {}
    known = model_types().unquantized_linears
    assert kept.keys() == known.keys() and all(kept[kind] <= set(names) for kind, names in known.items())


# No adapter is trained of Mistral Large 4: PEFT renames what it saves.
@pytest.mark.parametrize("kind", sorted(model_types().unquantized_linears.keys() - {"mistral_large4"}))
def test_weights_in_4_bits_are_counted_as_they_are_held(kind, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    section, adapter = ModelSection(path=str(tmp_path)), QloraAdapter()
    model = load_model(section, dtype="float32", device="cpu", quantization=adapter)
    stored = [stored_tensors(weight) for weight in model.parameters()]
    held = sum(tensor.nbytes for tensors in stored if len(tensors) > 1 for tensor in tensors)
    assert quantised_bytes(probe_model(section), adapter) == held


NAMED_OTHERWISE = ["bert", "biogpt", "mamba", "modernbert-decoder", "openai-gpt", "opt", "rembert", "roc_bert", "rwkv"]


@pytest.mark.parametrize("kind", NAMED_OTHERWISE)
def test_the_linear_layers_of_a_plan_are_those_of_the_model_whatever_its_tables_are_called(kind, tmp_path):
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    head = model.get_output_embeddings()
    kinds = (Linear, Conv1D)
    linears = {name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head}
    assert set(probe_model(ModelSection(path=str(tmp_path))).linears) == linears


@pytest.mark.parametrize(
    ("kind", "adapted"),
    [("falcon", {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}), ("dory", None)],
)
def test_a_linear_layer_of_a_models_own_class_is_adapted_where_it_computes_a_product(kind, adapted):
    """Falcon's are products in other words; Dory's head scales what it gives."""
    model = attach_adapter(tiny_model(kind), LoraAdapter(rank=4), seed=0)
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    assert names == adapted if adapted is not None else names and "lm_head" not in names


@pytest.mark.parametrize("kind", sorted({name.removesuffix("_text") for name in model_types().without_adapters}))
def test_an_adapter_that_peft_does_not_read_again_is_refused(kind):
    with pytest.raises(ModelError, match=f"PEFT cannot load saved adapters of {kind} models: it renames .*lora_A"):
        attach_adapter(tiny_model(kind), LoraAdapter(rank=4), seed=0)


def test_peft_has_biases_for_the_plain_start_alone():
    assert LoraConfig(lora_bias=True).lora_bias
    with pytest.raises(ValueError, match="lora_bias=True is only supported with init_lora_weights=True or False"):
        LoraConfig(lora_bias=True, init_lora_weights="gaussian")


def test_types_with_weights_stored_transposed_are_those_whose_code_has_them_and_peft_does_not_rotate_them():
    folder = Path(transformers.__file__).parent / "models"
    files = {
        kind: [*(folder / model_type_to_module_name(kind)).glob("modeling_*.py")]
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    transposed = {
        kind for kind, code in files.items() if any("pytorch_utils import Conv1D" in f.read_text() for f in code)
    }
    assert transposed == model_types().stored_transposed
    with pytest.raises(TypeError, match="Target module Conv1D"):
        attach_adapter(tiny_model("gpt2"), OftAdapter(oft_block_size=8), seed=0)


COUNTED = {
    "lora": LoraAdapter(rank=4),
    "biases": LoraAdapter(rank=4, lora_bias=True, layers_to_transform=[1]),
    "dora": LoraAdapter(rank=4, use_dora=True),
    "ia3": Ia3Adapter(),
    "vera": VeraAdapter(rank=4),
    "adalora": AdaloraAdapter(init_r=4, target_r=2),
}


@pytest.mark.parametrize("adapter", COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("kind", ["gpt2", "opt", "qwen3"])
def test_the_parameters_of_an_adapter_are_those_that_peft_trains(kind, adapter, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    facts = probe_model(ModelSection(path=str(tmp_path)))
    model = attach_adapter(tiny_model(kind), adapter, seed=0)
    assert num_trainable_params(facts, adapter) == num_trained(model)


def test_a_start_that_peft_computes_of_transposed_weights_changes_the_model_and_is_refused(tmp_path):
    ids = torch.arange(12)[None]
    start = LoraConfig(r=4, target_modules=["attn.c_proj"], fan_in_fan_out=True, init_lora_weights="olora")
    before = tiny_model("gpt2").eval()(ids).logits
    assert not torch.allclose(get_peft_model(tiny_model("gpt2"), start).eval()(ids).logits, before, atol=1e-3)
    tiny_model("gpt2").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    facts = probe_model(ModelSection(path=str(tmp_path)))
    (fault,) = adapter_faults(LoraAdapter(rank=4, target_modules=["c_proj"], init_lora_weights="olora"), facts)
    problem = "adapter.init_lora_weights: olora: PEFT factorizes the weights of gpt2 models as they are stored"
    assert fault == (f"{problem}, transposed", "use pissa or gaussian")
    assert not [*adapter_faults(LoraAdapter(rank=4, init_lora_weights="pissa"), facts)]


def test_the_layers_of_a_decoder_are_not_taken_for_those_of_a_tower(tmp_path):
    """A tower has linear layers named 0 and 2, and PEFT goes by last names where a type has experts."""
    model = tiny_model("qwen3_omni_moe_thinker")
    adapted = attach_adapter(model, LoraAdapter(rank=4, target_modules="all-linear"), seed=0)
    names = {name.rpartition(".")[2] for name, part in adapted.named_modules() if isinstance(part, BaseTunerLayer)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate", "experts", "base_layer"}


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_weights_that_a_checkpoint_lacks_are_not_random(kind, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no weights of .*layers\.1\.mlp\.up_proj\.weight, which would be random"):
        load_model(ModelSection(path=str(tmp_path)), dtype="float32", device="cpu")


@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["axk2", "big_bird", "deepseek_v32", "phi4_multimodal", "qwen4_exp", "trocr", "llama"])
def test_all_that_is_trained_has_a_gradient_and_is_planned(kind, adapter, tmp_path):
    """DDP waits for the gradient of each; without one it exchanges none of its bucket."""
    tiny_model(kind).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path))
    model = attach_adapter(load_model(section, dtype="float32", device="cpu"), adapter, seed=0).train()
    ids = torch.arange(3, 100)[None]
    model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss.backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    planned = trained_tensors(probe_model(section), adapter)
    assert sum(map(math.prod, planned.values())) == num_trained(model)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "v_proj", "k_proj"]], ids=["fewer", "more"])
def test_an_adapter_of_other_layers_than_the_recipe_says_is_refused(targets, tmp_path):
    attach_adapter(tiny("llama"), LoraAdapter(rank=4, target_modules=targets), seed=0).save_pretrained(tmp_path)
    model = attach_adapter(tiny("llama"), LoraAdapter(rank=4, target_modules=["q_proj", "v_proj"]), seed=0)
    with pytest.raises(
        ModelError, match=f"does not match this model: .* is only in the {'model' if len(targets) == 1 else 'folder'}"
    ):
        read_adapter(model, tmp_path)
