"""Adapters that begin with what rows or 4 bits tell, beside PEFT's own, and what is saved of them."""

import json
import random

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import CordaConfig, EvaConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.utils.loftq_utils import _low_rank_decomposition
from safetensors.torch import load_file

from tests.models.test_base_parts import OPTIONS, base, logits_of, move, saved
from tunekit.errors import DataError
from tunekit.models.base_parts import load_plain
from tunekit.models.initial import Document, Sources, draw
from tunekit.models.load import attach_adapter, load_model, with_trained_values
from tunekit.probe.origin import in_folder
from tunekit.recipe.sections.adapters import LoraAdapter, QloraAdapter
from tunekit.recipe.sections.model import ModelSection

pytestmark = pytest.mark.filterwarnings("ignore")

COMMON = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def documents(num=12, counted=0.6):
    draws = random.Random(1)
    rows = [[draws.randrange(71) for _ in range(draws.randrange(12, 20))] for _ in range(num)]
    return [Document(ids, [token if draws.random() < counted else -100 for token in ids]) for ids in rows]


def sources(rows=None, weights=base):
    return Sources(lambda: documents() if rows is None else rows, weights)


def same(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("method", ["ipm", "kpm"])
@pytest.mark.parametrize("option", OPTIONS)
def test_corda_begins_as_pefts(option, method):
    adapter = LoraAdapter(rank=4, alpha=6, init_lora_weights="corda", corda_method=method, **OPTIONS[option])
    ours, plain = attach_adapter(base(), adapter, seed=0, sources=sources()), base()
    linears = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    settings = {"r": 4, "lora_alpha": 6, "init_lora_weights": "corda", "task_type": "CAUSAL_LM", **OPTIONS[option]}
    config = LoraConfig(corda_config=CordaConfig(corda_method=method), target_modules=linears.split("|"), **settings)
    rows = documents()
    preprocess_corda(plain, config, lambda: [plain(input_ids=torch.tensor([row.ids])) for row in rows])
    assert same(ours, get_peft_model(plain, config))
    torch.testing.assert_close(logits_of(ours), logits_of(base()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_corda_saves_is_for_the_base_as_it_was_and_is_read_again_to_the_bit(dtype, tmp_path):
    adapter = LoraAdapter(rank=4, alpha=6, init_lora_weights="corda")
    model = move(attach_adapter(base(dtype), adapter, seed=0, sources=sources()))
    folder = saved(model, adapter, tmp_path)
    if dtype == torch.float32:
        loaded = PeftModel.from_pretrained(base(), folder)
        torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=1e-4, atol=1e-4)
        assert (logits_of(loaded) - logits_of(base())).abs().max() > 0.05
    again = attach_adapter(base(dtype), adapter, seed=1)
    load_plain(again, folder)
    assert same(again, model)
    saved(again, adapter, tmp_path / "again")
    first, second = (path / "adapter_model.safetensors" for path in (folder, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()


def padded(rows, length=20):
    return {
        "input_ids": torch.tensor([row.ids + [0] * (length - len(row.ids)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row.ids) + [0] * (length - len(row.ids)) for row in rows]),
        "labels": torch.tensor([row.labels + [-100] * (length - len(row.ids)) for row in rows]),
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("rho", [1.0, 2.0])
def test_eva_begins_as_pefts_from_tokens_that_count(rho):
    rows = documents(counted=0.9)
    adapter = LoraAdapter(rank=4, alpha=6, init_lora_weights="eva", rho=rho)
    ours = attach_adapter(base(), adapter, seed=0, sources=sources(rows))
    config = LoraConfig(r=4, lora_alpha=6, init_lora_weights="eva", eva_config=EvaConfig(rho=rho), **COMMON)
    theirs = get_peft_model(base(), config)
    # Each of these rows has tokens enough for a batch of its own.
    batches = [padded([row], len(row.ids)) for row in rows]
    initialize_lora_eva_weights(theirs, batches, show_progress_bar=False)
    assert same(ours, theirs)
    ranks = [module.r["default"] for module in ours.modules() if isinstance(module, LoraLayer)]
    assert sum(ranks) == 4 * 14 and max(ranks) <= 4 * rho and (len(set(ranks)) > 1) is (rho > 1)
    torch.testing.assert_close(logits_of(ours), logits_of(base()))


def test_eva_does_not_see_tokens_that_do_not_count():
    """Inputs of the first projections depend on their own token alone."""
    adapter = LoraAdapter(rank=2, init_lora_weights="eva", rho=1.0, target_modules=["layers.0.self_attn.q_proj"])
    rows = documents()
    moved = [[(i + 7 * (label < 0)) % 71 for i, label in zip(row.ids, row.labels, strict=True)] for row in rows]
    others = [Document(ids, row.labels) for ids, row in zip(moved, rows, strict=True)]
    assert others != rows
    first, second = (attach_adapter(base(), adapter, seed=0, sources=sources(each)) for each in (rows, others))
    assert same(first, second)


def test_what_eva_saves_is_plain_lora_that_states_its_ranks(tmp_path):
    adapter = LoraAdapter(rank=4, alpha=6, init_lora_weights="eva")
    model = move(attach_adapter(base(), adapter, seed=0, sources=sources()))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["init_lora_weights"] is True
    loaded = PeftModel.from_pretrained(base(), tmp_path)
    torch.testing.assert_close(logits_of(loaded), logits_of(model))
    section = in_folder(adapter, tmp_path)
    assert section.init_lora_weights is True and len(set(section.rank_pattern.values())) > 1
    again = attach_adapter(base(), section, seed=1)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits_of(again), logits_of(model))


def test_eva_says_that_rows_are_too_few():
    adapter = LoraAdapter(rank=8, init_lora_weights="eva")
    with pytest.raises(DataError, match=r"tokens of 1 documents are in the loss; eva needs 16, its largest rank"):
        attach_adapter(base(), adapter, seed=0, sources=sources(documents(1)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loftq")
    base().save_pretrained(folder)
    return folder


def loaded(folder, quantization=None):
    return load_model(ModelSection(path=str(folder)), dtype="float32", device="cpu", quantization=quantization).eval()


@pytest.mark.parametrize("alpha", [4, 32])
def test_loftq_begins_with_what_4_bits_lose(alpha, folder):
    adapter = QloraAdapter(rank=4, alpha=alpha, init_lora_weights="loftq")
    whole = loaded(folder)
    model = attach_adapter(loaded(folder, adapter), adapter, seed=0, sources=sources(weights=lambda: loaded(folder)))
    name = "model.layers.1.mlp.up_proj"
    layer = model.get_base_model().get_submodule(name)
    from bitsandbytes.functional import dequantize_4bit

    lost = whole.get_submodule(name).weight - dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    expected = _low_rank_decomposition(lost, reduced_rank=4)
    update = layer.get_delta_weight("default")
    torch.testing.assert_close(update, expected["L"] @ expected["R"])
    assert (lost - update).norm() < 0.9 * lost.norm()
    if alpha == 4:
        torch.testing.assert_close(layer.lora_A["default"].weight, expected["R"])
        torch.testing.assert_close(layer.lora_B["default"].weight, expected["L"])


def test_what_loftq_saves_is_merged_into_the_values_that_it_was_trained_with(folder, tmp_path):
    adapter = QloraAdapter(rank=4, init_lora_weights="loftq")
    model = attach_adapter(loaded(folder, adapter), adapter, seed=0, sources=sources(weights=lambda: loaded(folder)))
    move(model).save_pretrained(tmp_path)
    wanted = logits_of(model)
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(loaded(folder, adapter), tmp_path)), wanted)
    whole = PeftModel.from_pretrained(loaded(folder), tmp_path)
    assert (logits_of(whole) - wanted).abs().max() > 0.01
    with_trained_values(whole, adapter)
    torch.testing.assert_close(logits_of(whole), wanted, rtol=1e-4, atol=1e-4)
    assert load_file(tmp_path / "adapter_model.safetensors").keys()


def test_rows_are_drawn_by_the_seed_and_packed_ones_taken_apart():
    rows = [{"input_ids": [n, n, n, n + 1], "labels": [n, n, n, -100], "seq_lengths": [3, 1]} for n in range(9)]
    first, again, other = (draw(rows, 3, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 6 and [len(document.ids) for document in first[:2]] == [3, 1]
    assert len(draw(rows, 99, 0)) == 18
