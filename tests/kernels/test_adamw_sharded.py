"""AdamW on parameters that two real processes divide, or both have."""

import os

import numpy as np
import pytest
import torch

from tests.processes import in_processes
from tests.threads import in_threads
from tunekit.kernels.adamw import AdamW

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}

NUM_STEPS = 3


def model_of(dtype):
    """Weights of 33 rows, which two cannot divide evenly, and 7."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.ReLU(), torch.nn.Linear(33, 7)).to(dtype)


def model_of_blocks(dtype):
    """Weights of 1024 rows of 20, of 33 rows of 1024, and of 2145 values: parts of the first two have whole blocks."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(20, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 33), torch.nn.Linear(33, 65))
    return torch.nn.Sequential(*layers).to(dtype)


def take_steps(model, optimizer, dtype, num_steps):
    for step in range(num_steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        model(torch.randn(8, 20).to(dtype)).square().mean().backward()
        optimizer.step()


def whole(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def sharded(dtype, states, model_of=model_of):
    """Weights after some steps, and after as many with a break in which the states go through a state dict."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    results = []
    for breaks in (False, True):
        model = fully_shard(model_of(dtype), mesh=mesh)
        optimizer = AdamW(model.parameters(), **OPTIONS, states=states, seed=4)
        take_steps(model, optimizer, dtype, NUM_STEPS)
        if breaks:
            saved = get_optimizer_state_dict(model, optimizer)
            optimizer = AdamW(model.parameters(), **OPTIONS, states=states, seed=4)
            set_optimizer_state_dict(model, optimizer, saved)
        take_steps(model, optimizer, dtype, NUM_STEPS)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        # What is in a tensor stays with a process, which has ended when it is looked at.
        results.append([parameter.full_tensor().float().numpy() for parameter in whole(model)])
    torch.distributed.destroy_process_group()
    return results


@pytest.mark.slow
def test_parts_in_float32_are_those_of_the_whole():
    model = model_of(torch.float32)
    optimizer = AdamW(model.parameters(), **OPTIONS, states="float32", seed=4)
    for _ in range(2):
        take_steps(model, optimizer, torch.float32, NUM_STEPS)
    for found in in_processes(2, sharded, torch.float32, "float32"):
        for one, broken, other in zip(*found, whole(model), strict=True):
            # The gradient is the mean of two that are alike, and is the same but for the order of sums.
            np.testing.assert_allclose(one, other.numpy(), rtol=1e-5, atol=1e-6)
            assert np.array_equal(one, broken)


@pytest.mark.slow
def test_parts_in_bfloat16_go_on_with_the_same_bits_after_a_break():
    first, second = in_processes(2, sharded, torch.bfloat16, "bfloat16")
    for one, broken, other in zip(*first, second[0], strict=True):
        assert np.array_equal(one, broken)
        assert np.array_equal(one, other)


def distance(ones, others):
    return (
        sum(float(np.square(one - other.float().numpy()).sum()) for one, other in zip(ones, others, strict=True)) ** 0.5
    )


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4])
def test_8_bit_states_of_parts_go_on_with_the_same_bits_and_err_as_those_of_the_whole(num):
    """Parts of 33 rows and of 7 have other blocks than the whole, and other random numbers."""
    wholes = {}
    for states in ("float32", "8bit"):
        model = model_of(torch.float32)
        optimizer = AdamW(model.parameters(), **OPTIONS, states=states, seed=4)
        for _ in range(2):
            take_steps(model, optimizer, torch.float32, NUM_STEPS)
        wholes[states] = whole(model)
    error = distance([one.numpy() for one in wholes["8bit"]], wholes["float32"])
    first, *others = in_processes(num, sharded, torch.float32, "8bit")
    for one, broken, *rest in zip(*first, *[other[0] for other in others], strict=True):
        assert np.array_equal(one, broken)
        assert all(np.array_equal(one, other) for other in rest)
    assert 0 < distance(first[0], wholes["float32"]) < 1.5 * error


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4])
def test_4_bit_states_of_parts_are_those_of_the_whole(num):
    """Gradients are the mean of those of all processes, which are the same. Of 4 parts, one has no more than 6 rows."""
    model = model_of_blocks(torch.float32)
    optimizer = AdamW(model.parameters(), **OPTIONS, states="4bit", seed=4)
    for _ in range(2):
        take_steps(model, optimizer, torch.float32, NUM_STEPS)
    is_4bit = ["m_scale" in optimizer.state[parameter] for parameter in model.parameters()]
    assert is_4bit == [True, False, True, False, False, False]
    for found in in_processes(num, sharded, torch.float32, "4bit", model_of_blocks):
        for one, broken, other in zip(*found, whole(model), strict=True):
            assert np.array_equal(one, broken)
            assert np.array_equal(one, other.numpy())


def four_bit_parts():
    """Bytes that each process holds of states of four weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    parts = []
    for shape in ((64, 64), (128, 66), (127, 64), (3, 4096)):
        parameter = torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(torch.ones(shape), mesh, [Shard(0)])
        optimizer = AdamW([parameter], states="4bit")
        optimizer.step()
        state = optimizer.state[parameter]
        parts.append(
            {name: (str(value.dtype), value.to_local().nbytes) for name, value in state.items() if value.dim()}
        )
    torch.distributed.destroy_process_group()
    return parts


@pytest.mark.parametrize("spread", [in_threads, pytest.param(in_processes, marks=pytest.mark.slow)])
def test_parts_have_4_bits_in_all_processes_or_in_none(spread):
    """Parts of 32 x 64 values are too small, and those of 64 x 66 and 63 x 64 are no whole blocks. Of the 2 x 4096 in 4
    bits the second process has half.
    """
    first, second = spread(2, four_bit_parts)
    assert [sorted(state) == ["m", "m_scale", "v", "v_scale"] for state in first] == [False, False, False, True]
    assert first[3] == second[3]
    assert first[3]["m"] == ("torch.uint8", 4096) and first[3]["m_scale"] == ("torch.float32", 4 * 32)
    assert {kind for kind, _ in second[2].values()} == {"torch.float32"}


def rounded_parts(placement):
    """What each process has of a parameter whose every value is rounded at random."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.ones(512, dtype=torch.bfloat16)
    placements = [Replicate() if placement == "both" else Shard(0)]
    parameter = torch.nn.Parameter(distribute_tensor(whole, mesh, placements))
    parameter.grad = distribute_tensor(whole, mesh, placements)
    AdamW([parameter], lr=2.0**-10, seed=9).step()
    local = parameter.to_local().detach().float().numpy()
    torch.distributed.destroy_process_group()
    return local


@pytest.mark.parametrize("spread", [in_threads, pytest.param(in_processes, marks=pytest.mark.slow)])
@pytest.mark.parametrize("placement", ["both", "parts"])
def test_processes_round_alike_what_both_have_and_apart_what_they_divide(placement, spread):
    first, second = spread(2, rounded_parts, placement)
    assert len(np.unique(first)) == 2
    assert np.array_equal(first, second) == (placement == "both")
