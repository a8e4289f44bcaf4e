"""Frozen towers are computed without gradients, however the model around them is trained."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.vision import FAMILIES
from tunekit.models.load import attach_adapter
from tunekit.models.towers import towers
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter


def adapted(adapter, family="llava"):
    """A tiny model with its adapter, its outputs of towers, and its inputs."""
    config, processor = FAMILIES[family]()
    base = AutoModelForImageTextToText.from_config(config)
    model = attach_adapter(base, adapter, seed=0)
    base.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    outputs = []
    for name in towers(base):
        base.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    from PIL import Image

    inputs = processor(text=[processor.image_token + " hi"], images=[[Image.new("RGB", (28, 28))]], return_tensors="pt")
    return model.train(), outputs, inputs


@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=2)], ids=["full", "lora"])
def test_autograd_keeps_nothing_of_a_tower_although_checkpointing_asks_for_gradients(adapter):
    model, outputs, inputs = adapted(adapter)
    loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
    tensors = [value for output in outputs for value in (output.values() if isinstance(output, dict) else [output])]
    assert tensors
    assert not any(value.requires_grad for value in tensors if isinstance(value, torch.Tensor))
    loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_a_projector_that_is_trained_gets_its_gradient():
    model, _, inputs = adapted(LoraAdapter(rank=2, modules_to_save=["multi_modal_projector"]))
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any("multi_modal_projector" in name for name in trained)
    assert not any("vision_tower" in name for name in trained)


def test_gradients_are_on_again_after_a_tower_failed():
    model, _, inputs = adapted(FullAdapter())
    with pytest.raises(ValueError, match="28"):
        model(**inputs | {"pixel_values": inputs["pixel_values"][..., :14]}, use_cache=False)
    assert torch.is_grad_enabled()
