"""Adam-mini: AdamW with one second moment for each block of a parameter, and AdamW itself for biases.

    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * mean(g²)           one number for a block
    w = (1 - lr * decay) * w - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

https://arxiv.org/abs/2406.16793. A block is a row of a matrix, which is an output neuron or a token; a head of queries
and keys, `rows_per_block` rows; and a vector, such as the weight of a norm. So a weight keeps little more than one
value of state, where AdamW keeps two. These are the steps of the authors' `adam-mini` 1.1.1 but for v, which is in
float32 at least, and whole for what processes divide: theirs takes for a head what one process has of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


class AdamMini(torch.optim.Optimizer):
    """Adam-mini for the groups with `rows_per_block`, and torch's fused AdamW for the others.

    Of a vector all values are one block. Parameters may be DTensors that are divided along their first dimension.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Hold the parameters.

        Args:
            params: Groups of parameters.
            lr: Learning rate.
            betas: Decay of the moments.
            eps: Added to the root of the second moment.
            weight_decay: Decoupled weight decay.
        """
        # It is given the groups and the states at each step: its own parameter is never updated.
        self._adamw = torch.optim.AdamW(
            [torch.zeros(1)], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )
        super().__init__(params, {**self._adamw.defaults, "rows_per_block": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"] if group["rows_per_block"] else ():
                if weight.grad is not None:
                    self._update(weight, group)
        self._adamw.param_groups = [group for group in self.param_groups if not group["rows_per_block"]]
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter and its states."""
        assert weight.grad is not None, "others are not updated"
        state, rows = self.state[weight], group["rows_per_block"]
        squares = _mean_squares(weight.grad, rows)
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(squares)
        state["step"] += 1
        step, lr, (beta1, beta2) = int(state["step"]), float(group["lr"]), group["betas"]
        moment, blocks = _local(state["exp_avg"]), state["exp_avg_sq"]
        _local(blocks).mul_(beta2).add_(_local(squares), alpha=1 - beta2)
        moment.lerp_(_local(weight.grad), 1 - beta1)
        sizes = _of_rows(blocks, weight, rows)
        sizes = (sizes / (1 - beta2**step)).sqrt_().add_(group["eps"]).reciprocal_()
        values = _local(weight)
        values.mul_(1 - lr * group["weight_decay"])
        values.addcmul_(moment, sizes, value=-lr / (1 - beta1**step))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; torch alone would cast all states to the type of their parameter."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        blocks = [(weight, group["rows_per_block"] > 0) for group in self.param_groups for weight in group["params"]]
        for index, (weight, has_blocks) in zip(saved, blocks, strict=True):
            for name, value in state_dict["state"].get(index, {}).items() if has_blocks else ():
                place = "cpu" if name == "step" else weight.device
                self.state[weight][name] = value.to(place, copy=True)


def _mean_squares(grad: Tensor, rows: int) -> Tensor:
    """Return the mean of the squares of each block, in float32 or better.

    Args:
        grad: (..., rows, columns), or a vector.
        rows: Rows of a block.

    Returns:
        (..., rows, 1) where a block is a row, divided as the gradient is; else (blocks), whole.
    """
    dtype, values = torch.promote_types(grad.dtype, torch.float32), _local(grad)
    if grad.dim() < 2:
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        return whole.to(dtype).square().mean().view(1)
    # The square of a norm takes no memory for squares.
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=dtype)
    of_rows: Tensor = norms.square_().div_(grad.size(-1))
    if isinstance(grad, DTensor):
        shape = torch.Size([*grad.shape[:-1], 1])
        strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        of_rows = DTensor.from_local(
            of_rows, grad.device_mesh, grad.placements, run_check=False, shape=shape, stride=strides
        )
    if rows == 1:
        return of_rows
    blocks: Tensor = of_rows.full_tensor() if isinstance(of_rows, DTensor) else of_rows
    return blocks.reshape(-1, rows).mean(1)


def _of_rows(blocks: Tensor, weight: Tensor, rows: int) -> Tensor:
    """Return the number of each row that this process has, from those of blocks."""
    if weight.dim() < 2:
        return blocks
    if rows == 1:
        return _local(blocks)
    of_rows = blocks.repeat_interleave(rows).unsqueeze(1)
    if not isinstance(weight, DTensor):
        return of_rows
    # All processes have the same, so nothing is sent.
    return distribute_tensor(of_rows, weight.device_mesh, weight.placements, src_data_rank=None).to_local()


def _local(tensor: Tensor) -> Tensor:
    """Return the values that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
