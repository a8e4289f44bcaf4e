"""Names of runs and sweeps. A folder is called NAME-YYYYMMDD-HHMMSS, and -2, -3, ... where several began at once.

A text names, in this order: the folder that is wholly so called; the folders whose NAME it is; and, for commands that
only look, the one folder that begins with it.
"""

import re
from collections.abc import Sequence

from tunekit.errors import RunError

_TIME = re.compile(r"-\d{8}-\d{6}(-\d+)?$")
"""Time at the end of a folder's name."""

MAX_CANDIDATES = 5
"""Most names that an error lists."""


def stem_of(name: str) -> str:
    """Return the name of a folder without the time at its end."""
    return _TIME.sub("", name)


def called(name: str, names: Sequence[str]) -> list[str]:
    """Return the folder that is wholly so called, else those that are so without the time."""
    return [candidate for candidate in names if candidate == name] or [
        candidate for candidate in names if stem_of(candidate) == name
    ]


def matching(name: str, names: Sequence[str], *, noun: str, exact: bool) -> list[str]:
    """Return the folders that a name means, in their order; none where there is none.

    Args:
        name: A folder's name, its name without the time, or the beginning of it.
        names: Names of the folders that there are.
        noun: `run` or `sweep`, for errors.
        exact: Whether the beginning of a name is not enough.

    Raises:
        RunError: It is the beginning of several names, or of one where that is not enough.
    """
    matches = called(name, names)
    beginning = [candidate for candidate in names if candidate.startswith(name)] if name else []
    if matches or not beginning:
        return matches
    if exact:
        raise RunError(f"no {noun} is called {name!r}", hint=f"name the {noun} wholly: {_listed(beginning)}")
    if len(beginning) > 1:
        raise RunError(f"{name!r} is the beginning of {len(beginning)} {noun}s", hint=f"name one: {_listed(beginning)}")
    return beginning


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_CANDIDATES
    return ", ".join(names[:MAX_CANDIDATES]) + (f" and {more} more" if more > 0 else "")
