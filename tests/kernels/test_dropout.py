"""Dropout by counters: Philox against the numbers that its authors publish, and the kernel against torch."""

import pytest
import torch

from tests.kernels.interpreter import interpreted
from tunekit.kernels.dropout import dropout, dropout_factors

SEED = torch.tensor([0x1234_5678_9ABC_DEF0])


@pytest.mark.parametrize("shape", [(1, 64), (5, 13), (3, 2500)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_drops_what_torch_drops(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    with interpreted():
        kernel = dropout(x, SEED, 2, 0.3)
    assert torch.equal(kernel, dropout(x, SEED, 2, 0.3))


def test_the_random_numbers_are_those_of_philox():
    # The first known answer of Random123's kat_vectors: counter and key are all zeros.
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    x, seed = torch.ones(1, 4), torch.zeros(1, dtype=torch.int64)
    for column, word in enumerate(words):
        # 31 bits are compared: kept up to the number itself, dropped from the next one on.
        assert dropout_factors(x, seed, 0, (word >> 1) / 2**31)[0, column] > 0
        assert dropout_factors(x, seed, 0, ((word >> 1) + 1) / 2**31)[0, column] == 0


def test_the_mean_is_kept():
    factors = dropout_factors(torch.empty(300, 500), SEED, 0, 0.1)
    # 150000 draws: 5 standard deviations of their share.
    assert abs((factors == 0).float().mean() - 0.1) < 5 * (0.1 * 0.9 / 150000) ** 0.5
    assert factors.max() == pytest.approx(1 / 0.9)


def test_places_and_seeds_drop_independently():
    masks = [
        dropout_factors(torch.empty(300, 500), seed, place, 0.5) > 0 for seed in (SEED, SEED + 1) for place in (0, 1)
    ]
    for place, mask in enumerate(masks):
        for other in masks[:place]:
            assert abs((mask == other).float().mean() - 0.5) < 5 * (0.25 / 150000) ** 0.5


def test_the_operation_says_the_truth_about_itself():
    torch.library.opcheck(torch.ops.tunekit.dropout.default, (torch.randn(5, 7), SEED, 1, 0.5))
