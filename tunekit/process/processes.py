"""The processes of a run on a machine: how they are started, find each other, and end.

Each is in a session of its own, so that Ctrl-C in a terminal or a notebook reaches only the process that started them,
the supervisor, which then asks them to end. They follow it: when it is gone, whatever the reason, they end too.

They find each other through a store of the first one. The supervisor listens on a port that the system gives and hands
the open socket on, so that no other program can take the port in between.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

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
    import torch

    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=int(os.environ[STORE_SOCKET]),
    )
