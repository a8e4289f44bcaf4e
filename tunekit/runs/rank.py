"""Rank of this process in a run, from its launcher's variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tunekit.probe.nodes import read_launch


@dataclass(frozen=True)
class Place:
    """A process among those of its run.

    Attributes:
        rank: Its number among all.
        local_rank: Its number on its node, which is that of its device.
        num_processes: All of them.
        num_local: Those of its node.
    """

    rank: int = 0
    local_rank: int = 0
    num_processes: int = 1
    num_local: int = 1

    @property
    def is_main(self) -> bool:
        """True for the process that writes the shared files."""
        return self.rank == 0


def place_of(environment: Mapping[str, str] = os.environ) -> Place:
    """The place of a process that torchrun, mpirun, srun or tunekit started; alone where none of them did.

    Raises:
        PlanError: What the launcher says cannot be true.
    """
    launch = read_launch(environment)
    if launch is None or not launch.num_processes or not launch.num_local:
        return Place()
    return Place(launch.rank, launch.local_rank, launch.num_processes, launch.num_local)
