"""The processes of a run on one machine: how they are started, find each other, and end.

Each is in a session of its own, so that Ctrl-C in a terminal or a notebook reaches only the process that started them,
the supervisor, which then ends them all. They follow it: when it is gone, whatever the reason, they end by themselves.

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
from pathlib import Path
from types import TracebackType
from typing import Self

from tunekit.planner.plan import Plan

SUPERVISOR = "TUNEKIT_SUPERVISOR"
"""Variable that tells a process the pid of the one that started it."""

STORE_SOCKET = "TUNEKIT_STORE_SOCKET"
"""Variable that tells the first process which of its open files is the socket of the store."""

LOG = "launcher.log"
"""File of a run folder with what its processes wrote to standard output and error, rather than to their own logs."""

GRACE_SECONDS = 15
"""How long processes have to end once they are asked to."""

FOLLOW_SECONDS = 0.5
"""How often a process looks whether its supervisor is there."""

LAUNCHERS_OWN = ("ACCELERATE_", "FSDP_")
"""Beginnings of variables with which `accelerate launch` configures what it starts, which the plan does here."""


class Group:
    """Processes that work on a run, from the beginning of a `with` block; at its end none is left.

    Args:
        folder: The run folder.
        plan: How many there are, and what they find in their environment.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """End all of them: by asking, and those that are left after a while, or after another Ctrl-C, without."""
        try:
            if None in self.codes().values():
                self._signal(signal.SIGTERM)
                self.wait(GRACE_SECONDS)
        finally:
            # Also where a process has ended itself: those that load its rows may still be there.
            self._signal(signal.SIGKILL)
            self.wait(GRACE_SECONDS)

    def _start(self) -> None:
        num = self._plan.layout.num_processes
        command = [sys.executable, "-P", "-m", "tunekit.run.worker", str(self._folder)]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS_OWN)}
        # They find modules where this process does: a notebook may have added to its path.
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        environment = {**inherited, "PYTHONPATH": path, **self._plan.environment, SUPERVISOR: str(os.getpid())}
        with socket.create_server(("127.0.0.1", 0)) as listener, (self._folder / LOG).open("ab") as log:
            for rank in range(num):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**environment, **(_places(rank, num, listener) if num > 1 else {})},
                        pass_fds=[listener.fileno()] if rank == 0 else [],
                        start_new_session=True,
                    )
                )

    def _signal(self, sign: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)


def _places(rank: int, num: int, listener: socket.socket) -> dict[str, str]:
    """What tells a process its place and where the store is, with torchrun's variables."""
    address, port = listener.getsockname()
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num,
        "LOCAL_WORLD_SIZE": num,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        # The store is there: nobody is to open one when the process group is made.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        **({STORE_SOCKET: listener.fileno()} if rank == 0 else {}),
    }
    return {name: str(value) for name, value in places.items()}


def is_supervised() -> bool:
    """Whether a supervisor of tunekit's started this process."""
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
