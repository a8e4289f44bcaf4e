"""NF4 matrices against bitsandbytes' own, bit for bit: both compute in float32 and round once."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from tests.kernels.interpreter import interpreted
from tunekit.kernels.nf4 import Quantized, dequantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["torch", "triton"])
def path(request):
    with interpreted() if request.param == "triton" else nullcontext():
        yield request.param


def quantized(shape, dtype, block_size=64, *, nested=True, **kwargs):
    """A random matrix as bitsandbytes quantises it, read by us, and dequantised by bitsandbytes."""
    torch.manual_seed(0)
    packed, state = quantize_4bit(
        torch.randn(shape).to(dtype), None, None, block_size, nested, quant_type="nf4", **kwargs
    )
    second = (state.state2.absmax, state.state2.code, state.offset) if nested else (None, None, None)
    matrix = Quantized(packed, state.absmax, state.code, block_size, tuple(state.shape), dtype, *second)
    return matrix, dequantize_4bit(packed, state)


@pytest.mark.parametrize("nested", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("block_size", [64, 128, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_is_that_of_bitsandbytes(path, dtype, block_size, nested):
    # 4810 values: the last block is not full, and with blocks of 64 neither is the last program.
    matrix, expected = quantized((37, 130), dtype, block_size, nested=nested)
    assert torch.equal(dequantize(matrix), expected)


@pytest.mark.parametrize("shape", [(64, 144), (8, 48)])
def test_rows_that_end_within_a_block_are_read_as_they_were_written(path, shape):
    """bitsandbytes 0.50 reads them wrongly on processors with AVX-512, so each value is compared with the table's."""
    matrix, _ = quantized(shape, torch.float32, nested=False)
    halves = torch.stack([matrix.packed.flatten() >> 4, matrix.packed.flatten() & 15], 1).flatten().long()
    assert torch.equal(dequantize(matrix), (matrix.code[halves].view(-1, 64) * matrix.absmax[:, None]).view(shape))


@pytest.mark.slow
def test_an_odd_number_of_values_ends_within_a_byte(path):
    matrix, expected = quantized((3, 27), torch.float32)
    assert torch.equal(dequantize(matrix), expected)


def test_double_quantisation_has_blocks_of_256_absmax(path):
    matrix, expected = quantized((130, 300), torch.bfloat16)
    assert matrix.nested_absmax.numel() == 3
    assert torch.equal(dequantize(matrix), expected)


def test_a_matrix_packed_in_16_bit_numbers_is_read_as_bytes(path):
    matrix, expected = quantized((8, 64), torch.bfloat16, quant_storage=torch.bfloat16)
    assert matrix.packed.dtype == torch.bfloat16
    assert torch.equal(dequantize(matrix), expected)


def test_another_type_is_rounded_from_the_same_float32_values(path):
    matrix, expected = quantized((5, 64), torch.float32)
    assert torch.equal(dequantize(matrix, torch.bfloat16), expected.bfloat16())


def test_a_given_buffer_is_overwritten(path):
    matrix, expected = quantized((5, 64), torch.bfloat16)
    buffer = torch.full((320,), torch.nan, dtype=torch.bfloat16)
    result = dequantize(matrix, out=buffer)
    assert result.data_ptr() == buffer.data_ptr() and torch.equal(buffer.view(5, 64), expected)


def test_a_buffer_that_does_not_fit_is_refused():
    matrix, _ = quantized((5, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="320 values"):
        dequantize(matrix, out=torch.empty(64, dtype=torch.bfloat16))


def test_fp4_is_refused():
    matrix, _ = quantized((5, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="fp4"):
        dequantize(replace(matrix, quant_type="fp4"))


def test_the_operation_says_the_truth_about_itself():
    matrix, _ = quantized((5, 64), torch.bfloat16)
    nested = (matrix.nested_absmax, matrix.nested_code, matrix.nested_offset, 256)
    buffer = torch.empty(320, dtype=torch.bfloat16)
    operands = (buffer, matrix.packed.view(-1), matrix.absmax, matrix.code, 64, *nested)
    torch.library.opcheck(torch.ops.tunekit.dequantize_nf4.default, operands)
