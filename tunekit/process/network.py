"""By which way a node reaches another: its own address, the interface that has it, and whether there is InfiniBand."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

import psutil

ANY_PORT = 9
"""A port to name where none matters: no packet is sent to it."""

INFINIBAND = Path("sys/class/infiniband")
"""Folder where Linux lists InfiniBand and RoCE adapters, with the state of their ports."""


@dataclass(frozen=True)
class Way:
    """A node's way to another.

    Attributes:
        address: The node's own address on it.
        interface: The network interface that has this address.
    """

    address: str
    interface: str

    @property
    def is_loopback(self) -> bool:
        """True if it leads to the node itself and nowhere else."""
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback


def way_to(host: str) -> Way:
    """The way to a host, as the kernel's routes have it.

    Args:
        host: Its name or address.

    Raises:
        OSError: It has no address, or there is no route to it.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing: the kernel looks up the route and chooses the source address.
        probe.connect(target)
        address: str = probe.getsockname()[0]
    for interface, addresses in psutil.net_if_addrs().items():
        if any(candidate.address.partition("%")[0] == address for candidate in addresses):
            return Way(address, interface)
    if ipaddress.ip_address(address).is_loopback:
        # All of 127.0.0.0/8 is the loopback's, of which it lists one address.
        return Way(address, "lo")
    raise OSError(f"no interface has the address {address}")


def name_interface(environment: MutableMapping[str, str], interface: str) -> None:
    """Have gloo and NCCL use one interface, unless the environment says otherwise already.

    NCCL takes the name as a beginning where no `=` stands before it.
    """
    environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def name_interface_to_main() -> None:
    """Have this process use the interface by which it reaches the first node of its run, unless one is set.

    A node that knows itself by a loopback address cannot tell by which one the others reach it: there the libraries
    choose.
    """
    with contextlib.suppress(OSError):
        way = way_to(os.environ["MASTER_ADDR"])
        if not way.is_loopback:
            name_interface(os.environ, way.interface)


def infiniband(root: Path = Path("/")) -> list[str]:
    """InfiniBand and RoCE adapters with a port that is up, by name.

    Args:
        root: The folder that `sys` is in.
    """
    states = sorted((root / INFINIBAND).glob("*/ports/*/state"))
    return sorted({state.parents[2].name for state in states if "ACTIVE" in state.read_text(encoding="ascii")})
