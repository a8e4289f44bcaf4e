"""Muon: torch's own bit by bit, the published formula in float64, stacks of matrices, and matrices in parts."""

import copy
import math

import numpy as np
import pytest
import torch

from tests.kernels.optimizers import assert_same_bits, divided, parameters_of, take_steps
from tests.processes import in_processes
from tests.threads import in_threads
from tunekit.kernels.muon import Muon

OPTIONS = {"lr": 3e-3, "weight_decay": 0.1}

SHAPES = [(24, 24), (40, 16), (16, 72), (8, 1), (1, 5)]


def groups_of(parameters):
    """Groups by whether Muon updates a parameter."""
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    return [{"params": matrices, "use_muon": True}, {"params": vectors}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_whole_matrices_it_is_the_muon_of_torch_bit_by_bit(dtype):
    ours, theirs = parameters_of(SHAPES, dtype), parameters_of(SHAPES, dtype)
    take_steps(Muon(groups_of(ours), **OPTIONS), ours, 4)
    take_steps(torch.optim.Muon(theirs, **OPTIONS, adjust_lr_fn="match_rms_adamw"), theirs, 4)
    assert_same_bits(ours, theirs)


def test_on_what_is_no_matrix_it_is_the_fused_adamw_of_torch_bit_by_bit():
    ours, theirs = parameters_of([(40,), (7,), (16, 8)]), parameters_of([(40,), (7,)])
    options = {**OPTIONS, "betas": (0.8, 0.95), "eps": 1e-6}
    take_steps(Muon(groups_of(ours), **options), ours, 4)
    take_steps(torch.optim.AdamW(theirs, **options, fused=True), theirs, 4)
    assert_same_bits(ours[:2], theirs)


def by_formula(weight, gradients, *, lr, weight_decay):
    """Weights after steps by https://kellerjordan.github.io/posts/muon and equation 4 of arXiv 2502.16982."""
    a, b, c = 3.4445, -4.7750, 2.0315
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        # The scale of the momentum does not matter: the update is divided by its norm.
        momentum = 0.95 * momentum + gradient
        x = gradient + 0.95 * momentum
        x = x / x.norm()
        for _ in range(5):
            x = a * x + (b * x @ x.T + c * x @ x.T @ x @ x.T) @ x
        weight = weight - lr * (0.2 * math.sqrt(max(weight.shape)) * x + weight_decay * weight)
    return weight


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_steps_are_those_of_the_published_formula_in_float64(shape):
    (parameter,) = parameters_of([shape])
    start, optimizer, gradients = parameter.detach().double(), Muon(groups_of([parameter]), **OPTIONS), []
    for step in range(5):
        take_steps(optimizer, [parameter], 1, first=step)
        gradients.append(parameter.grad.double())
    expected = by_formula(start, gradients, **OPTIONS) - start
    # Each product of the iteration is rounded to the 8 bits of bfloat16.
    assert ((parameter.detach() - start) - expected).norm() / expected.norm() < 0.02


def test_an_update_has_the_root_mean_square_of_adamws():
    """About 0.2 of the learning rate, where singular values come to lie around 1 (arXiv 2502.16982, section 2.2)."""
    (parameter,) = parameters_of([(64, 256)])
    start = parameter.detach().clone()
    take_steps(Muon(groups_of([parameter]), lr=1.0), [parameter], 1)
    assert (parameter.detach() - start).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("shape", [(3, 24, 40), (3, 40, 24)])
def test_the_matrices_of_a_stack_are_updated_each_by_itself(shape):
    (stack,) = parameters_of([shape])
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    together, each = Muon(groups_of([stack]), **OPTIONS), Muon(groups_of(alone), **OPTIONS)
    for step in range(3):
        take_steps(together, [stack], 1, first=step)
        for matrix, gradient in zip(alone, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        each.step()
    for one, other in zip(stack, alone, strict=True):
        # Sums of products in another order are rounded to bfloat16.
        torch.testing.assert_close(one, other, rtol=0, atol=3 * OPTIONS["lr"] * 0.02)


def test_a_saved_state_goes_on_with_the_same_bits():
    parameters = parameters_of([*SHAPES, (2, 8, 4), (9,)])
    optimizer = Muon(groups_of(parameters), **OPTIONS)
    take_steps(optimizer, parameters, 2)
    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    other = Muon(groups_of(others), lr=1.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((optimizer, parameters), (other, others)):
        take_steps(*pair, 2, first=2)
    assert_same_bits(parameters, others)


def test_a_gradient_of_zeros_moves_nothing():
    """That of LoRA's A at the first step, as B is zero then."""
    (parameter,) = parameters_of([(8, 16)])
    start = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    Muon(groups_of([parameter]), lr=1.0).step()
    assert torch.equal(parameter, start)


PARTS = [(33, 20), (20, 33), (7, 12), (2, 64), (64, 2), (3, 8, 5), (9,)]
"""Rows that processes divide unevenly, fewer than there are processes, experts, and a vector."""


def muon(parameters):
    return Muon(groups_of(parameters), **OPTIONS)


def blank(parameters):
    return Muon(groups_of(parameters), lr=1.0)


@pytest.mark.parametrize("spread", [in_threads, pytest.param(in_processes, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("num", "num_replicas"), [(2, 1), (3, 1), (4, 2)])
def test_matrices_that_processes_divide_get_the_bits_of_whole_ones(num, num_replicas, spread):
    parameters = parameters_of(PARTS)
    take_steps(muon(parameters), parameters, 3)
    for results in spread(num, divided, muon, blank, PARTS, 3, num_replicas):
        for one, broken, other in zip(*results, parameters, strict=True):
            assert np.array_equal(one, broken)
            if other.dim() == 3:
                # A process has some of the experts, whose products are summed in another order than those of all.
                np.testing.assert_allclose(one, other.detach().numpy(), rtol=0, atol=3 * OPTIONS["lr"] * 0.02)
            else:
                assert np.array_equal(one, other.detach().numpy())
