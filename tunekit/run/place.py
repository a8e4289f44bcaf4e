"""Which of a run's processes this is, by the variables that torchrun sets."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


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
        """Whether it is the one that writes what all have in common."""
        return self.rank == 0


def place_of(environment: Mapping[str, str] = os.environ) -> Place:
    """The place of a process that torchrun started; alone where none did."""
    if "RANK" not in environment:
        return Place()
    return Place(
        rank=int(environment["RANK"]),
        local_rank=int(environment["LOCAL_RANK"]),
        num_processes=int(environment["WORLD_SIZE"]),
        num_local=int(environment["LOCAL_WORLD_SIZE"]),
    )
