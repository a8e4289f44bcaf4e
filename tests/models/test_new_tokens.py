"""Tokens that a recipe adds: their ids, their rows, and what is trained of them, against transformers' and PEFT's."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.estimates.shapes import LAPTOP
from tests.planner.golden import ROWS, recipe
from tests.tiny import make_tokenizer
from tunekit.errors import PlanError, RecipeError
from tunekit.estimates.memory.states import adapters_bytes, num_trainable_params, states_bytes, trained_tensors
from tunekit.models.load import attach_adapter, keep_trained, load_model, load_tokenizer
from tunekit.planner.resolve import resolve
from tunekit.probe.model import probe_model
from tunekit.recipe.load import load_recipe
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter
from tunekit.recipe.sections.model import ModelSection

TOOLS = {"add_tokens": ["<tool>", "</tool>"], "add_special_tokens": ["<|think|>"]}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def saved(folder, *, tied=False, vocab_size=259):
    """A Llama with the byte-level tokenizer of 259 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=tied, initializer_range=0.1, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def section_of(folder, **fields):
    return ModelSection.model_validate({"path": str(folder), **fields})


def test_a_new_token_is_one_id_behind_the_others(tmp_path):
    section = section_of(saved(tmp_path), **TOOLS, special_tokens={"pad_token": "<pad>", "eos_token": "<|im_end|>"})
    tokenizer = load_tokenizer(section)
    assert tokenizer("a<tool>b</tool><|think|><pad>")["input_ids"][1::2][:2] == [259, 260]
    assert [tokenizer.convert_tokens_to_ids(token) for token in section.all_tokens] == [259, 260, 261, 256, 262]
    assert (tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.eos_token_id) == ("<pad>", 262, 256)
    assert tokenizer.decode([259, 261, 260], skip_special_tokens=True) == "<tool></tool>"
    facts = probe_model(section)
    assert (facts.new_tokens, facts.vocab_size, facts.num_new_rows) == ((259, 260, 261, 262), 263, 4)


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows_are_transformers_own_and_the_same_each_time(tied, tmp_path):
    section = section_of(saved(tmp_path, tied=tied), **TOOLS)
    model = load_model(section, dtype="float32", device="cpu")
    truth = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    before = truth.get_input_embeddings().weight.detach().clone()
    torch.manual_seed(0)
    truth.resize_token_embeddings(262, mean_resizing=True)
    for name, weight in truth.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    new = model.get_input_embeddings().weight[259:]
    torch.testing.assert_close(new, before.mean(0).expand(3, -1), atol=1e-4, rtol=0)
    facts = probe_model(section)
    assert facts.num_params == model.num_parameters()
    assert model.config.vocab_size == facts.vocab_size == 262


def test_tokens_take_spare_rows_first(tmp_path):
    section = section_of(saved(tmp_path, vocab_size=261), **TOOLS)
    facts = probe_model(section)
    assert (facts.new_tokens, facts.vocab_size, facts.num_new_rows) == ((259, 260, 261), 262, 1)
    model = load_model(section, dtype="float32", device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(model.get_input_embeddings().weight[:261], plain.get_input_embeddings().weight)


ADAPTERS = {
    "full": FullAdapter(),
    "lora": LoraAdapter(rank=4),
    "lora, embedding whole": LoraAdapter(rank=4, modules_to_save=["embed_tokens"]),
    "lora, both whole": LoraAdapter(rank=4, modules_to_save=["embed_tokens", "lm_head"]),
    "lora, others too": LoraAdapter(rank=4, trainable_token_indices=[256, 260]),
}


@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in ADAPTERS), ("full", True), ("lora", True)])
def test_planned_tensors_are_those_that_are_trained(name, tied, tmp_path):
    adapter = ADAPTERS[name]
    section = section_of(saved(tmp_path, tied=tied), **TOOLS)
    facts = probe_model(section)
    model = load_model(section, dtype="bfloat16", device="cpu")
    trained = attach_adapter(model, adapter, seed=0, new_tokens=facts.new_tokens)
    keep_trained(trained, "float32")
    real = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    planned = trained_tensors(facts, adapter)
    assert sorted(map(tuple, planned.values())) == sorted(tuple(parameter.shape) for parameter in real)
    assert num_trainable_params(facts, adapter) == sum(parameter.numel() for parameter in real)
    if isinstance(adapter, LoraAdapter):
        assert adapters_bytes(planned, adapter) == sum(parameter.nbytes for parameter in real)
    optim = torch.optim.AdamW(real, fused=True)
    for parameter in real:
        parameter.grad = torch.zeros_like(parameter)
    optim.step()
    states = [value for state in optim.state.values() for value in state.values()]
    assert states_bytes(planned, "adamw_torch_fused") == sum(value.nbytes for value in states)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_new_rows_are_peft_s(tied, tmp_path):
    section = section_of(saved(tmp_path, tied=tied), **TOOLS)
    ids = torch.tensor([[5, 259, 7, 260, 261, 9]])
    model = load_model(section, dtype="float32", device="cpu")
    trained = attach_adapter(model, LoraAdapter(rank=4), seed=0, new_tokens=(259, 260, 261))
    trained(input_ids=ids, labels=ids).loss.backward()
    plain = load_model(section, dtype="float32", device="cpu")
    rows = {"embed_tokens": [259, 260, 261], **({} if tied else {"lm_head": [259, 260, 261]})}
    truth = get_peft_model(
        plain, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", trainable_token_indices=rows)
    )
    truth(input_ids=ids, labels=ids).loss.backward()
    ours, theirs = dict(trained.named_parameters()), dict(truth.named_parameters())
    names = [name for name in theirs if "trainable_tokens_delta" in name]
    assert len(names) == (1 if tied else 2)
    for name in names:
        assert math.isfinite(float(ours[name].grad.norm()))
        assert float(ours[name].grad.norm()) > 0
        torch.testing.assert_close(ours[name].grad, theirs[name].grad)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_chosen_rows_are_peft_s(tied, tmp_path):
    section = section_of(saved(tmp_path, tied=tied))
    ids = torch.tensor([[5, 256, 7, 257, 258, 9]])
    adapter = LoraAdapter(rank=4, trainable_token_indices=[256, 9])
    trained = attach_adapter(load_model(section, dtype="float32", device="cpu"), adapter, seed=0)
    trained(input_ids=ids, labels=ids).loss.backward()
    rows = {"embed_tokens": [256, 9], **({} if tied else {"lm_head": [256, 9]})}
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", trainable_token_indices=rows)
    truth = get_peft_model(load_model(section, dtype="float32", device="cpu"), config)
    truth(input_ids=ids, labels=ids).loss.backward()
    ours, theirs = dict(trained.named_parameters()), dict(truth.named_parameters())
    names = [name for name in theirs if "trainable_tokens_delta" in name]
    assert len(names) == (1 if tied else 2)
    for name in names:
        assert float(ours[name].grad.norm()) > 0
        torch.testing.assert_close(ours[name].grad, theirs[name].grad)


