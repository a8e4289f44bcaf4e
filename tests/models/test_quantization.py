"""Experts in 4 bits: what is computed with them, what is kept of them, and how an adapter is trained on them."""

from copy import copy

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from transformers import AutoModelForCausalLM

from benchmarks.tiny_models import tiny_model
from tests.tiny import save_in_mxfp4
from tunekit.models.fusion.fuse import fuse
from tunekit.models.load import attach_adapter, load_model
from tunekit.models.quantization import Mxfp4, Nf4, Stack
from tunekit.recipe.sections.adapters import LoraAdapter, QloraAdapter
from tunekit.recipe.sections.model import ModelSection

FAMILIES = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1},
    "granitemoe": {},
    "qwen3_5_moe": {},
    "lfm2_moe": {"num_dense_layers": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "moe"]},
    "ernie4_5_moe": {},
    "minimax_m2": {},
    "qwen3_next": {},
}
"""Types, and changes that give their tiny models experts: with and without gate, transposed, with biases, beside shared
experts, below a multimodal model."""


def stack_of(*shape: int, seed: int = 0, quant_type: str = "nf4") -> tuple[Stack, torch.Tensor]:
    """A stack, and its values."""
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    packed, state = quantize_4bit(dense, quant_type=quant_type, compress_statistics=True)
    return Stack(Nf4(packed, state)), values_of(packed, state)


