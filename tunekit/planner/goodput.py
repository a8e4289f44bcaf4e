"""How much of the time that a long run takes is training: what is lost to checkpoints and to failures.

A failure costs what was done since the last checkpoint, half an interval on average, and the restart. Checkpoints cost
the time for which training stands still. The interval at which both together cost least is Young's (CACM 17(9), 1974);
Daly (FGCS 22(3), 2006) gives terms of higher order, which matter only where failures come as fast as checkpoints.
"""

import math


def checkpoint_interval_seconds(save_seconds: float, failure_seconds: float) -> float:
    """Time between two checkpoints that loses the least: sqrt(2 x save x time between failures).

    Args:
        save_seconds: For how long a checkpoint stops the training.
        failure_seconds: Mean time between two failures of the whole machine.
    """
    return math.sqrt(2 * save_seconds * failure_seconds)


def goodput(save_seconds: float, failure_seconds: float, restart_seconds: float, *, interval_seconds: float) -> float:
    """Share of the time in which training goes on: 1 - save/interval - interval/(2 failure) - restart/failure.

    Args:
        save_seconds: For how long a checkpoint stops the training.
        failure_seconds: Mean time between two failures of the whole machine.
        restart_seconds: From a failure to the first step after it.
        interval_seconds: Time between two checkpoints.

    Returns:
        A share from 0 to 1; 0 where failures come faster than work is saved.
    """
    lost = save_seconds / interval_seconds + (interval_seconds / 2 + restart_seconds) / failure_seconds
    return max(0.0, 1 - lost)