def test_a_chosen_token_that_the_model_lacks_is_refused(tmp_path):
    wanted = recipe(
        model={"path": str(saved(tmp_path))}, adapter={"type": "lora", "trainable_token_indices": [256, 259]}
    )
    with pytest.raises(PlanError, match=r"adapter\.trainable_token_indices: 259 of 259 tokens; ids are 0 to 258"):
        resolve(wanted, LAPTOP, probe_model(wanted.model), ROWS)


def test_an_adapter_is_saved_without_the_tables(tmp_path):
    section = section_of(saved(tmp_path / "model"), **TOOLS)
    model = load_model(section, dtype="float32", device="cpu")
    attach_adapter(model, LoraAdapter(rank=4), seed=0, new_tokens=(259, 260, 261)).save_pretrained(tmp_path / "saved")
    from safetensors.torch import load_file

    sizes = {name: len(tensor) for name, tensor in load_file(tmp_path / "saved" / "adapter_model.safetensors").items()}
    assert max(sizes.values()) < 259
    assert sum(name.endswith("trainable_tokens_delta") for name in sizes) == 2


def test_a_token_that_is_there_already_is_refused(tmp_path):
    section = {"path": str(saved(tmp_path)), "add_tokens": ["<tool>", "<|im_start|>"]}
    wanted = recipe(model=section)
    with pytest.raises(PlanError, match=r"model\.add_tokens: <\|im_start\|> is a token of .* already; remove it"):
        resolve(wanted, LAPTOP, probe_model(wanted.model), ROWS)


def test_a_token_is_either_special_or_not():
    model = {"path": "pico", "add_tokens": ["<a>"], "add_special_tokens": ["<a>"]}
    with pytest.raises(RecipeError, match="<a> is in add_special_tokens too"):
        load_recipe({"model": model, "data": "x.jsonl"})


def test_rows_beside_an_adapter_are_not_divided(tmp_path):
    from tests.estimates.shapes import H100

    two = H100.model_copy(update={"accelerators": H100.accelerators * 2})
    wanted = recipe(model={"path": str(saved(tmp_path)), **TOOLS}, parallel={"strategy": "fsdp2"})
    with pytest.raises(PlanError, match="PEFT reads token rows from the unsharded embedding"):
        resolve(wanted, two, probe_model(wanted.model), ROWS)
    full = recipe(model=dict(wanted.model), parallel={"strategy": "zero3"}, adapter="full")
    with pytest.raises(PlanError, match="embedding and head cannot be resized for new tokens"):
        resolve(full, two.model_copy(update={"deepspeed": True}), probe_model(full.model), ROWS)


def test_the_plan_says_where_new_tokens_lie_and_what_is_trained(tmp_path):
    wanted = recipe(model={"path": str(saved(tmp_path, vocab_size=261)), **TOOLS})
    plan = resolve(wanted, LAPTOP, probe_model(wanted.model), ROWS)
    (reason,) = (reason for reason in plan.reasons if reason.topic == "tokens")
    assert reason.choice == "3 added, vocabulary 262"
    assert "1 new rows initialized near the mean of the others and 2 rows that the tokenizer did not use" in reason.why
    assert "trainable_token_indices" in reason.why
    assert plan.new_tokens == (259, 260, 261)
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size <= 259
