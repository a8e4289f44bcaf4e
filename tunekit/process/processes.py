"""Processes of a run on a machine: their start, rendezvous, network interfaces and end.

Each has its own session, so that Ctrl-C in a terminal or a notebook reaches only the supervisor that started them,
which then asks them to stop. They exit when the supervisor is gone, whatever the reason.

Their rendezvous is a store of rank 0. The supervisor listens on a free port and passes the open socket on, so that no
other program can take the port in between.
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
"""Variable with the pid of the supervisor."""

STORE_SOCKET = "TUNEKIT_STORE_SOCKET"
"""Variable with the file descriptor of the store's socket, for rank 0."""

VLLM_SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")
"""Arguments of Python that start a vLLM server, before the model."""

LOG = "launcher.log"
"""File of a run folder with the standard output and error of its processes, besides their own logs."""

GONE_SECONDS = 15
"""Seconds for killed processes to exit."""

FOLLOW_SECONDS = 0.5
"""Seconds between two checks of a process that its supervisor is alive."""

LAUNCHERS_OWN = ("ACCELERATE_", "FSDP_")
"""Prefixes of variables by which `accelerate launch` configures its processes; here the plan does."""


@dataclass(frozen=True)
class Share:
    """Part of a process group on this node.

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
        """Return torchrun's variables for a process: its ranks and the address of the store."""
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
    """Processes that run a module during a `with` block; none is left at its end.

    Attributes:
        words: The module's dotted name and its arguments.
        environment: Additional environment variables.
        output: Their standard output and error.
        num: Number of processes, if all are on this machine.
        share: The part on this node, if there are other nodes.
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
        """Return exit codes by rank: negative for a signal, None while a process runs."""
        return {rank: process.poll() for rank, process in enumerate(self._processes)}

    def wait(self, seconds: float) -> None:
        """Wait until all have exited or a time is up."""
        until = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    def terminate(self) -> None:
        """Ask all of them to exit, by SIGTERM."""
        for process in self._processes:
            process.terminate()

    def end(self) -> None:
        """Kill all of them."""
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
    """Return whether a tunekit supervisor started this process."""
    return SUPERVISOR in os.environ


def follow_supervisor() -> None:
    """Kill this process and its children once its supervisor is gone."""
    supervisor = int(os.environ[SUPERVISOR])

    def follow() -> None:
        while os.getppid() == supervisor:
            time.sleep(FOLLOW_SECONDS)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=follow, name="follow-supervisor", daemon=True).start()


def open_store() -> object | None:
    """Open the rendezvous store in rank 0 of several processes; keep it alive until they are done."""
    if STORE_SOCKET not in os.environ:
        return None
    store: object = tcp_store(is_master=True, master_listen_fd=int(os.environ[STORE_SOCKET]))
    return store


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
    """Route of a node to another.

    Attributes:
        address: The node's own address on it.
        interface: The network interface that has this address.
    """

    address: str
    interface: str

    @property
    def is_loopback(self) -> bool:
        """True if it only leads to the node itself."""
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback


def way_to(host: str) -> Way:
    """Return the kernel's route to a host.

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
    """Have gloo and NCCL use one interface, unless the environment sets another.

    NCCL takes a name without a leading `=` as a prefix.
    """
    environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def name_interface_to_main() -> None:
    """Have this process use the interface of its route to the first node, unless one is set.

    Where that is the loopback interface, the libraries choose: it does not show how others reach the node.
    """
    with contextlib.suppress(OSError):
        way = way_to(os.environ["MASTER_ADDR"])
        if not way.is_loopback:
            name_interface(os.environ, way.interface)


def infiniband(root: Path = Path("/")) -> list[str]:
    """Return the names of InfiniBand and RoCE adapters with an active port.

    Args:
        root: The folder that `sys` is in.
    """
    states = sorted((root / INFINIBAND).glob("*/ports/*/state"))
    return sorted({state.parents[2].name for state in states if "ACTIVE" in state.read_text(encoding="ascii")})
