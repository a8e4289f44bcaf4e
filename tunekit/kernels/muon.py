"""Muon: momentum that is made orthogonal, matrix by matrix, and AdamW for everything that is no matrix.

    b = b + (1 - mu) * (g - b)
    u = g + mu * (b - g)
    w = (1 - lr * decay) * w - lr * 0.2 * sqrt(max(rows, columns)) * orthogonal(u)

https://kellerjordan.github.io/posts/muon. `orthogonal` gives all directions of the update about the same weight: five
steps of a Newton-Schulz iteration in bfloat16 take the singular values of a matrix to 0.7 to 1.2. The factor gives the
update the root mean square of AdamW's, so that AdamW's learning rate and weight decay apply
(https://arxiv.org/abs/2502.16982, section 2.2). A weight keeps one value of state, b, where AdamW keeps two.

On matrices that are whole these are the operations of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, with the same
bits. What that does not take are stacks of matrices, as experts have them, and matrices whose rows processes divide:
each process takes whole ones in turn, so that none is computed twice, and the bits are those of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x³ and x⁵ in a step of the iteration."""

NUM_ITERATIONS = 5

EPS = 1e-7
"""Least norm by which a matrix is divided."""

RMS_OF_ADAMW = 0.2


class Muon(torch.optim.Optimizer):
    """Muon for the groups with `use_muon`, of matrices or of stacks of them, and torch's fused AdamW for the others.

    Parameters may be DTensors that are divided along their first dimension.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        momentum: float = 0.95,
    ) -> None:
        """Hold the parameters.

        Args:
            params: Groups of parameters.
            lr: Learning rate.
            betas: Decay of AdamW's moments.
            eps: Added to the root of AdamW's second moment.
            weight_decay: Decoupled weight decay.
            momentum: Decay of Muon's momentum.
        """
        # It is given the groups and the states at each step: its own parameter is never updated.
        self._adamw = torch.optim.AdamW(
            [torch.zeros(1)], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )
        super().__init__(params, {**self._adamw.defaults, "momentum": momentum, "use_muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["use_muon"]:
                self._update(group)
        self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adamw.state = self.state
        self._adamw.step()
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        lr = float(group["lr"])
        weights = [weight for weight in group["params"] if weight.grad is not None]
        for weight, update in self._updates(weights, group["momentum"]):
            values = _local(weight)
            values.mul_(1 - lr * group["weight_decay"])
            values.add_(update, alpha=-lr * RMS_OF_ADAMW * math.sqrt(max(weight.shape[-2:])))

    def _updates(self, weights: list[Tensor], momentum: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield weights and the parts of their orthogonal updates that this process has."""
        divided: dict[DeviceMesh, list[Tensor]] = {}
        for weight in weights:
            mesh = _mesh(weight)
            if mesh is None:
                yield weight, orthogonal(self._momentum(weight, momentum))
            else:
                divided.setdefault(mesh, []).append(weight)
        for mesh, of_mesh in divided.items():
            # Processes take matrices of about the same size at a time.
            of_mesh.sort(key=torch.Tensor.numel, reverse=True)
            for start in range(0, len(of_mesh), mesh.size()):
                some = of_mesh[start : start + mesh.size()]
                parts = [_part(self._momentum(weight, momentum), weight, mesh) for weight in some]
                yield from zip(some, orthogonal_parts(parts, mesh), strict=True)

    def _momentum(self, weight: Tensor, momentum: float) -> Tensor:
        """Return Nesterov's momentum of what this process has of a weight, in bfloat16."""
        assert weight.grad is not None, "others are not updated"
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        gradient, buffer = _local(weight.grad), _local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum).bfloat16()


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about U V^T of a matrix U S V^T, by Newton-Schulz.

    Args:
        matrix: (rows, columns) or (matrices, rows, columns), bfloat16.
    """
    of_x, of_cube, of_fifth = COEFFICIENTS
    add_product = torch.addmm if matrix.dim() == 2 else torch.baddbmm
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if is_tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=of_cube, alpha=of_fifth), x, beta=of_x)
    return x.mT if is_tall else x


def orthogonal_parts(parts: list[DTensor], mesh: DeviceMesh) -> list[Tensor]:
    """Return this process's rows of `orthogonal` of each matrix, of which there are no more than processes.

    The first process gathers the first matrix, and so on. All are gathered before any is computed, so that they are
    computed at the same time.
    """
    rank, mine = mesh.get_local_rank(), None
    for owner, part in enumerate(parts):
        whole = part.full_tensor()
        if owner == rank:
            mine = whole
    if mine is not None:
        mine = orthogonal(mine).contiguous()
    rows = []
    for owner, part in enumerate(parts):
        whole = (
            mine
            if owner == rank and mine is not None
            else torch.empty(part.shape, dtype=part.dtype, device=part.device)
        )
        rows.append(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=owner).to_local())
    return rows


def _mesh(weight: Tensor) -> DeviceMesh | None:
    """Return the processes that divide the rows of a matrix; None where this one has it whole, or whole experts."""
    if not isinstance(weight, DTensor) or weight.dim() > 2:
        return None
    divides = [at for at, placement in enumerate(weight.placements) if placement.is_shard()]
    if not divides or weight.device_mesh.ndim == 1:
        return weight.device_mesh if divides else None
    (at,), names = divides, weight.device_mesh.mesh_dim_names
    assert names is not None, "the dimensions of FSDP2's meshes have names"
    return weight.device_mesh[names[at]]


def _part(values: Tensor, weight: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(values, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())


def _local(tensor: Tensor) -> Tensor:
    """Return the values that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
