"""Checkpoints that are published quantized: their values, their bytes, and an adapter on them as PEFT trains it.

The values are those that tests/published.py computes in float64 where it writes the files.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from tests.published import GROUP, LAYOUTS, gptq, save_published
from tunekit.errors import ModelError
from tunekit.estimates.memory.states import dequantised_bytes, quantised_bytes, weights_bytes
from tunekit.models.fusion.fuse import fuse
from tunekit.models.load import attach_adapter, load_model
from tunekit.models.quantization import Stack, stored_tensors
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.adapters import LoraAdapter, QloraAdapter
from tunekit.recipe.sections.model import ModelSection

KEPT = ("gptq", "awq", "bitsandbytes_8bit", "bitsandbytes")
GPTQ_KINDS = {
    "8 bits": ({"bits": 8}, {"bits": 8}),
    "version 2": ({"version": 2}, {"checkpoint_format": "gptq_v2"}),
    "one group": ({"group": None}, {"group_size": -1}),
    "in another order": ({"order": True}, {"desc_act": True}),
}
IDS = torch.arange(40).view(2, 20)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folder and values of a checkpoint, by layout."""
    made = {}

    def checkpoint(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp(layout)
            made[layout] = folder, save_published(folder, layout)
        return made[layout]

    return checkpoint


def loaded(folder, adapter=None, dtype="float32"):
    return load_model(ModelSection(path=str(folder)), dtype=dtype, device="cpu", quantization=adapter)


def values_of(model):
    values = dict(model.named_parameters())
    return {name: value.dense() if isinstance(value, Stack) else value.detach() for name, value in values.items()}


def assert_values(model, values):
    mine = values_of(model)
    assert mine.keys() == values.keys()
    for name, value in values.items():
        torch.testing.assert_close(mine[name], value, rtol=2e-7, atol=0)


@pytest.mark.parametrize("layout", [*LAYOUTS, "bitsandbytes"])
def test_weights_are_made_dense_with_the_published_values(layout, published):
    folder, values = published(layout)
    model = loaded(folder)
    assert_values(model, values)
    assert "quantization_config" not in vars(model.config)


@pytest.mark.parametrize("layout", ["gptq", "awq", "bitsandbytes_8bit"])
def test_kept_weights_have_the_published_values(layout, published):
    folder, values = published(layout)
    assert_values(loaded(folder, QloraAdapter()), values)


@pytest.mark.parametrize("kind", GPTQ_KINDS)
def test_other_kinds_of_gptq_are_read(kind, tmp_path):
    changes, stated = GPTQ_KINDS[kind]

    def store(weight):
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if "order" in changes else None
        group = changes.get("group", GROUP) or inputs
        return gptq(weight, bits=changes.get("bits", 4), group=group, order=order, version=changes.get("version", 1))

    values = save_published(tmp_path, "gptq", store, **stated)
    for adapter in (None, QloraAdapter()):
        assert_values(loaded(tmp_path, adapter), values)
    assert held_bytes(loaded(tmp_path, QloraAdapter())) == quantised_bytes(facts(tmp_path), QloraAdapter())


def test_groups_out_of_order_are_refused_where_config_json_has_them_in_order(tmp_path):
    save_published(tmp_path, "gptq", lambda weight: gptq(weight, order=torch.arange(weight.shape[1]).flip(0)))
    with pytest.raises(ModelError, match=r"the groups of .* are out of order"):
        loaded(tmp_path)


def facts(folder):
    return probe_model(ModelSection(path=str(folder)))


def held_bytes(model):
    """Bytes of what linear layers of the decoder are stored as."""
    tensors = [
        tensor
        for name, parameter in model.named_parameters()
        if "_proj" in name
        for tensor in stored_tensors(parameter)
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("layout", KEPT)
def test_plans_count_kept_weights_to_the_byte(layout, published):
    folder, _ = published(layout)
    model, adapter = facts(folder), QloraAdapter()
    kept = loaded(folder, adapter)
    assert quantised_bytes(model, adapter) == held_bytes(kept)
    everything = [tensor for parameter in kept.parameters() for tensor in stored_tensors(parameter)]
    assert weights_bytes(model, adapter, "float32") == sum(one.numel() * one.element_size() for one in everything)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    sketched = sketch(folder)
    (folder / "elsewhere").rename(folder / "model.safetensors")
    assert sketched.packed == model.packed


def sketch(folder):
    from tunekit.probe.model import sketch_model

    return sketch_model(ModelSection(path=str(folder)))


def test_layers_that_a_checkpoint_leaves_out_are_counted_whole(tmp_path):
    from safetensors.torch import load_file, save_file

    values = save_published(tmp_path, "bitsandbytes")
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj"
    tensors = {key: value for key, value in tensors.items() if not key.startswith(name)}
    save_file(tensors | {f"{name}.weight": values[f"{name}.weight"]}, tmp_path / "model.safetensors")
    assert len(facts(tmp_path).packed.weights) == 13


def step_of(model):
    loss = model.train()(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.requires_grad)]


def by_plain_peft(values, adapter):
    """Loss and gradients of PEFT's adapter on transformers' model of the published values."""
    from tests.tiny import make_tokenizer

    config = facts_config(len(make_tokenizer()))
    model = LlamaForCausalLM(config)
    model.load_state_dict(values)
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    how = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, how)


def facts_config(vocab_size):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=vocab_size, num_key_value_heads=2, max_position_embeddings=256, **sizes)


def with_updates(model):
    """The model with matrices B that are not zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                scale = 0.05 if "lora_B" in name else 0.2
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("layout", KEPT)
def test_a_step_on_kept_weights_is_that_of_plain_peft(layout, checkpointing, published):
    folder, values = published(layout)
    adapter = QloraAdapter(rank=4)
    expected = step_of(with_updates(by_plain_peft(values, adapter)))
    for fuses in (False, True):
        model = with_updates(attach_adapter(loaded(folder, adapter), adapter, seed=0))
        if fuses:
            report = fuse(model)
            kept = [line for line in report.kept if "no kernel for weights in" in str(line)]
            assert bool(kept) == (layout != "bitsandbytes")
        if checkpointing:
            model.enable_input_require_grads()
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        for mine, theirs in zip(step_of(model), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", ["gptq", "awq", "bitsandbytes_8bit"])
def test_no_dense_weight_is_kept_for_the_backward_pass(layout, published):
    folder, values = published(layout)
    adapter = QloraAdapter(rank=4)
    model = attach_adapter(loaded(folder, adapter), adapter, seed=0).train()
    shapes = {tuple(value.shape) for name, value in values.items() if "_proj" in name}
    shapes |= {(columns, rows) for rows, columns in shapes}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        model(input_ids=IDS, labels=IDS).loss.backward()
    of_weights = [tensor for tensor in saved if tuple(tensor.shape) in shapes]
    assert of_weights
    assert all(isinstance(tensor, Stack) for tensor in of_weights)


def test_the_largest_weight_is_dense_for_a_time(published):
    model = facts(published("gptq")[0])
    assert dequantised_bytes(model, QloraAdapter(), "bfloat16") == (2 + 16) * 64 * 128
    assert dequantised_bytes(model, LoraAdapter(), "bfloat16") == 0


def test_kept_weights_are_not_written(published):
    stack = loaded(published("gptq")[0], QloraAdapter()).get_parameter("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(TypeError, match="weights in Gptq cannot be changed"):
        stack.data.add_(1)
