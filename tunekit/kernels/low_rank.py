"""AdamW whose states have a low rank: GaLore and APOLLO for matrices, torch's AdamW for everything else.

    R = G P^T                                  P: rank x the lesser side of G
    m = b1 * m + (1 - b1) * R
    v = b2 * v + (1 - b2) * R²
    N = m / (sqrt(v) + eps)
    w = w - lr * sqrt(1 - b2^t) / (1 - b1^t) * update
    w = (1 - lr * decay) * w

**GaLore** (https://arxiv.org/abs/2403.03507): P has the first singular vectors of a gradient, every `update_proj_gap`
steps of the one at hand. The update is `scale * N P`, so a weight keeps the two moments and P.

**APOLLO** (https://arxiv.org/abs/2412.05270): P is random, normal with variance 1 / rank, and made anew of a seed at
each step, so that a weight keeps the two moments only. The update is the gradient itself, each of its channels scaled
by `norm(N) / norm(R)` of that channel, or all by that of the tensor (APOLLO-Mini), times `sqrt(scale)`. Its norm grows
by 1 % at most from step to step (https://arxiv.org/abs/2410.01623).

Both take a tall matrix by its columns and a wide one by its rows, as the authors' `galore-torch` 1.0 and `apollo-torch`
1.0.3 do with `proj_type: std`. Those keep projections in objects, which checkpoints of tensors do not hold. Of a matrix
whose rows processes divide, each process gathers the gradient, computes the whole update, and takes its rows: the bits
are those of one process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

MAX_GROWTH = 1.01
"""Factor by which the norm of APOLLO's updates may grow in a step."""


class _LowRank(torch.optim.Optimizer):
    """An optimizer for the groups with `low_rank`, of matrices, and torch's fused AdamW for the others.

    Parameters may be DTensors.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        **more: Any,
    ) -> None:
        """Hold the parameters.

        Args:
            params: Groups of parameters.
            lr: Learning rate.
            betas: Decay of the moments.
            eps: Added to the root of the second moment.
            weight_decay: Decoupled weight decay.
            rank: Rows of P.
            update_proj_gap: Steps with the same P.
            scale: Factor of the update.
            more: Further settings of the groups.
        """
        # It is given the groups and the states at each step: its own parameter is never updated.
        self._adamw = torch.optim.AdamW(
            [torch.zeros(1)], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )
        own = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "low_rank": False, **more}
        super().__init__(params, {**self._adamw.defaults, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = 0
        for group in self.param_groups:
            for weight in group["params"] if group["low_rank"] else ():
                index += 1
                if weight.grad is not None:
                    self._update(weight, group, index)
        self._adamw.param_groups = [group for group in self.param_groups if not group["low_rank"]]
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _update(self, weight: Tensor, group: dict[str, Any], index: int) -> None:
        """Update a matrix and its states."""
        assert weight.grad is not None, "others are not updated"
        grad = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        state = self.state[weight]
        state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
        state["step"] += 1
        step, lr, (beta1, beta2) = int(state["step"]), float(group["lr"]), group["betas"]
        update = self._direction(grad, state, group, step, index)
        values = weight.to_local() if isinstance(weight, DTensor) else weight
        values.add_(_rows(update, weight), alpha=-lr * math.sqrt(1 - beta2**step) / (1 - beta1**step))
        if group["weight_decay"] > 0:
            values.add_(values, alpha=-lr * group["weight_decay"])

    def _direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any], step: int, index: int) -> Tensor:
        """Return the update of a whole matrix before the learning rate, and update its states."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; torch alone would cast the number of steps to the type of the weight."""
        super().load_state_dict(state_dict)
        low_rank = [weight for group in self.param_groups if group["low_rank"] for weight in group["params"]]
        # Looking a state up would make one, which Accelerate does not expect before it replaces the weights.
        for state in (self.state[weight] for weight in low_rank if weight in self.state):
            state["step"] = state["step"].to("cpu", torch.float32)


