"""Frozen towers are computed without gradients, and trained ones get some in every backward pass."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.vision import FAMILIES
from tunekit.estimates.models.towers import part_of
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


TOWERS = {
    "full": FullAdapter(vision_tower="full", projector="full"),
    "lora": LoraAdapter(rank=2, vision_tower="lora", projector="lora"),
    "projector": FullAdapter(language_model="frozen", projector="full"),
}


@pytest.mark.parametrize("family", ["llava", "llava_next"])
@pytest.mark.parametrize("name", TOWERS)
def test_all_that_is_trained_beside_text_gets_zeros_from_text_alone(name, family):
    config, processor = FAMILIES[family]()
    base = AutoModelForImageTextToText.from_config(config)
    model = attach_adapter(base, TOWERS[name], seed=0).train()
    inputs = processor.tokenizer(["say hi"], return_tensors="pt")
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    beside = [p for key, p in model.named_parameters() if p.requires_grad and "language_model" not in key]
    beside = [p for p in beside if p is not base.get_output_embeddings().weight]
    assert beside
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in beside)
    text = [p for key, p in model.named_parameters() if p.requires_grad and "language_model" in key]
    assert (name == "projector") == (not text)
    assert all(parameter.grad is not None for parameter in text)


def test_gradients_of_pictures_are_not_lost_beside_the_zeros():
    model, _, inputs = adapted(TOWERS["lora"])
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name and "language_model" not in name}
    assert {part_of(name) for name in grads} == {"vision_tower", "projector"}
    assert all(grad.any() for grad in grads.values())


@pytest.mark.parametrize(("layer", "num_read"), [(-1, 2), (-2, 1), (1, 1), ([-2, 0], 1)])
def test_layers_behind_the_one_that_is_read_stay_frozen(layer, num_read):
    config, _ = FAMILIES["llava"]()
    config.vision_feature_layer = layer
    model = attach_adapter(AutoModelForImageTextToText.from_config(config), TOWERS["full"], seed=0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad and ".encoder.layers." in name}
    assert {name.split(".layers.")[1][0] for name in trained} == {str(number) for number in range(num_read)}
    assert not any("post_layernorm" in name for name, p in model.named_parameters() if p.requires_grad)


def test_parts_are_told_by_names():
    parts = {
        "model.visual.blocks.0.attn.qkv": "vision_tower",
        "model.visual.merger.mlp.0": "projector",
        "model.visual.deepstack_merger_list.1.norm": "projector",
        "model.image_newline": "projector",
        "model.embed_audio.embedding_projection": "audio_tower",
        "model.vision_tower.merge.fc1": "vision_tower",
    }
    assert {name: part_of(name) for name in parts} == parts
