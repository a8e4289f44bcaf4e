"""Experts with low-rank updates, each product computed apart, as for linear layers.

PEFT adds the update of all experts of a layer to their weights, W + scale B A, before they are used (`ParamWrapper`):
a matrix as large as the experts, which is kept for the backward pass and has a gradient of its size there. Here the
rows of an expert go through W and through A and B (transformers' own order of rows and sums, `grouped_mm`):

    y = x W^T + scale (x A^T) B^T                   x: (rows, in), sorted by expert; products grouped by expert

so that beside W, dense or in 4 bits, there is nothing wider than the rank. Any module of experts that transformers
runs by its experts interface is taken, with and without gate, with biases, and with matrices stored transposed.

Source: transformers 5.24, integrations/moe.py; peft 0.21, tuners/lora/layer.py.
"""

from functools import partial
from typing import Any, cast

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import grouped_mm
from torch.nn.utils.parametrize import is_parametrized

from tunekit.models.fusion.lora_layers import is_watched, random_linear
from tunekit.models.fusion.proof import Fusion, Kept, Trial, before_fusion, stand_in
from tunekit.models.quantization import expert_stacks

ALIGNED = 8
"""Ranks must be a multiple of this: torch's grouped product takes rows of whole 16 bytes on CUDA."""

Update = tuple[Tensor, Tensor, float]
"""A of shape (experts, rank, in), B of shape (experts, out, rank) and the scale."""


def experts_rule(module: nn.Module) -> Fusion | Kept | None:
    """Return the rule for stacks of experts that have a low-rank update."""
    if type(module) is not ParamWrapper:
        return None
    wrappers, experts = _unwrap(module)
    if not expert_stacks(experts):
        return None
    if cast(Any, experts).has_post_expert_norm:
        return Kept("no kernel for a norm after each expert")
    ranks = {rank for wrapper in wrappers for rank in cast(Any, wrapper).r.values()}
    if any(rank % ALIGNED for rank in ranks):
        return Kept(f"the rank is not a multiple of {ALIGNED}")
    form = tuple(vars(experts)[name] for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))
    sizes = (type(experts), form, tuple(wrapper.parameter_name for wrapper in wrappers), tuple(sorted(ranks)))
    return Fusion("stack of experts with a low-rank update", forward, None, partial(_trial, module), sizes)


