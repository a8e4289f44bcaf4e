"""States of a model whose experts transformers divides, as checkpoints of all layouts have them.

Two things are peculiar to it. An expert's tensor lies on the mesh `(efsdp, ep)`, the outer dimension dividing the parts
of the inner one, which torch's checkpoints store in the wrong places. And the trainer makes an optimizer group of each
mesh, where other layouts have one for all (transformers 5.24, `create_optimizer`).
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
"""Lists of a scheduler's state with an entry for each optimizer group."""


def divide_adapter(model: Module, policy: MixedPrecisionPolicy) -> None:
    """Divide the adapter of a model whose weights transformers has divided, as FSDP2 divides weights.

    Transformers makes the units when it loads the model, and what is attached later is in none: each process would
    train its own adapter on its own rows. Here all matrices of a layer are one more unit, which stays gathered between
    the passes, as they are small.

    Args:
        model: With its adapter attached, the same in every process.
        policy: Types of the products and of the reduced gradients.
    """
    # Units are listed from the outside to the inside.
    units = {
        module: unit
        for unit in model.modules()
        if isinstance(unit, FSDPModule)
        for module in unit.modules()
        if any(weight.requires_grad for weight in module.parameters(recurse=False))
    }
    layers: dict[Module, list[Module]] = {}
    for module, unit in units.items():
        layers.setdefault(unit, []).append(module)
    meshes = [weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)]
    mesh = next(mesh for mesh in meshes if mesh.ndim == 1 and mesh.size() == max(each.size() for each in meshes))
    for modules in layers.values():
        fully_shard(modules, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


def in_order(states: Any) -> Any:
    """Return states with the same local tensors, in which each part of an expert's tensor has its true place.

    Over the mesh `(ep, efsdp)` the parts of `(efsdp, ep)` follow one another.
    """
    return tree_map_only(DTensor, _in_order, states)


def _in_order(tensor: DTensor) -> DTensor:
    if not any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return tensor
    return _with_part(tensor, tensor.to_local(), _inner_first(tensor.device_mesh), (Shard(0), Shard(0)))


@cache
def _inner_first(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of two dimensions with the inner one first, for places alone: it has no groups."""
    return DeviceMesh(mesh.device_type, mesh.mesh.T.contiguous(), _init_backend=False)


def _with_part(
    like: DTensor, part: Tensor, mesh: DeviceMesh | None = None, places: Sequence[Placement] | None = None
) -> DTensor:
    mesh, places = mesh or like.device_mesh, places or like.placements
    return DTensor.from_local(part, mesh, places, run_check=False, shape=like.shape, stride=like.stride())


def placed_like(value: Tensor, like: DTensor) -> DTensor:
    """Return this process's part of a whole tensor, as another one is divided. Nothing is sent."""
    target = _in_order(like)
    part = distribute_tensor(value.to(like.device), target.device_mesh, target.placements, src_data_rank=None)
    # A state may have another shape than its weight.
    return part if target is like else _with_part(like, part.to_local())


def can_be_copied(states: Any) -> Any:
    """Return states whose tensors torch copies, as it does none whose part begins within its storage.

    Transformers leaves such views on a CPU. The tensor around it has their offset and no storage, which torch's stager
    takes for one (torch 2.13, `StateDictStager._offload_tensor`).
    """
    return tree_map_only(DTensor, _without_offset, states)


def _without_offset(tensor: DTensor) -> DTensor:
    return _with_part(tensor, tensor.to_local().clone()) if tensor.storage_offset() else tensor


def groups_by_origin(optimizer: Optimizer) -> list[list[int]]:
    """Return the numbers of an optimizer's groups, those together that are one where all lies on one mesh."""
    origins: list[list[int]] = []
    meshes: set[DeviceMesh | None] = set()
    for number, group in enumerate(optimizer.param_groups):
        mesh = next((weight.device_mesh for weight in group["params"] if isinstance(weight, DTensor)), None)
        # The trainer has each mesh once in what was one group.
        if not origins or mesh in meshes or mesh is None:
            origins.append([])
            meshes = set()
        origins[-1].append(number)
        meshes.add(mesh)
    return origins


def joined_groups(groups: Sequence[dict[str, Any]], optimizer: Optimizer, model: Module) -> list[dict[str, Any]]:
    """Return groups of an optimizer, by parameters or by their names, as other layouts have them.

    Args:
        groups: The groups, in the order of the optimizer's.
        optimizer: The optimizer.
        model: Its model, whose parameters give the order within a group.
    """
    order: dict[Any, int] = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        order |= {name: number, id(parameter): number}

    def place(member: Any) -> int:
        return order[member if isinstance(member, str) else id(member)]

    def joined(numbers: Sequence[int]) -> dict[str, Any]:
        if len(numbers) == 1:
            return groups[numbers[0]]
        members = [member for number in numbers for member in groups[number]["params"]]
        return {**groups[numbers[0]], "params": sorted(members, key=place)}

    return [joined(numbers) for numbers in groups_by_origin(optimizer)]


def divided_groups(
    joined: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]], optimizer: Optimizer
) -> list[dict[str, Any]]:
    """Return `groups` of an optimizer with the settings of the `joined` ones."""
    return [
        {**settings, "params": groups[number]["params"]}
        for settings, numbers in zip(joined, groups_by_origin(optimizer), strict=True)
        for number in numbers
    ]


def joined_schedule(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of a scheduler with an entry for each group that other layouts have."""
    first = [numbers[0] for numbers in groups_by_origin(optimizer)]
    return state | {name: [state[name][number] for number in first] for name in PER_GROUP if name in state}


def divided_schedule(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of a scheduler with an entry for each group of this optimizer."""
    sizes = [len(numbers) for numbers in groups_by_origin(optimizer)]
    return state | {name: list(_repeated(state[name], sizes)) for name in PER_GROUP if name in state}


def _repeated(values: Iterable[Any], times: Sequence[int]) -> Iterable[Any]:
    return (value for value, often in zip(values, times, strict=True) for _ in range(often))
