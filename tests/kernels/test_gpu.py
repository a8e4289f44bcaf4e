"""The kernels on an accelerator, where Triton compiles them, beside their formulas in float64."""

import dataclasses

import pytest

from benchmarks.kernel_cases import TINY, Sizes, cases
from benchmarks.kernels import error

pytestmark = pytest.mark.gpu

RAGGED = Sizes(
    tokens=1027, hidden=1152, inner=2944, vocabulary=32003, heads=9, kv_heads=3, head_dim=128, parameters=2**20 + 5
)
"""Sizes that no block divides."""

MANY = dataclasses.replace(RAGGED, tokens=9001)


@pytest.mark.parametrize("sizes", [TINY, RAGGED, MANY], ids=["tiny", "ragged", "many"])
@pytest.mark.parametrize("case", [case for case in cases() if case.exact is not None], ids=lambda case: case.name)
def test_a_kernel_computes_its_formula(case, sizes):
    """In bfloat16, which rounds to 2^-9; results and gradients by the norm of the difference."""
    assert error(case, case.forms["tunekit"](), sizes, "cuda") < 1e-2
