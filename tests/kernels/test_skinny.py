"""The two narrow products of LoRA's backward pass, against float64.

What is rounded to 16 bits at the end may be off by half a unit of its type, and a whole one after torch's products,
which round before they are scaled. Sums in float32 of some hundred products are off by a few of its units.
"""

import pytest
import torch

from tests.kernels.interpreter import interpreted
from tunekit.kernels.skinny import dual_skinny


def operands(num_tokens, num_outputs, rank, dtype=torch.bfloat16):
    torch.manual_seed(0)
    dy, b = torch.randn(num_tokens, num_outputs).to(dtype), torch.randn(num_outputs, rank).to(dtype)
    # Columns of a tensor that several layers share.
    return dy, b, torch.randn(num_tokens, 3 * rank).to(dtype)[:, rank : 2 * rank]


def error(found, expected):
    """The largest error, in units of the found type's epsilon, relative to the largest value."""
    return (found.double() - expected).abs().max() / expected.abs().max() / torch.finfo(found.dtype).eps


# One row; a block in each dimension; more than one, the last not full; several programs along the rows; padded ranks.
SHAPES = [(1, 300, 4), (64, 256, 16), (37, 515, 24), (300, 40, 8), (9, 33, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_sums_in_float32(shape, dtype):
    dy, b, h = operands(*shape, dtype)
    with interpreted():
        p, db = dual_skinny(dy, b, h, 2.0)
    assert p.dtype == dtype and db.dtype == torch.float32
    assert error(p, 2 * dy.double() @ b.double()) <= 0.51
    assert error(db, 2 * dy.double().T @ h.double()) <= 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_torch_computes_the_same(dtype):
    dy, b, h = operands(37, 51, 6, dtype)
    p, db = dual_skinny(dy, b, h, 2.0)
    assert error(p, 2 * dy.double() @ b.double()) <= (1 if dtype == torch.bfloat16 else 8)
    # In 16 bits torch rounds the product.
    assert error(db.to(dtype), 2 * dy.double().T @ h.double()) <= (1 if dtype == torch.bfloat16 else 8)


def test_a_gradient_that_is_the_same_for_all_rows_may_be_expanded():
    _, b, h = operands(6, 40, 4)
    dy = torch.randn(40).bfloat16().expand(6, 40)
    with interpreted():
        p, db = dual_skinny(dy, b, h, 1.0)
        transposed, _ = dual_skinny(dy.T.contiguous().T, b, h, 1.0)
    assert error(p, dy.double() @ b.double()) <= 0.51 and torch.equal(p, transposed)
    assert error(db, dy.double().T @ h.double()) <= 8


def test_no_rows_give_no_gradient():
    dy, b, h = operands(0, 40, 4)
    with interpreted():
        p, db = dual_skinny(dy, b, h, 1.0)
    assert p.shape == (0, 4) and torch.equal(db, torch.zeros(40, 4))


def test_the_operation_says_the_truth_about_itself():
    torch.library.opcheck(torch.ops.tunekit.dual_skinny.default, (*operands(5, 7, 3), 2.0))
