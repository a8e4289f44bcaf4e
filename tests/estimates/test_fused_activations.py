"""What layers keep for the backward pass where tunekit's kernels compute them, counted in real models."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.estimates.oracle import Step, facts_of
from tunekit.estimates.memory.activations import activation_bytes_per_layer, products_of
from tunekit.estimates.models.model_config import model_types
from tunekit.models.fusion.fuse import fuse
from tunekit.models.load import keep_trained, peft_config
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

ADAPTERS = {
    "lora": LoraAdapter(rank=8),
    "dropout": LoraAdapter(rank=8, dropout=0.1),
    "attention": LoraAdapter(rank=8, target_modules=["q_proj", "v_proj"]),
    "full": FullAdapter(),
}
TOKENS = 96


def step_of(family, adapter, num_layers):
    sizes = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    }  # fmt: skip
    return Step(family, tuple(sizes.items()), adapter, 1, TOKENS, checkpointing=False)


def kept_bytes(step):
    """Bytes besides the weights that autograd keeps of the decoder's forward pass."""
    from peft import get_peft_model

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(step.config(), dtype=torch.bfloat16)
    if isinstance(step.adapter, LoraAdapter):
        model = get_peft_model(model, peft_config(step.adapter, model))
    keep_trained(model, "float32")
    report = fuse(model, dtype=torch.bfloat16)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.arange(TOKENS)[None]
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    decoder = (model.base_model.model if isinstance(step.adapter, LoraAdapter) else model).model
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        decoder(input_ids=ids, use_cache=False)
    return sum(one.untyped_storage().nbytes() for place, one in kept.items() if place not in own), report


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", sorted(model_types().fused))
def test_a_fused_layer_keeps_what_is_planned(family, adapter):
    chosen = ADAPTERS[adapter]
    if family == "phi3" and adapter == "attention":
        chosen = LoraAdapter(rank=8, target_modules=["qkv_proj"])
    steps = [step_of(family, chosen, num_layers) for num_layers in (6, 12)]
    (few, report), (many, _) = map(kept_bytes, steps)
    assert all(name in report.words() for name in ("self-attention", "gated MLP", "RMSNorm")), report.words()
    products = products_of(facts_of(steps[0]), chosen, "bfloat16", kernels=True)
    assert products.fused
    a_layer = activation_bytes_per_layer(products, None) + products.cast_bytes / 6 / TOKENS
    assert (many - few) / 6 / TOKENS == pytest.approx(a_layer, rel=0.01)
