"""Bytes that layers keep for the backward pass where tunekit's kernels compute them, counted in real models."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.estimates.oracle import Step, facts_of
from tunekit.estimates.memory.activations import activation_bytes_per_layer, layers_of, products_of
from tunekit.estimates.models.model_config import model_types
from tunekit.models.fusion.fuse import fuse
from tunekit.models.load import keep_trained, peft_config
from tunekit.models.step_trace import LiveBytes
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

ADAPTERS = {
    "lora": LoraAdapter(rank=8),
    "dropout": LoraAdapter(rank=8, dropout=0.1),
    "attention": LoraAdapter(rank=8, target_modules=["q_proj", "v_proj"]),
    "full": FullAdapter(),
}
TOKENS = 96


def step_of(family, adapter, num_layers, *, wide=1, length=TOKENS, checkpointing=False):
    sizes = {
        "vocab_size": 320, "hidden_size": 64 * wide, "intermediate_size": 160 * wide, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16 * wide, "pad_token_id": 0,
    }  # fmt: skip
    return Step(family, tuple(sizes.items()), adapter, 1, length, checkpointing=checkpointing)


def built(step):
    """The model of a step, and the decoder in it."""
    from peft import get_peft_model

    torch.manual_seed(0)
    model = base = AutoModelForCausalLM.from_config(step.config(), dtype=torch.bfloat16)
    if isinstance(step.adapter, LoraAdapter):
        model = get_peft_model(model, peft_config(step.adapter, model))
    keep_trained(model, "float32")
    if step.checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if isinstance(step.adapter, LoraAdapter):
            base.enable_input_require_grads()
    return model.train(), base.model


def kept_bytes(step):
    """Bytes besides the weights that autograd keeps of the decoder's forward pass."""
    model, decoder = built(step)
    report = fuse(model, dtype=torch.bfloat16)
    saved_tensors = {}

    def pack(tensor):
        saved_tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.arange(TOKENS)[None]
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        decoder(input_ids=ids, use_cache=False)
    num_bytes = sum(saved.untyped_storage().nbytes() for place, saved in saved_tensors.items() if place not in own)
    return num_bytes, report


@pytest.mark.sample(3)
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


def backward_peak(step, *, kernels):
    """Most bytes besides the weights in the backward pass of the decoder, counted and planned."""
    model, decoder = built(step)
    if kernels:
        fuse(model, dtype=torch.bfloat16)
    tracker = LiveBytes([*model.parameters(), *model.buffers()])
    with tracker:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = decoder(input_ids=torch.zeros(1, step.length, dtype=torch.long), use_cache=False).last_hidden_state
        tracker.enter("backward")
        hidden.backward(torch.ones_like(hidden))
    products = products_of(facts_of(step), step.adapter, "bfloat16", kernels=kernels)
    how = {"gradient_checkpointing": step.checkpointing, "accumulates": False}
    layers = layers_of(products, step.length, None, None, **how)
    return tracker.peaks["backward"], max(layers.kept + layers.recomputed, layers.first) + layers.working


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapter", ["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_backward_pass_of_fused_layers_is_planned_as_well_as_that_of_torch(family, adapter, checkpointing):
    """Which traces are compared with: head, final norm and gradients of weights are in neither plan here."""
    step = step_of(family, ADAPTERS[adapter], 6, wide=4, length=1024, checkpointing=checkpointing)
    (torchs, torchs_plan), (fused, fused_plan) = (backward_peak(step, kernels=kernels) for kernels in (False, True))
    assert fused < torchs
    assert fused - fused_plan <= torchs - torchs_plan + 0.01 * torchs