def values_of(packed, state):
    """Return the values read in rows of a block each: with AVX-512 bitsandbytes misreads rows that end within one."""
    shape, blocks = state.shape, copy(state)
    blocks.shape = torch.Size((len(state.absmax), 64))
    indices = torch.zeros(len(state.absmax) * 32, dtype=torch.uint8)
    indices[: packed.numel()] = packed.flatten()
    return dequantize_4bit(indices, blocks).flatten()[: shape.numel()].view(shape)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved tiny models by family."""
    saved = {}
    for family, changes in FAMILIES.items():
        saved[family] = tmp_path_factory.mktemp(family)
        tiny_model(family, **changes).save_pretrained(saved[family])
    return saved


def loaded(folder, adapter=None):
    section = ModelSection(path=str(folder))
    return load_model(section, dtype="float32", device="cpu", quantization=adapter)


def dense_twin(quantized, folder):
    """The model of a folder with the values that another one has in 4 bits."""
    model, parameters = loaded(folder), dict(quantized.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            other = parameters[name]
            if isinstance(other, Stack):
                parameter.copy_(other.dense())
            else:
                state = vars(other).get("quant_state")
                parameter.copy_(other if state is None else values_of(other.data, state))
    return model


def adapted(model, adapter):
    model = attach_adapter(model, adapter, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def step_of(model):
    """The loss of some rows, and the gradients of what is trained."""
    ids = torch.randint(0, 200, (2, 24), generator=torch.Generator().manual_seed(2))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def assert_same(one, other):
    for mine, theirs in zip((one[0], *one[1]), (other[0], *other[1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_4_bits_train_as_dense_ones_of_their_values(family, folders):
    adapter = QloraAdapter(rank=8)
    quantized = loaded(folders[family], adapter)
    assert any(isinstance(parameter, Stack) for parameter in quantized.parameters())
    dense = dense_twin(quantized, folders[family])
    assert_same(step_of(adapted(quantized, adapter)), step_of(adapted(dense, adapter)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2", "qwen3_next"])
@pytest.mark.parametrize("adapter", [LoraAdapter(rank=8), QloraAdapter(rank=8)], ids=["lora", "qlora"])
def test_fused_updates_of_experts_are_those_of_peft(adapter, family, folders):
    quantization = adapter if isinstance(adapter, QloraAdapter) else None
    plain, fused = (adapted(loaded(folders[family], quantization), adapter) for _ in range(2))
    report = fuse(fused)
    assert [line for line in report.fused if line.form == "stack of experts with a low-rank update"]
    assert_same(step_of(fused), step_of(plain))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_matrix_as_large_as_all_experts_is_kept(checkpointing, folders):
    adapter = QloraAdapter(rank=24)
    model = adapted(loaded(folders["qwen3_moe"], adapter), adapter)
    fuse(model)
    if checkpointing:
        model.enable_input_require_grads()
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    shapes = {tuple(each.shape) for each in model.parameters() if isinstance(each, Stack)}
    turned = {(experts, columns, rows) for experts, rows, columns in shapes}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        step_of(model)
    of_experts = [tensor for tensor in kept if tuple(tensor.shape) in shapes | turned]
    assert of_experts or checkpointing
    assert all(isinstance(tensor, Stack) for tensor in of_experts)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_a_stack_is_seen_with_its_values_whatever_is_computed(quant_type):
    stack, values = stack_of(3, 20, 64, quant_type=quant_type)
    x = torch.randn(5, 64)
    assert torch.equal(stack[1], values[1])
    assert torch.equal(x @ stack.transpose(1, 2)[2], x @ values.transpose(1, 2)[2])
    assert torch.equal(stack.transpose(0, 1), values.transpose(0, 1))
    assert torch.equal(stack.to(torch.bfloat16), values.to(torch.bfloat16))
    assert isinstance(stack.transpose(-1, -2), Stack) and isinstance(stack.to("cpu", copy=True), Stack)


def test_a_stack_is_not_changed_in_place_without_being_quantized_again():
    stack, values = stack_of(3, 20, 64)
    with pytest.raises(TypeError, match=r"mul_.* would change quantized weights in place"):
        stack.mul_(2)
    update = torch.randn(3, 20, 64)
    stack += update
    expected, state = quantize_4bit(values + update, quant_type="nf4", compress_statistics=True)
    assert torch.equal(stack.dense(), values_of(expected, state))


@pytest.fixture(scope="module")
def published_in_mxfp4(tmp_path_factory):
    """A tiny gpt-oss as it is published: experts as blocks and scales."""
    folder = tmp_path_factory.mktemp("mxfp4")
    save_in_mxfp4(tiny_model("gpt_oss", hidden_size=64, intermediate_size=32), folder)
    return folder


def test_experts_published_in_mxfp4_stay_so_below_an_adapter(published_in_mxfp4):
    """Against the model that transformers makes dense."""
    adapter = QloraAdapter(rank=8, target_modules=["q_proj", "v_proj"])
    kept, dense = loaded(published_in_mxfp4, adapter), loaded(published_in_mxfp4)
    stacks = [parameter for parameter in kept.parameters() if isinstance(parameter, Stack)]
    assert len(stacks) == 2 * kept.config.num_hidden_layers
    assert all(isinstance(stack.matrices, Mxfp4) for stack in stacks)
    assert not any(isinstance(parameter, Stack) for parameter in dense.parameters())
    expected = AutoModelForCausalLM.from_pretrained(published_in_mxfp4, dtype=torch.float32)
    for name, parameter in expected.named_parameters():
        for model in (kept, dense):
            mine = model.get_parameter(name)
            assert torch.equal(mine.dense() if isinstance(mine, Stack) else mine, parameter)
    assert_same(step_of(adapted(kept, adapter)), step_of(adapted(expected, adapter)))


@pytest.mark.parametrize("shape", [(3, 5, 48), (2, 3, 16), (7, 36), (3, 20)])
def test_rows_that_end_within_a_block_have_the_values_of_the_code(shape):
    """The values by the formula, in float64."""
    stack, _ = stack_of(*shape)
    packed, state = stack.matrices.packed.flatten(), stack.matrices.state
    indices = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: stack.numel()]
    nested = (
        state.state2.code.double()[state.absmax.int()]
        * state.state2.absmax.double().repeat_interleave(256)[: len(state.absmax)]
    )
    scales = (nested + state.offset.double()).repeat_interleave(64)[: stack.numel()]
    expected = state.code.double()[indices.int()] * scales
    torch.testing.assert_close(stack.dense().double().flatten(), expected, rtol=1e-6, atol=1e-7)
