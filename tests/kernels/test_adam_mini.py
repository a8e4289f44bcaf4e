"""Adam-mini: the authors' package step for step, states through a state dict, and parameters in parts."""

import copy

import pytest
import torch
from adam_mini import Adam_mini

from tests.kernels.optimizers import assert_divided_alike, assert_same_bits, parameters_of, take_steps
from tests.processes import in_processes
from tests.threads import in_threads
from tunekit.kernels.adam_mini import AdamMini

OPTIONS = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6, "betas": (0.8, 0.95)}

HEAD = 6
"""Rows of a head: 24 wide, 4 heads."""

PARAMETERS = {
    "embed_tokens.weight": (40, 24),
    "layers.0.self_attn.q_proj.weight": (24, 24),
    "layers.0.self_attn.k_proj.weight": (12, 24),
    "layers.0.self_attn.v_proj.weight": (12, 24),
    "layers.0.mlp.up_proj.weight": (30, 24),
    "layers.0.norm.weight": (24,),
    "layers.0.self_attn.q_proj.bias": (24,),
    "lm_head.weight": (40, 24),
}


def groups_of(parameters):
    """Groups of the parameters above by the rows of a block, with the decays that the package gives them."""
    groups = []
    for name, parameter in zip(PARAMETERS, parameters, strict=True):
        rows = 0 if "bias" in name else HEAD if "q_proj" in name or "k_proj" in name else 1
        groups.append({"params": [parameter], "rows_per_block": rows})
        if "norm" in name or "bias" in name:
            groups[-1]["weight_decay"] = 0.0
    return groups


# In float32 they add squares in another order.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_it_takes_the_steps_of_its_authors_package(dtype, tolerance):
    ours, theirs = parameters_of(PARAMETERS.values(), dtype), parameters_of(PARAMETERS.values(), dtype)
    take_steps(AdamMini(groups_of(ours), **OPTIONS), ours, 6)
    named = list(zip(PARAMETERS, theirs, strict=True))
    take_steps(Adam_mini(named, **OPTIONS, dim=24, n_heads=4, n_kv_heads=2, verbose=False), theirs, 6)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def test_biases_have_the_bits_of_torchs_fused_adamw():
    ours, theirs = parameters_of([(40,), (7,)]), parameters_of([(40,), (7,)])
    take_steps(AdamMini(ours, **OPTIONS), ours, 4)
    take_steps(torch.optim.AdamW(theirs, **OPTIONS, fused=True), theirs, 4)
    assert_same_bits(ours, theirs)


def test_experts_have_blocks_of_rows_each_by_itself():
    (stack,) = parameters_of([(3, 8, 5)])
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    together, each = (AdamMini([{"params": ones, "rows_per_block": 1}], **OPTIONS) for ones in ([stack], alone))
    for step in range(3):
        take_steps(together, [stack], 1, first=step)
        for matrix, gradient in zip(alone, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        each.step()
    assert_same_bits(stack, alone)


def test_a_block_of_weights_in_bfloat16_has_its_second_moment_in_float32():
    parameters = parameters_of(PARAMETERS.values(), torch.bfloat16)
    optimizer = AdamMini(groups_of(parameters), **OPTIONS)
    take_steps(optimizer, parameters, 1)
    blocks = [optimizer.state[parameter]["exp_avg_sq"] for parameter in parameters]
    assert [(one.dtype, one.numel()) for one in blocks[:6]] == [(torch.float32, num) for num in (40, 4, 2, 12, 30, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_with_the_same_bits(dtype):
    parameters = parameters_of(PARAMETERS.values(), dtype)
    optimizer = AdamMini(groups_of(parameters), **OPTIONS)
    take_steps(optimizer, parameters, 2)
    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    other = AdamMini(groups_of(others), lr=1.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((optimizer, parameters), (other, others)):
        take_steps(*pair, 2, first=2)
    assert_same_bits(parameters, others)


def adam_mini(parameters):
    return AdamMini(groups_of(parameters), **OPTIONS)


def blank(parameters):
    return AdamMini(groups_of(parameters), lr=1.0)


@pytest.mark.parametrize("spread", [in_threads, pytest.param(in_processes, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("num", "num_replicas"), [(3, 1), (4, 2)])
def test_parameters_that_processes_divide_get_the_bits_of_whole_ones(num, num_replicas, spread):
    """Three processes divide four heads: the second and the third head lie in two of them."""
    shapes = list(PARAMETERS.values())
    assert_divided_alike(adam_mini, blank, shapes, 4, num=num, num_replicas=num_replicas, spread=spread)
