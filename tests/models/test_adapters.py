"""Adapters on real architectures: which layers have one, and what PEFT reads of them."""

import pytest
import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoConfig, AutoModelForCausalLM

from tunekit.models.load import attach_adapter
from tunekit.recipe.sections.model import LoraAdapter

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