def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return what the experts of each token give, weighted and summed.

    Args:
        self: The outermost wrapper of a module of experts.
        hidden_states: (tokens, hidden).
        args: The experts of each token and their weights, both (tokens, experts per token); with anything else it is
            called as before.
        kwargs: Like `args`.
    """
    read = _read(self) if len(args) == 2 and not kwargs else None
    if read is None:
        return cast(Tensor, before_fusion(self)(hidden_states, *args, **kwargs))
    return _experts(*read, hidden_states, *args)


def _unwrap(module: nn.Module) -> tuple[list[ParamWrapper], nn.Module]:
    """Return the wrappers around a module of experts, from the outermost, and the module."""
    wrappers = []
    while isinstance(module, ParamWrapper):
        wrappers.append(module)
        module = cast(nn.Module, module.base_layer)
    return wrappers, module


def _read(module: nn.Module) -> tuple[nn.Module, dict[str, Update]] | None:
    """Return a module of experts and its updates by the names of its stacks; None where it has to be called."""
    wrappers, experts = _unwrap(module)
    if any(map(is_watched, (*wrappers[1:], experts))) or cast(Any, experts)._is_expert_parallel:
        return None
    updates: dict[str, Update] = {}
    for wrapper in wrappers:
        layer = cast(Any, wrapper)
        if layer.merged or is_parametrized(experts, layer.parameter_name):
            return None
        active = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
        if len(active) > 1:
            return None
        for name in active:
            down, up = layer.lora_A[name], layer.lora_B[name]
            if any(map(is_watched, (down, up))) or any(isinstance(each.weight, DTensor) for each in (down, up)):
                return None
            a = down.weight.unflatten(0, (layer.num_experts, -1))
            b = up.weight.unflatten(1, (-1, layer.num_experts)).permute(2, 0, 1)
            updates[layer.parameter_name] = a, b, layer.scaling[name]
    return experts, updates


def _experts(experts: Any, updates: dict[str, Update], x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    num_tokens, per_token = chosen.shape
    expert, order = torch.sort(chosen.reshape(-1))
    # The row behind the last one of each expert.
    ends = torch.searchsorted(
        expert, torch.arange(experts.num_experts, device=expert.device), right=True, out_int32=True
    )

    def product(rows: Tensor, name: str) -> Tensor:
        outputs = _product(rows, getattr(experts, name), ends, updates.get(name), is_transposed=experts.is_transposed)
        return outputs + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else outputs

    rows = x[order // per_token]
    if experts.has_gate:
        inner = experts._apply_gate(product(rows, "gate_up_proj"))
    else:
        inner = experts.act_fn(product(rows, "up_proj"))
    outputs = product(inner, "down_proj") * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return outputs[back].view(num_tokens, per_token, -1).sum(1).to(x.dtype)


def _product(x: Tensor, stack: Tensor, ends: Tensor, update: Update | None, *, is_transposed: bool) -> Tensor:
    """Return the product of the rows of each expert with its matrix, (rows, out), and its update added.

    Args:
        x: (rows, in), sorted by expert.
        stack: (experts, out, in), or (experts, in, out) if `is_transposed`.
        ends: Of each expert's rows, int32.
        update: The update of the stack, or None.
        is_transposed: How matrices are stored.
    """
    x = x.to(stack.dtype)
    outputs = grouped_mm(x, stack if is_transposed else stack.transpose(-2, -1), offs=ends)
    if update is None:
        return outputs
    a, b, scale = update
    low = grouped_mm(x, a.to(x.dtype).transpose(-2, -1), offs=ends)
    return torch.add(outputs, grouped_mm(low, b.to(x.dtype).contiguous().transpose(-2, -1), offs=ends), alpha=scale)


EXPERTS, TOKENS, HIDDEN, INNER = 4, 10, 64, 32
"""Sizes of a stand-in, whatever those of the module."""


def _trial(module: nn.Module, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Trial:
    """Small experts of the same kind under the same wrappers, with tokens and their experts."""
    wrappers, experts = _unwrap(module)
    small: nn.Module = _stand_in(experts, generator, device, dtype)
    for wrapper in reversed(wrappers):
        layer = cast(Any, wrapper)
        is_down = layer.parameter_name == "down_proj"
        wide = INNER * (2 if cast(Any, experts).has_gate else 1)
        inputs, outputs = (INNER, HIDDEN) if is_down else (HIDDEN, wide)
        downs, ups, dropouts = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        for name, rank in layer.r.items():
            downs[name] = random_linear(inputs, rank * EXPERTS, generator, device, torch.float32)
            ups[name] = random_linear(rank * EXPERTS, outputs, generator, device, torch.float32)
            dropouts[name] = nn.Identity()
        small = stand_in(layer, generator=generator, base_layer=small, lora_A=downs, lora_B=ups, lora_dropout=dropouts)
        vars(small)["num_experts"] = EXPERTS
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    scores = torch.randn(TOKENS, EXPERTS, generator=generator)
    weights, chosen = scores.softmax(-1).topk(2)
    return Trial(small, (x, chosen.to(device), weights.to(device, dtype).requires_grad_()), {})


def _stand_in(experts: Any, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Experts of the same class with few small dense matrices, which are not trained."""
    small = stand_in(experts, generator=generator, **dict(experts.named_children()))
    vars(small)["num_experts"] = EXPERTS
    wide = INNER * (2 if experts.has_gate else 1)
    for name in expert_stacks(experts):
        rows, columns = (HIDDEN, INNER) if name == "down_proj" else (wide, HIDDEN)
        shape = (EXPERTS, columns, rows) if experts.is_transposed else (EXPERTS, rows, columns)
        values = torch.randn(shape, generator=generator) * (INNER if name == "down_proj" else HIDDEN) ** -0.5
        small.register_parameter(name, nn.Parameter(values.to(device, dtype), requires_grad=False))
        if experts.has_bias:
            bias = torch.randn(EXPERTS, rows, generator=generator).to(device, dtype)
            small.register_parameter(f"{name}_bias", nn.Parameter(bias, requires_grad=False))
    return small
