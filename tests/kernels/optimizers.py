"""Steps of optimizers on parameters that are whole, and on those that FSDP2 divides over processes."""

import os

import numpy as np
import torch

from tests.processes import in_processes


def parameters_of(shapes, dtype=torch.float32):
    draws = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for shape in shapes]


def take_steps(optimizer, parameters, num_steps, *, first=0):
    for step in range(first, first + num_steps):
        draws = torch.Generator().manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draws).to(parameter.dtype)
        optimizer.step()


def assert_same_bits(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)


def divided(make, blank, shapes, num_steps, num_replicas):
    """Weights after some steps, and after as many with a break in which the states go through a state dict."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    num = int(os.environ["WORLD_SIZE"])
    sizes, names = ((num_replicas, num // num_replicas), ("replicas", "shards")) if num_replicas > 1 else ((num,), None)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    results = []
    for breaks in (False, True):
        model = fully_shard(torch.nn.ParameterList(parameters_of(shapes)), mesh=mesh)
        optimizer = make(model)
        for step in range(num_steps):
            draws = torch.Generator().manual_seed(100 + step)
            for parameter in model:
                gradient = torch.randn(parameter.shape, generator=draws)
                parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            optimizer.step()
            if breaks and step == 1:
                saved = get_optimizer_state_dict(model, optimizer)
                optimizer = blank(model)
                set_optimizer_state_dict(model, optimizer, saved)
        results.append([parameter.full_tensor().detach().numpy() for parameter in model])
    torch.distributed.destroy_process_group()
    return results


def assert_divided_alike(make, blank, shapes, num_steps, *, num, num_replicas, spread=in_processes):
    """Assert that processes which divide parameters give them the bits of whole ones, with a break and without.

    Args:
        make: Makes the optimizer of parameters; a function of a module, as processes get it.
        blank: Makes one with other options, which its states bring along.
        shapes: Shapes of the parameters.
        num_steps: Steps to take.
        num: Processes.
        num_replicas: Groups of them that hold the same.
        spread: Calls a function in each of them, or in as many threads.
    """
    parameters = parameters_of(shapes)
    take_steps(make(parameters), parameters, num_steps)
    for results in spread(num, divided, make, blank, shapes, num_steps, num_replicas):
        for one, broken, other in zip(*results, parameters, strict=True):
            assert np.array_equal(one, broken)
            assert np.array_equal(one, other.detach().numpy())
