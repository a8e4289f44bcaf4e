"""How many machines a run has, by what the launcher wrote into the environment.

The innermost launcher counts: torchrun starts the processes, Slurm and SkyPilot give it the nodes. Only this node can
be looked at; the others are taken to be like it, and the plan says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tunekit.errors import PlanError


@dataclass(frozen=True)
class Launch:
    """What a launcher says of the machines."""

    launcher: str
    num_nodes: int
    num_local: int | None = None
    """Processes on this node (torchrun), or accelerators that it was given (Slurm, SkyPilot); None where not said."""
    starts_processes: bool = False
    """Whether `num_local` counts processes."""
    is_elsewhere: bool = False
    """Whether this process runs on none of the nodes, as on the login node of a cluster."""


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """What the launcher of this process says; None where there is none.

    Raises:
        PlanError: What it says cannot be true.
    """
    return _torchrun(environment) or _slurm(environment) or _skypilot(environment)


def use_launch(launch: Launch, num_visible: int) -> tuple[int, str | None]:
    """How many of this node's accelerators a run uses, and what is to be said of every plan.

    Args:
        launch: What the launcher says.
        num_visible: Equal accelerators that this process sees.

    Raises:
        PlanError: The launcher and the machine contradict each other.
    """
    if launch.is_elsewhere:
        return num_visible, _elsewhere(launch, num_visible)
    num_used, note = _share(launch, num_visible)
    several = f"{launch.num_nodes} nodes by {launch.launcher}, all taken to be like this one"
    notes = [several] if launch.num_nodes > 1 else []
    return num_used, "; ".join([*notes, note] if note else notes) or None


def _share(launch: Launch, num_visible: int) -> tuple[int, str | None]:
    """How many of a node's accelerators the launcher leaves to a run, and what is to be said of it."""
    given = launch.num_local
    if given is None or given == num_visible:
        return num_visible, None
    if launch.starts_processes:
        if num_visible == 0:
            return 0, None
        if given > num_visible:
            raise PlanError(
                f"{launch.launcher} runs {given} processes on this node, but this process sees {_devices(num_visible)}",
                hint="start as many processes as there are accelerators, or see CUDA_VISIBLE_DEVICES",
            )
        return given, f"{launch.launcher} runs {given} processes on this node of {num_visible} accelerators"
    if given < num_visible:
        raise PlanError(
            f"{launch.launcher} gave {_devices(given)} on this node, but this process sees {_devices(num_visible)}",
            hint="hide those of others: set CUDA_VISIBLE_DEVICES to the ones that were given",
        )
    return num_visible, f"{launch.launcher} gave {_devices(given)} on this node, of which {num_visible} can be used"


def _elsewhere(launch: Launch, num_visible: int) -> str:
    nodes = "node is" if launch.num_nodes == 1 else f"{launch.num_nodes} nodes are"
    note = f"this is not one of the nodes that {launch.launcher} gave: its {nodes} taken to be like this machine"
    if launch.num_local is not None and launch.num_local != num_visible:
        note += f", which has {_devices(num_visible)} for their {launch.num_local}: name them with --on"
    return note


def _devices(number: int) -> str:
    return "1 accelerator" if number == 1 else f"{number} accelerators"


def _torchrun(environment: Mapping[str, str]) -> Launch | None:
    """What torchrun tells the processes that it starts; `accelerate launch` does the same."""
    local = _count(environment, "LOCAL_WORLD_SIZE")
    world = _count(environment, "WORLD_SIZE")
    if not local or not world:
        return None
    nodes = _count(environment, "GROUP_WORLD_SIZE") or _count(environment, "NNODES") or -(-world // local)
    if nodes * local != world:
        raise PlanError(
            f"the launcher says WORLD_SIZE={world}, but {nodes} nodes with {local} processes each are {nodes * local}",
            hint="start the same number of processes on every node",
        )
    return Launch("torchrun", nodes, local, starts_processes=True)


def _slurm(environment: Mapping[str, str]) -> Launch | None:
    """What Slurm tells a job's steps, its script, and the shell of `salloc`, which may run on a login node."""
    nodes = _count(environment, "SLURM_JOB_NUM_NODES") or _count(environment, "SLURM_NNODES")
    if nodes is None:
        return None
    given = _count(environment, "SLURM_GPUS_ON_NODE")
    if given is None:
        # As it was asked for: `8`, or with the kind, `h100:8`.
        asked = environment.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
        given = int(asked) if asked.isdigit() else None
    return Launch("Slurm", nodes, given, is_elsewhere="SLURMD_NODENAME" not in environment)


def _skypilot(environment: Mapping[str, str]) -> Launch | None:
    nodes = _count(environment, "SKYPILOT_NUM_NODES")
    return None if nodes is None else Launch("SkyPilot", nodes, _count(environment, "SKYPILOT_NUM_GPUS_PER_NODE"))


def _count(environment: Mapping[str, str], name: str) -> int | None:
    """A number from the environment; None where it is not set.

    Raises:
        PlanError: It is no number.
    """
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise PlanError(f"{name} is {text!r}, which is no number", hint=f"unset {name}, or see what set it")
    return int(text)
