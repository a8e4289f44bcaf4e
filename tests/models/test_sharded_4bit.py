"""4-bit layers whose weight is a plain parameter of bytes compute what bitsandbytes' own do."""

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch.distributed import destroy_process_group, init_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from tunekit.models.quantization import Nf4, Stack
from tunekit.models.sharded_4bit import divide_bytes, make_shardable, unwritten_4bit


def layer_of(inputs, outputs, *, nested, kind, bias, dtype):
    torch.manual_seed(0)
    layer = Linear4bit(inputs, outputs, bias, dtype, nested, kind)
    values = torch.randn(outputs, inputs)
    layer.weight = Params4bit(values, False, compress_statistics=nested, quant_type=kind, module=layer)
    layer.support_avx512bf16_for_cpu = False
    return layer.to("cpu")


def divided(layer):
    stored = Nf4(layer.weight.detach().as_subclass(torch.Tensor), layer.weight.quant_state)
    divide_bytes(layer, "weight", Stack(stored), stored.packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bytes_compute_what_bitsandbytes_does(nested, kind, bias, dtype):
    layer = layer_of(128, 48, nested=nested, kind=kind, bias=bias, dtype=dtype)
    x = torch.randn(3, 5, 128, requires_grad=True)
    expected = layer(x)
    expected.square().sum().backward()
    gradient, x.grad = x.grad, None
    state = layer.weight.quant_state
    divided(layer)
    output = layer(x)
    output.square().sum().backward()
    assert type(layer.weight) is torch.nn.Parameter
    assert layer.quant_state is state
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    torch.testing.assert_close(x.grad, gradient, rtol=0, atol=0)
    assert type(layer.weight) is torch.nn.Parameter
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1)


def test_what_is_stored_in_another_type_is_divided_in_bytes():
    """As checkpoints in 4 bits that were made for FSDP have it (`bnb_4bit_quant_storage`)."""
    layer = layer_of(128, 48, nested=True, kind="nf4", bias=False, dtype=torch.float32)
    x = torch.randn(3, 128)
    expected = layer(x)
    state = layer.weight.quant_state
    stored = layer.weight.detach().as_subclass(torch.Tensor).view(-1).view(torch.bfloat16).view(-1, 1)
    layer.weight = Params4bit(stored, False, quant_storage=torch.bfloat16, bnb_quantized=True, module=layer)
    layer.weight.quant_state = state
    divided(layer)
    assert (layer.weight.dtype, tuple(layer.weight.shape)) == (torch.uint8, (128 * 48 // 2, 1))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)


def test_a_weight_that_nobody_wrote_has_the_shape_of_one_that_was_read():
    layer = layer_of(130, 49, nested=True, kind="nf4", bias=False, dtype=torch.float32)
    unwritten = unwritten_4bit(layer)
    assert type(unwritten) is Params4bit
    assert (unwritten.shape, unwritten.dtype) == (layer.weight.shape, layer.weight.dtype)
    assert unwritten.quant_type == layer.weight.quant_type
    assert unwritten.compress_statistics == layer.weight.compress_statistics
    assert unwritten.quant_storage == layer.weight.quant_storage
    assert unwritten.requires_grad == layer.weight.requires_grad


def test_scales_survive_the_way_to_the_other_processes():
    layer = layer_of(130, 49, nested=True, kind="nf4", bias=False, dtype=torch.float32)
    x = torch.randn(3, 130)
    model = torch.nn.ModuleList([layer])
    other = layer_of(130, 49, nested=True, kind="nf4", bias=False, dtype=torch.float32)
    divided(other)
    expected = other(x)
    init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        make_shardable(model)
    finally:
        destroy_process_group()
    assert type(layer.weight) is torch.nn.Parameter
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
