"""Waiting in tests: for the thing itself, never for a time.

A test that hopes that a second is enough fails on a machine that is busy. So each waits for an event, a file, a line or
the end of a process, and all of them have one limit, which only what never happens comes to.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")

LIMIT_SECONDS = 600.0
"""How long anything may take that is waited for, by whatever means."""

LOOK_SECONDS = 0.02
"""How often it is looked for."""


def until(look: Callable[[], T], what: Callable[[], object] | None = None) -> T:
    """What there is to see, once there is something.

    Args:
        look: Gives it, or something false. It may fail to tell that it will never come.
        what: What to say where it does not come.

    Raises:
        AssertionError: It did not come.
    """
    ends = time.monotonic() + LIMIT_SECONDS
    while not (found := look()):
        assert time.monotonic() < ends, what() if what is not None else "it did not come"
        time.sleep(LOOK_SECONDS)
    return found


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
