"""Names that a user interface builds on: recipes as text and fields, runs as they grow, and the types of results.

`tunekit ui` knows these and the names of `tunekit` alone. Like those they load when they are first used.
"""

from typing import Any

from tunekit._names import homes_of, loaded

_HOMES = homes_of(__file__)

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    return loaded(__name__, name, _HOMES)


def __dir__() -> list[str]:
    return __all__
