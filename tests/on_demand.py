"""Fixtures that a test pays for where it reads them."""

from collections.abc import Callable
from typing import Any


class OnDemand(dict[str, Any]):
    """Values by name, each made where it is first read: a runner with few of a module's tests trains few of its runs.

    Args:
        make: What a name stands for.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self._make(name)
        return self[name]
