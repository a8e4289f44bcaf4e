"""Common part of a cluster's schedulers: the nodes that a run is planned for, and the processes of each."""

import shlex

from tunekit.errors import PlanError
from tunekit.estimates.facts import Hardware
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.plan import Plan
from tunekit.probe.hardware import probe_node
from tunekit.probe.nodes import check_may_go_back
from tunekit.recipe.schema import Recipe


def nodes_of(on: str | None, num_nodes: int | None) -> Hardware:
    """The nodes that a run is to have.

    Args:
        on: A machine as `tunekit plan --on` takes it; nodes like this machine where left out.
        num_nodes: How many; one, or as many as `on` names, where left out.

    Raises:
        PlanError: There is no such machine, or its number of nodes is another one.
    """
    node = find_machine(on).hardware() if on is not None else probe_node()
    if num_nodes not in (None, 1, node.num_nodes) and node.num_nodes > 1:
        raise PlanError(f"--on {on} names {node.num_nodes} nodes, --num-nodes {num_nodes}", hint="give one of them")
    # Which of its devices a program sees holds for this machine alone, and so do the user's variables.
    devices = tuple(device.model_copy(update={"visible_as": None}) for device in node.accelerators)
    return node.model_copy(
        update={"accelerators": devices, "num_nodes": num_nodes or node.num_nodes, "environment": {}}
    )


def with_all_nodes(recipe: Recipe, hardware: Hardware) -> Recipe:
    """The recipe with a process on each of several nodes, where they have no accelerators and it names no number."""
    if hardware.accelerators or hardware.num_nodes == 1 or recipe.parallel.num_processes is not None:
        return recipe
    parallel = recipe.parallel.model_copy(update={"num_processes": hardware.num_nodes})
    return recipe.model_copy(update={"parallel": parallel})


def num_local(plan: Plan) -> int:
    """Processes on each node."""
    return plan.layout.num_processes // plan.num_nodes


def command_of(plan: Plan, python: str, folder: str, *, meeting: str) -> str:
    """Return the shell command for each node: tunekit's own supervisor on a single one, one torchrun on each of
    several.

    Args:
        plan: The plan.
        python: The Python of the nodes.
        folder: The run folder there.
        meeting: Options of torchrun that say how nodes find each other.
    """
    python, folder = shlex.quote(python), shlex.quote(folder)
    if plan.num_nodes == 1:
        return f"{python} -m tunekit.launching.local {folder}"
    check_may_go_back(plan.recipe, "torchrun")
    torchrun = f"{python} -m torch.distributed.run --nnodes={plan.num_nodes} --nproc-per-node={num_local(plan)}"
    return f"{torchrun} {meeting} -m tunekit.training.worker {folder}"


def num_cores(plan: Plan, hardware: Hardware) -> int:
    """Cores for the processes of a node: the share of their accelerators, or else all; what they need where unknown."""
    if hardware.num_cores is None:
        return num_local(plan) * (1 + plan.dataloader_num_workers)
    return max(1, hardware.num_cores * num_local(plan) // max(num_local(plan), len(hardware.accelerators)))