class GaLoreAdamW(_LowRank):
    """AdamW in the space of a gradient's first singular vectors."""

    def _direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any], step: int, index: int) -> Tensor:
        if (step - 1) % group["update_proj_gap"] == 0:
            state["projection"] = singular_vectors(grad, group["rank"])
        projection: Tensor = state["projection"]
        direction = _moments(_projected(grad, projection), state, group)
        whole = direction @ projection if grad.size(0) >= grad.size(1) else projection @ direction
        return whole.mul_(float(group["scale"]))


class ApolloAdamW(_LowRank):
    """The gradient, scaled as AdamW would in a random space."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        scale_type: Literal["channel", "tensor"] = "channel",
        seed: int = 0,
        **more: Any,
    ) -> None:
        """Hold the parameters.

        Args:
            params: Groups of parameters.
            lr: Learning rate.
            scale_type: Scale each channel by itself, or the tensor.
            seed: Of the projections. It is saved with the states.
            more: Those of every such optimizer.
        """
        super().__init__(params, lr, **more, scale_type=scale_type, seed=seed)

    def _direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any], step: int, index: int) -> Tensor:
        key = _seed(group["seed"], (step - 1) // group["update_proj_gap"], index)
        low = _projected(grad, random_projection(grad, group["rank"], key))
        direction = _moments(low, state, group)
        # A channel is one of the greater side.
        dim = None if group["scale_type"] == "tensor" else 0 if grad.size(0) < grad.size(1) else 1
        factor = direction.norm(dim=dim, keepdim=True) / (low.norm(dim=dim, keepdim=True) + 1e-8)
        del low, direction
        scaled: Tensor = grad * factor
        norm = scaled.norm()
        if step > 1:
            limiter = (norm / (state["scaled_grad"] + 1e-8)).clamp(min=MAX_GROWTH) / MAX_GROWTH
            scaled.div_(limiter)
            norm = norm / limiter
        state["scaled_grad"] = norm
        return scaled.mul_(math.sqrt(group["scale"]))


def singular_vectors(matrix: Tensor, rank: int) -> Tensor:
    """Return the first singular vectors of a matrix on its lesser side.

    Args:
        matrix: (rows, columns).
        rank: Number of vectors.

    Returns:
        (rank, columns) of a tall or square matrix, (rows, rank) of a wide one.
    """
    left, _, right = torch.linalg.svd(matrix.float(), full_matrices=False)
    vectors: Tensor = right[:rank] if matrix.size(0) >= matrix.size(1) else left[:, :rank]
    # A view would keep all vectors; and a checkpoint keeps no strides, by which products are rounded.
    return vectors.to(matrix.dtype, copy=True, memory_format=torch.contiguous_format)


def random_projection(matrix: Tensor, rank: int, seed: int) -> Tensor:
    """Return normal numbers of variance 1 / rank, in the shape of `singular_vectors`."""
    rows, columns = matrix.shape
    shape = (rank, columns) if rows >= columns else (rows, rank)
    generator = torch.Generator(matrix.device).manual_seed(seed)
    numbers: Tensor = torch.randn(shape, generator=generator, device=matrix.device)
    return numbers.div_(math.sqrt(rank)).to(matrix.dtype)


def _projected(grad: Tensor, projection: Tensor) -> Tensor:
    return grad @ projection.t() if grad.size(0) >= grad.size(1) else projection.t() @ grad


def _moments(low: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Return the first moment over the root of the second, neither corrected for its first steps."""
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(low), torch.zeros_like(low)
    beta1, beta2 = group["betas"]
    state["exp_avg"].mul_(beta1).add_(low, alpha=1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(low, low, value=1 - beta2)
    return torch.div(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]))


def _rows(update: Tensor, weight: Tensor) -> Tensor:
    """Return the part of a whole update that belongs to what this process has of a weight."""
    if not isinstance(weight, DTensor):
        return update
    # All processes have the same, so nothing is sent.
    return distribute_tensor(update, weight.device_mesh, weight.placements, src_data_rank=None).to_local()


def _seed(seed: int, turn: int, index: int) -> int:
    """Seed of the projection of a matrix, which is another one after each `update_proj_gap` steps."""
    digest = hashlib.blake2b(repr((seed, turn, index)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
