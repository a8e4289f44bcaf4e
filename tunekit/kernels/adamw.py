"""AdamW whose weights and states are kept in few bits, and rounded at random so that small updates are not lost.

    m = m + (1 - b1) * (g - m)
    v = b2 * v + (1 - b2) * g²
    p = (1 - lr * decay) * p - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

Decoupled weight decay: https://arxiv.org/abs/1711.05101.

**Rounding at random**: a float32 number is rounded up or down to bfloat16 with the odds that make it right on average.
To the nearest, a weight would keep its value wherever the update is smaller than half the distance to the next one,
1/512 of it or so; and v would never fall, as 1 - b2 is less than that too. What is rounded so: weights in bfloat16
(https://arxiv.org/abs/2010.06192), and states in 16 or 8 bits. Weights in float32 are not, nor are states in 4 bits.

**States in 8 bits** are small floating-point numbers times a float32 for every 256 of them, the largest absolute value
of these (blocks as in https://arxiv.org/abs/2110.02861, whose table of values is replaced by what can be computed from
the bits). They have 3 bits of mantissa: m has a sign and 16 exponents, v, which is never negative, 32. So the error of
a value is at most 1/8 of it, and none on average. What is smaller than the least such number (2^-15 of the largest for
m) is that number or 0, at random; of v (2^-31) it is that number, as a 0 would make the step too large.

**States in 4 bits** (https://arxiv.org/abs/2309.01507) are those of torchao's `AdamW4bit`, in the blocks of 256 values
that transformers gives it: the nearest of 16 values, times the largest absolute value of a block as a float32, two in a
byte. m has 0 and values with a sign, closer to each other where they are small; v is 1 to 16 sixteenths, never 0.
Tensors of fewer than 4096 values, or of a number that is no multiple of 256, keep states in the type of the weight.
Steps on float32 weights are torchao's but for the rounding of float32; weights in bfloat16 are rounded at random, as
torchao's are with `bf16_stochastic_round`.

**Random numbers** are Philox's (https://doi.org/10.1145/2063384.2063405): one for each value of each tensor at each
step, from a seed, without a state. The lower half of its 32 bits rounds the weight, the upper half m and v. The same
seed gives the same weights on every device that computes the same, and after a resume.

Precision: all is computed in float32. On a CPU the operations are those of the kernel one by one, with the same bits
as the kernel in Triton's interpreter; on devices products and sums are fused, and last bits are others.

Bytes that go through memory for each value, with weights and gradients in bfloat16: 14 with states in bfloat16, 10 in
8 bits, 8 in 4, where float32 throughout takes 28. There is one launch for each tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tunekit.kernels.adamw_codes import M_EXPONENTS, V_EXPONENTS, decoded, decoded_4bit, encoded, encoded_4bit
from tunekit.kernels.adamw_kernel import BLOCK, GROUP, LEAST_SCALE, M_LIMITS, M_SHARES, TILE, adamw_kernel
from tunekit.kernels.backend import triton, uses_triton
from tunekit.kernels.dropout import philox

States = Literal["float32", "bfloat16", "8bit", "4bit"]
"""Data type of m and v."""

MIN_4BIT_VALUES = 4096
"""Smaller tensors have no states in 4 bits."""

CHUNK = 256 * GROUP
"""Values that are updated at once on a CPU, so that what is computed on the way takes little memory."""


class AdamW(torch.optim.Optimizer):
    """AdamW over parameters in bfloat16, which are rounded at random, or in float32.

    Parameters may be DTensors: each process updates its own part. Processes that hold the same part give it the same
    bits. In 8 bits, blocks are those of a part: they are those of the whole where parts have multiples of 256 values.
    In 4 bits, parts have whole blocks, and states are in 4 bits in all processes or in none.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        states: States = "bfloat16",
        seed: int = 0,
    ) -> None:
        """Hold the parameters.

        Args:
            params: Parameters, or groups of them.
            lr: Learning rate.
            betas: Decay of m and of v.
            eps: Added to the root of v.
            weight_decay: Decoupled weight decay.
            states: What m and v are kept in.
            seed: Of the rounding. It is saved with the states.
        """
        self.states: States = states
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, gradient_scale: Tensor | None = None
    ) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss again, as torch's optimizers have it.
            gradient_scale: A float32 that gradients are multiplied by, such as what clips their norm.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, index, gradient_scale)
                index += 1
        return loss

    def _update(
        self, parameter: Tensor, grad: Tensor, group: dict[str, Any], index: int, gradient_scale: Tensor | None
    ) -> None:
        state = self.state[parameter]
        if not state:
            self._begin(parameter, state)
        state["step"] += 1
        step = int(state["step"])
        beta1, beta2 = group["betas"]
        update = {
            "decay": 1 - float(group["lr"]) * group["weight_decay"],
            "step_size": float(group["lr"]) / (1 - beta1**step),
            "rate1": 1 - beta1,
            "beta2": beta2,
            "rate2": 1 - beta2,
            "root": math.sqrt(1 - beta2**step),
            "eps": group["eps"],
        }
        values, gradient = _local(parameter), _local(grad)
        if values.numel() == 0:
            return
        bits = {"4bit": 4, "8bit": 8}[self.states] if "m_scale" in state else 0
        dense = values if values.is_contiguous() else values.contiguous()
        adamw_step(
            dense.view(-1),
            gradient.reshape(-1),
            _own_values(state["m"], values.numel(), bits),
            _own_values(state["v"], values.numel(), bits),
            _own_scales(state.get("m_scale"), values.numel()),
            _own_scales(state.get("v_scale"), values.numel()),
            key=_key(group["seed"], step, index, _part(parameter)),
            gradient_scale=gradient_scale,
            **update,
        )
        if dense is not values:
            values.copy_(dense)

    def _begin(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(f"AdamW updates bfloat16 and float32 parameters, not {parameter.dtype}")
        num_values = _largest_part(parameter)
        is_4bit = self.states == "4bit" and _fits_4_bits(parameter.numel(), num_values)
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8, "4bit": parameter.dtype}
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for name in ("m", "v"):
            if is_4bit:
                state[name] = _flat_zeros(parameter, num_values // 2, torch.uint8)
                state[f"{name}_scale"] = _flat_zeros(parameter, num_values // BLOCK)
                continue
            state[name] = torch.zeros_like(parameter, dtype=dtypes[self.states], memory_format=torch.contiguous_format)
            if self.states == "8bit":
                state[f"{name}_scale"] = _flat_zeros(parameter, -(-num_values // BLOCK))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; torch alone would cast all states to the type of their parameter."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                place = "cpu" if name == "step" else parameter.device
                self.state[parameter][name] = value.to(place, copy=True)


def _local(tensor: Tensor) -> Tensor:
    """The values that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _num_parts(parameter: DTensor) -> int:
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())


def _largest_part(parameter: Tensor) -> int:
    """Return the number of values of a parameter, or in the largest part where processes divide its rows."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    rows, columns = parameter.size(0), parameter.numel() // max(1, parameter.size(0))
    return -(-rows // _num_parts(parameter)) * columns


def _fits_4_bits(num_values: int, in_part: int) -> bool:
    """Return whether a tensor has states in 4 bits. Where it has, each part has whole blocks."""
    return in_part >= MIN_4BIT_VALUES and in_part % BLOCK == 0 and num_values % BLOCK == 0


def _flat_zeros(parameter: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros for each process that divides the rows of a parameter, as many as the largest part needs.

    So all have as many, as distributed checkpoints have it: a process with fewer rows leaves the last ones zero.
    """
    zeros = torch.zeros(size, dtype=dtype, device=_local(parameter).device)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.Size([_num_parts(parameter) * size])
    return DTensor.from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=(1,)
    )


def _own_values(states: Tensor, num_values: int, bits: int) -> Tensor:
    """Return the states or codes of the values that this process has."""
    return _local(states).view(-1)[: num_values // 2 if bits == 4 else num_values]


def _own_scales(scales: Tensor | None, num_values: int) -> Tensor | None:
    """Return the scales of the blocks that this process has."""
    return None if scales is None else _local(scales)[: -(-num_values // BLOCK)]


def _part(parameter: Tensor) -> list[int]:
    """Return the slice of a parameter that this process holds: its index along the sharded dimensions."""
    if not isinstance(parameter, DTensor):
        return []
    place = parameter.device_mesh.get_coordinate()
    return [at for at, how in zip(place or (), parameter.placements, strict=False) if how.is_shard()]


def _key(seed: int, step: int, index: int, part: list[int]) -> int:
    """Philox's key for one tensor at one step. It is odd and has 63 bits, so that kernels are compiled once for all."""
    digest = hashlib.blake2b(repr((seed, step, index, part)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1 << 62 | 1


def adamw_step(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    m_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    key: int,
    gradient_scale: Tensor | None,
    decay: float,
    step_size: float,
    rate1: float,
    beta2: float,
    rate2: float,
    root: float,
    eps: float,
) -> None:
    """Update parameters and states, all of them contiguous and of one dimension, in place.

    Args:
        p: (size), bfloat16 or float32.
        g: (size), the gradient.
        m: (size), float32, bfloat16, or codes of 8 bits; or (size / 2), two codes of 4 bits in each.
        v: (size) or (size / 2), the same.
        m_scale: (blocks), the largest absolute value of each 256, or 128 in 4 bits; None but for codes.
        v_scale: (blocks), the same.
        key: Of the random numbers.
        gradient_scale: A float32 that g is multiplied by.
        decay: What p is multiplied by first.
        step_size: lr / (1 - b1^t).
        rate1: 1 - b1.
        beta2: b2.
        rate2: 1 - b2.
        root: sqrt(1 - b2^t).
        eps: Added to the root of v.
    """
    numbers = (decay, step_size, rate1, beta2, rate2, root, eps)
    bits = 0 if m_scale is None else 8 * m.numel() // p.numel()
    if uses_triton(p):
        adamw_kernel[(triton.cdiv(p.numel(), GROUP),)](
            *(p, g, m, v, m_scale, v_scale, gradient_scale, p.numel(), key, *numbers),
            BLOCK=BLOCK,
            TILE=TILE,
            BITS=bits,
            SCALED=gradient_scale is not None,
            SHARES=M_SHARES,
            LIMITS=M_LIMITS,
            LEAST=LEAST_SCALE,
            num_warps=4,
        )
        return
    for start in range(0, p.numel(), CHUNK):
        part, of_scales = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
        of_states = slice(start // 2, (start + CHUNK) // 2) if bits == 4 else part
        scales = [None if scale is None else scale[of_scales] for scale in (m_scale, v_scale)]
        words = _random_words(key, start // GROUP, p[part].numel())
        gradient = g[part].float() if gradient_scale is None else g[part].float() * gradient_scale
        states = (m[of_states], v[of_states])
        _update_in_torch(p[part], gradient, states, scales, words.to(p.device), numbers, bits)


def _update_in_torch(
    p: Tensor,
    g: Tensor,
    states: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    words: Tensor,
    numbers: Sequence[float],
    bits: int,
) -> None:
    """`adamw_step` in plain torch: the formulas as they stand above."""
    decay, step_size, rate1, beta2, rate2, root, eps = numbers
    for_weights, for_states = (words & 0xFFFF).int(), (words >> 16).int()
    old_m, old_v = (
        _read(state, scale, bits, signed=signed)
        for state, scale, signed in zip(states, scales, (True, False), strict=True)
    )
    new_m = old_m + (g - old_m) * rate1
    new_v = old_v * beta2 + g * g * rate2
    # torch's root of float32 may be one off in the last bit on a CPU, which float64 rounded to it is not.
    root_v = new_v.double().sqrt().float() / root + eps
    p.copy_(_rounded(p.float() * decay - new_m / root_v * step_size, p.dtype, for_weights))
    for old, new, scale, signed in zip(states, (new_m, new_v), scales, (True, False), strict=True):
        if scale is None:
            old.copy_(_rounded(new, old.dtype, for_states))
            continue
        if bits == 4:
            codes, new_scale = encoded_4bit(new, signed=signed)
        else:
            codes, new_scale = encoded(new, for_states, M_EXPONENTS if signed else V_EXPONENTS, signed=signed)
        old.copy_(codes)
        scale.copy_(new_scale)


def _read(state: Tensor, scale: Tensor | None, bits: int, *, signed: bool) -> Tensor:
    """Return the float32 numbers of m, which is signed, or v."""
    if scale is None:
        return state.float()
    if bits == 4:
        return decoded_4bit(state, scale, signed=signed)
    return decoded(state, scale, M_EXPONENTS if signed else V_EXPONENTS, signed=signed)


def _rounded(x: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Numbers rounded at random to bfloat16, or as they are; `random` has 16 bits, in an int32, for each."""
    if dtype != torch.bfloat16:
        return x
    return ((x.view(torch.int32) + random) & -65536).view(torch.float32).bfloat16()


def _random_words(key: int, first_group: int, size: int) -> Tensor:
    """Philox's numbers of 32 bits, as int64, for values from the beginning of a group on.

    Each counter gives four, which are for the values at its place in each of four tiles.
    """
    num_groups = -(-size // GROUP)
    counter = torch.arange(first_group * TILE, (first_group + num_groups) * TILE)
    words = philox([counter, *torch.zeros(3, len(counter), dtype=torch.int64)], torch.tensor(key))
    return torch.stack([word.view(num_groups, TILE) for word in words], dim=1).view(-1)[:size]
