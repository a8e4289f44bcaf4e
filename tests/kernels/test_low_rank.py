"""GaLore and APOLLO: the authors' packages step for step, states through a state dict, and matrices in parts."""

import copy
import math
from functools import partial

import pytest
import torch
from apollo_torch import APOLLOAdamW
from galore_torch import GaLoreAdamW as TheirGaLore

from tests.kernels.optimizers import assert_divided_alike, assert_same_bits, parameters_of, take_steps
from tests.processes import in_processes
from tests.threads import in_threads
from tunekit.kernels.low_rank import ApolloAdamW, GaLoreAdamW, random_projection

RANK = {"rank": 4, "update_proj_gap": 3}

OPTIONS = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6, "betas": (0.8, 0.95)}

SHAPES = [(24, 24), (40, 16), (16, 72)]

# Products of matrices whose strides differ are rounded differently.
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12}


def groups_of(parameters):
    """Groups by whether a parameter is updated in a space of a low rank."""
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    return [{"params": matrices, "low_rank": True}, {"params": vectors}]


def assert_close(ours, theirs, dtype):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_galore_takes_the_steps_of_its_authors_package(dtype):
    ours, theirs = parameters_of(SHAPES, dtype), parameters_of(SHAPES, dtype)
    take_steps(GaLoreAdamW(groups_of(ours), **OPTIONS, **RANK, scale=0.25), ours, 8)
    more = {**RANK, "scale": 0.25, "proj_type": "std"}
    take_steps(TheirGaLore([{"params": theirs, **more}], **OPTIONS, no_deprecation_warning=True), theirs, 8)
    assert_close(ours, theirs, dtype)


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_apollo_takes_the_steps_of_its_authors_package(dtype, scale_type, monkeypatch):
    """Theirs projects by the random matrices of ours; both draw others after three steps."""
    drawn, turns = [], []
    monkeypatch.setattr(
        "tunekit.kernels.low_rank.random_projection",
        lambda *args: drawn.append(random_projection(*args)) or drawn[-1],
    )
    ours, theirs = parameters_of(SHAPES, dtype), parameters_of(SHAPES, dtype)
    take_steps(ApolloAdamW(groups_of(ours), **OPTIONS, **RANK, scale=2.0, scale_type=scale_type), ours, 8)
    first = [drawn[num] for step in (0, 3, 6) for num in range(step * len(SHAPES), (step + 1) * len(SHAPES))]

    def project(self, *args, **kwargs):
        turns.append(self)
        return first[len(turns) - 1]

    monkeypatch.setattr("apollo_torch.random_projector.GradientProjector.get_orthogonal_matrix", project)
    more = {**RANK, "scale": 2.0, "proj_type": "std", "proj": "random", "scale_type": scale_type}
    take_steps(APOLLOAdamW([{"params": theirs, **more}], **OPTIONS), theirs, 8)
    assert len(turns) == len(first)
    assert_close(ours, theirs, dtype)


@pytest.mark.parametrize("kind", [GaLoreAdamW, ApolloAdamW])
def test_what_is_no_matrix_has_the_bits_of_torchs_fused_adamw(kind):
    ours, theirs = parameters_of([(40,), (7,), (16, 8)]), parameters_of([(40,), (7,)])
    take_steps(kind(groups_of(ours), **OPTIONS, **RANK), ours, 4)
    take_steps(torch.optim.AdamW(theirs, **OPTIONS, fused=True), theirs, 4)
    assert_same_bits(ours[:2], theirs)


def test_random_projections_keep_norms_and_differ_by_turn_matrix_and_seed():
    from tunekit.kernels.low_rank import _seed

    seeds = {_seed(seed, turn, index) for seed in range(3) for turn in range(3) for index in range(3)}
    assert len(seeds) == 27
    tall, wide = (random_projection(torch.zeros(shape), 64, 1) for shape in ((512, 256), (256, 512)))
    assert (tall.shape, wide.shape) == ((64, 256), (256, 64))
    for numbers in (tall, wide):
        # Of 16,384 numbers of variance 1/64.
        assert numbers.mean().abs() < 4 / math.sqrt(64 * numbers.numel())
        assert numbers.var().item() == pytest.approx(1 / 64, rel=4 * math.sqrt(2 / numbers.numel()))


@pytest.mark.parametrize("kind", [GaLoreAdamW, ApolloAdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_with_the_same_bits(kind, dtype):
    parameters = parameters_of([*SHAPES, (9,)], dtype)
    optimizer = kind(groups_of(parameters), **OPTIONS, **RANK)
    take_steps(optimizer, parameters, 2)
    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    other = kind(groups_of(others), lr=1.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((optimizer, parameters), (other, others)):
        take_steps(*pair, 3, first=2)
    assert_same_bits(parameters, others)


@pytest.mark.parametrize("kind", [GaLoreAdamW, ApolloAdamW])
def test_taking_over_states_of_no_step_makes_none(kind):
    """Accelerate takes the states of an optimizer over before it divides the weights, and expects none yet."""
    parameters = parameters_of(SHAPES, torch.float32)
    optimizer = kind(groups_of(parameters), **OPTIONS, **RANK)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state


PARTS = [(33, 20), (20, 33), (8, 12), (5, 64), (64, 5), (9,)]
"""Rows that processes divide unevenly, and a vector."""


def low_rank(kind, parameters):
    return kind(groups_of(parameters), **OPTIONS, **RANK)


def blank(kind, parameters):
    return kind(groups_of(parameters), lr=1.0)


@pytest.mark.parametrize("spread", [in_threads, pytest.param(in_processes, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [GaLoreAdamW, ApolloAdamW])
@pytest.mark.parametrize(("num", "num_replicas"), [(2, 1), (4, 2)])
def test_matrices_that_processes_divide_get_the_bits_of_whole_ones(kind, num, num_replicas, spread):
    make, another = partial(low_rank, kind), partial(blank, kind)
    assert_divided_alike(make, another, PARTS, 5, num=num, num_replicas=num_replicas, spread=spread)
