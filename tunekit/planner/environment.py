"""What the processes of a run find in their environment: decided here, shown in the plan, set before torch is there."""

from collections.abc import Iterator, Mapping

from tunekit.planner.facts import Hardware
from tunekit.planner.layout import Layout
from tunekit.planner.plan import Reason

TIMEOUT_SECONDS = 600
"""How long a process waits for the others in an exchange, before it says that one of them does not answer."""


def environment_of(hardware: Hardware, layout: Layout, num_nodes: int) -> dict[str, str]:
    """Variables of every process of a run.

    Args:
        hardware: The machine.
        layout: How the run is spread.
        num_nodes: Nodes in use.
    """
    of_a_node = layout.num_processes // num_nodes
    return {
        **_visible_devices(hardware, of_a_node, num_nodes),
        **_threads(hardware, of_a_node),
        **_accelerator(hardware, layout),
    }


def _visible_devices(hardware: Hardware, of_a_node: int, num_nodes: int) -> dict[str, str]:
    """The devices that are used, since a trainer takes all that it sees. On several nodes it is all of them."""
    used = hardware.freest(of_a_node)
    names = [device.visible_as for device in used if device.visible_as is not None]
    if not names or num_nodes > 1:
        return {}
    return {"CUDA_VISIBLE_DEVICES" if used[0].gfx is None else "HIP_VISIBLE_DEVICES": ",".join(names)}


def _threads(hardware: Hardware, of_a_node: int) -> dict[str, str]:
    """Threads of torch in each of several processes, which would take all cores each."""
    if of_a_node == 1 or hardware.num_cores is None:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, hardware.num_cores // of_a_node))}


def _accelerator(hardware: Hardware, layout: Layout) -> dict[str, str]:
    """What DeepSpeed computes on, which it would guess, with words about it."""
    return {"DS_ACCELERATOR": hardware.device.kind} if layout.strategy.startswith("zero") else {}


def environment_reasons(environment: Mapping[str, str], num_nodes: int) -> Iterator[Reason]:
    """What is set, and what each node finds by itself, for the plan."""
    if environment:
        choice = ", ".join(f"{name}={value}" for name, value in environment.items())
        yield Reason(topic="environment", choice=choice, why="set in every process before torch is imported")
    if num_nodes > 1:
        yield Reason(
            topic="network",
            choice="the interface on the way to the first node",
            why="each node finds its own, unless GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name one",
        )
