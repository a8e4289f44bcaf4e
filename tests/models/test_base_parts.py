"""Adapters that begin with parts of the base weights: what is saved of them, beside PEFT's own conversion."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tunekit.models.base_parts import load_plain, save_plain
from tunekit.models.load import attach_adapter
from tunekit.recipe.sections.adapters import LoraAdapter

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.arange(48).reshape(2, 24)
STARTS = ["pissa", "pissa_niter_4", "olora"]
OPTIONS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "ranks": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 7.0}},
}


def base(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"vocab_size": 71, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def section(start, **options):
    return LoraAdapter(rank=4, alpha=6, init_lora_weights=start, **options)


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def move(model):
    """Train an adapter a little."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def trained(adapter, **how):
    """A model whose adapter is another one than it began with."""
    return move(attach_adapter(base(**how), adapter, seed=0))


def saved(model, adapter, folder):
    model.save_pretrained(folder)
    save_plain(model, adapter, folder)
    return folder


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("start", STARTS)
def test_what_is_saved_applies_to_the_base_as_it_was(start, option, tmp_path):
    adapter = section(start, **OPTIONS[option])
    begun = attach_adapter(base(), adapter, seed=0)
    torch.testing.assert_close(logits_of(begun), logits_of(base()), rtol=1e-4, atol=1e-5)
    rest = begun.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    assert (rest - base().model.layers[0].self_attn.q_proj.weight).abs().max() > 1e-3
    model = trained(adapter)
    loaded = PeftModel.from_pretrained(base(), saved(model, adapter, tmp_path))
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=1e-4, atol=1e-5)
    assert (logits_of(loaded) - logits_of(base())).abs().max() > 0.05


@pytest.mark.parametrize("option", ["plain", "rslora"])
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_it_is_what_peft_makes_of_it(start, option, tmp_path):
    adapter = section(start, **OPTIONS[option])
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **OPTIONS[option]}
    theirs = get_peft_model(base(), LoraConfig(init_lora_weights=start, **settings))
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "initial")
    model = trained(adapter)
    theirs.load_state_dict(model.state_dict())
    theirs.save_pretrained(tmp_path / "theirs", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    saved(model, adapter, tmp_path / "ours")
    ours, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in ours)
    ours, expected = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs"))
    assert {name: ours[name] for name in ("r", "lora_alpha")} == {
        "r": expected["r"],
        "lora_alpha": pytest.approx(expected["lora_alpha"]),
    }
    assert ours["init_lora_weights"] is expected["init_lora_weights"] is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", STARTS)
def test_what_is_read_again_is_the_same_to_the_bit(start, dtype, tmp_path):
    adapter = section(start)
    model = trained(adapter, dtype=dtype)
    again = attach_adapter(base(dtype), adapter, seed=0)
    load_plain(again, saved(model, adapter, tmp_path))
    before, after = model.state_dict(), again.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    saved(again, adapter, tmp_path / "again")
    assert (tmp_path / "again" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "adapter_model.safetensors"
    ).read_bytes()


def test_a_device_that_begins_otherwise_gets_the_base_of_what_it_reads(tmp_path):
    """Another seed makes another fast SVD, as another device would."""
    adapter = section("pissa_niter_4")
    model = trained(adapter)
    other = attach_adapter(base(), adapter, seed=1)
    assert (logits_of(other) - logits_of(model)).abs().max() > 0.05
    load_plain(other, saved(model, adapter, tmp_path))
    torch.testing.assert_close(logits_of(other), logits_of(model), rtol=1e-4, atol=1e-5)
    saved(other, adapter, tmp_path / "again")
    torch.testing.assert_close(
        load_file(tmp_path / "again" / "adapter_model.safetensors"), load_file(tmp_path / "adapter_model.safetensors")
    )


@pytest.mark.parametrize("start", ["gaussian", "orthogonal"])
def test_other_starts_are_those_of_peft_and_leave_the_base_alone(start):
    model = attach_adapter(base(), section(start), seed=5)
    config = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=start)
    plain = base()
    torch.manual_seed(5)
    theirs = get_peft_model(plain, config).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())
    weights, frozen = base().state_dict(), model.get_base_model().state_dict()
    frozen = {name.replace("base_layer.", ""): tensor for name, tensor in frozen.items() if "lora_" not in name}
    assert all(torch.equal(frozen[name], weights[name]) for name in weights)
    torch.testing.assert_close(logits_of(model), logits_of(base()), rtol=1e-4, atol=1e-5)
