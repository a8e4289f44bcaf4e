"""Processes of a run on a machine: how they are started, reach and find each other, and end.

Each is in a session of its own, so that Ctrl-C in a terminal or a notebook reaches only the process that started them,
the supervisor, which then asks them to end. They follow it: when it is gone, whatever the reason, they end too.

They find each other through a store of the first one. The supervisor listens on a port that the system gives and hands
the open socket on, so that no other program can take the port in between.
"""

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import psutil

SUPERVISOR = "TUNEKIT_SUPERVISOR"
"""Variable that tells a process the pid of the one that started it."""

STORE_SOCKET = "TUNEKIT_STORE_SOCKET"
"""Variable that tells the first process which of its open files is the socket of the store."""

LOG = "launcher.log"
"""File of a run folder with what its processes wrote to standard output and error, rather than to their own logs."""

GONE_SECONDS = 15
"""Seconds for the system to end processes that were killed."""

FOLLOW_SECONDS = 0.5
"""Seconds between two checks of a process that its supervisor is alive."""

LAUNCHERS_OWN = ("ACCELERATE_", "FSDP_")
"""Beginnings of variables with which `accelerate launch` configures what it starts, which the plan does here."""


@dataclass(frozen=True)
class Share:
    """The processes of a group that are on this node.

    Attributes:
        num: Processes of all nodes.
        num_local: Processes of each node.
        node: Number of this one.
        store: Address and port of the store.
        listener: The socket that listens there, on the first node.
    """

    num: int
    num_local: int
    node: int
    store: tuple[str, int]
    listener: socket.socket | None

    def places(self, local_rank: int) -> dict[str, str]:
        """Return torchrun's variables for a process: its rank, and the address of the store."""
        if self.num == 1:
            return {}
        rank = self.node * self.num_local + local_rank
        places = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.num,
            "LOCAL_WORLD_SIZE": self.num_local,
            "MASTER_ADDR": self.store[0],
            "MASTER_PORT": self.store[1],
            # The store is there: nobody is to open one when the process group is made.
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        if rank == 0 and self.listener is not None:
            places[STORE_SOCKET] = self.listener.fileno()
        return {name: str(value) for name, value in places.items()}


@dataclass
class Group:
    """Processes of a module, from the beginning of a `with` block; at its end none is left.

    Attributes:
        words: The module's dotted name, and arguments for it.
        environment: Variables that each finds.
        output: Where they write to.
        num: How many there are on this machine, where they are all on it.
        share: Which of them are here, where there are others elsewhere.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    output: IO[bytes]
    num: int = field(default=1, kw_only=True)
    share: Share | None = field(default=None, kw_only=True)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    def __enter__(self) -> Self:
        try:
            if self.share is not None:
                self._start(self.share)
            else:
                with socket.create_server(("127.0.0.1", 0)) as listener:
                    self._start(Share(self.num, self.num, 0, listener.getsockname()[:2], listener))
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def codes(self) -> dict[int, int | None]:
        """Exit code of each process by rank: minus the signal that ended it, None while it is there."""
        return {rank: process.poll() for rank, process in enumerate(self._processes)}

    def wait(self, seconds: float) -> None:
        """Wait until all are gone, at most so long."""
        until = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """End all of them. Whatever they are to do before, they were asked to do by other means."""
        # Also where a process has ended itself: those that load its rows may still be there.
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.wait(GONE_SECONDS)

    def _start(self, share: Share) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS_OWN)}
        # They find modules where this process does: a notebook may have added to its path.
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        environment = {**inherited, "PYTHONPATH": path, **self.environment, SUPERVISOR: str(os.getpid())}
        for local_rank in range(share.num_local):
            places = share.places(local_rank)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", *self.words],
                    stdin=subprocess.DEVNULL,
                    stdout=self.output,
                    stderr=self.output,
                    env={**environment, **places},
                    pass_fds=[int(places[STORE_SOCKET])] if STORE_SOCKET in places else [],
                    start_new_session=True,
                )
            )


def is_supervised() -> bool:
    """Return whether a supervisor of tunekit's started this process."""
    return SUPERVISOR in os.environ


def follow_supervisor() -> None:
    """End this process and those that it started once its supervisor is gone, which nobody else would do."""
    supervisor = int(os.environ[SUPERVISOR])

    def follow() -> None:
        while os.getppid() == supervisor:
            time.sleep(FOLLOW_SECONDS)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=follow, name="follow-supervisor", daemon=True).start()


def open_store() -> object | None:
    """The store through which the processes find each other, in the first of several; keep it until they are done."""
    if STORE_SOCKET not in os.environ:
        return None
    return tcp_store(is_master=True, master_listen_fd=int(os.environ[STORE_SOCKET]))


def tcp_store(port: int | None = None, *, is_master: bool, **options: Any) -> Any:
    """Return a store of torch's at the address of the first process, at its port or another."""
    import torch

    port = int(os.environ["MASTER_PORT"]) if port is None else port
    store = torch.distributed.TCPStore  # type: ignore[attr-defined]
    return store(os.environ["MASTER_ADDR"], port, is_master=is_master, wait_for_workers=False, **options)


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
