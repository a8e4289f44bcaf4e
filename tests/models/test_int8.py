"""Bases of 8 bits: the values of bitsandbytes, the bytes of the plan, and steps of plain PEFT on those values."""

import pytest
import torch
from bitsandbytes.functional import int8_vectorwise_quant
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.models.test_published import step_of, with_updates
from tests.tiny import make_tokenizer
from tunekit.estimates.memory.states import weights_bytes
from tunekit.models.load import attach_adapter, load_model
from tunekit.models.packed import Rows
from tunekit.models.quantization import Stack, stored_tensors
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.adapters import QloraAdapter
from tunekit.recipe.sections.model import ModelSection

ADAPTER = QloraAdapter(rank=4, quant_type="int8", target_modules=["q_proj", "v_proj", "down_proj"])
ON_GPT2 = QloraAdapter(rank=4, quant_type="int8", target_modules=["c_attn", "c_proj"])
SIZES = {"vocab_size": len(make_tokenizer())}
WITHOUT_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
CONFIGS = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            **SIZES,
            hidden_size=48,
            intermediate_size=100,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_bias=True,
        ),
    ),
    # Its linear layers are Conv1D, which have their weights as (inputs, outputs).
    "gpt2": (GPT2LMHeadModel, GPT2Config(**SIZES, n_embd=48, n_layer=2, n_head=4, n_positions=64, **WITHOUT_DROPOUT)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {}
    for name, (kind, config) in CONFIGS.items():
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp(name)
        kind(config).to(torch.float16).save_pretrained(folders[name])
        make_tokenizer().save_pretrained(folders[name])
    return folders


def loaded(folder, adapter=None, dtype="float32"):
    return load_model(ModelSection(path=str(folder)), dtype=dtype, device="cpu", quantization=adapter)


def stacks(model):
    return {name: value for name, value in model.named_parameters() if isinstance(value, Stack)}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_llm_int8(name, folders):
    model, plain = loaded(folders[name], ADAPTER), AutoModelForCausalLM.from_pretrained(folders[name])
    linears = stacks(model)
    assert len(linears) == {"llama": 14, "gpt2": 8}[name]
    for name_of, stack in linears.items():
        weight = plain.get_parameter(name_of).half()
        integers, largest, _ = int8_vectorwise_quant(weight.T.contiguous() if stack.is_transposed else weight)
        assert torch.equal(stack.matrices.weight, integers), name_of
        torch.testing.assert_close(stack.matrices.scales, largest / 127, rtol=2e-7, atol=0)


def test_a_row_of_zeros_stays_zero():
    values = torch.tensor([[0.0, 0.0], [1e-42, 0.0], [-2.0, 1.0]])
    assert torch.equal(Rows.of(values).weight, torch.tensor([[0, 0], [0, 0], [-127, 64]], dtype=torch.int8))


@pytest.mark.parametrize("name", CONFIGS)
def test_plans_count_them_to_the_byte(name, folders):
    model = loaded(folders[name], ADAPTER, "bfloat16")
    held = [tensor for parameter in model.parameters() for tensor in stored_tensors(parameter)]
    facts = probe_model(ModelSection(path=str(folders[name])))
    assert weights_bytes(facts, ADAPTER, "bfloat16") == sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_that_of_plain_peft_on_their_values(name, folders):
    adapter = ON_GPT2 if name == "gpt2" else ADAPTER
    model = loaded(folders[name], adapter)
    plain = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    with torch.no_grad():
        for name_of, stack in stacks(model).items():
            plain.get_parameter(name_of).copy_(stack.dense())
    config = LoraConfig(r=4, lora_alpha=adapter.alpha, target_modules=adapter.target_modules, task_type="CAUSAL_LM")
    expected = step_of(with_updates(get_peft_model(plain, config)))
    for mine, theirs in zip(step_of(with_updates(attach_adapter(model, adapter, seed=0))), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
