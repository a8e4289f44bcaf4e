"""Locations in the user's text, and problems there.

A recipe is read into plain values; beside them, `Places` remembers for every key and value the line and column that
it came from, so that a mistake found much later can still be pointed at. All mistakes are collected as `Problem`s and
raised together, in the order of the file: a user mends them in one go.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tunekit.errors import RecipeError
from tunekit.redact import redacted

Key = tuple[str | int, ...]
"""A path into the recipe: `("adapter", "rank")`. Numbers are positions in lists."""

_PART = re.compile(r"([^\[\]]+)((?:\[[0-9]{1,9}\])*)")
"""A name, and the positions behind it: `train[0]`."""


@dataclass(frozen=True, order=True)
class Place:
    """A position in a file, or a source without positions. Places sort in reading order."""

    rank: int
    """0 for files and mappings, 1 for what follows them, such as the command line."""

    line: int
    """From 1; 0 where the source has no lines."""

    column: int
    """From 1; 0 where the source has no lines."""

    source: str
    """The file as the user named it, `recipe` for a mapping, or `command line`."""

    def __str__(self) -> str:
        """The place as messages show it: `recipe.yaml:5:3`."""
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


COMMAND_LINE = Place(1, 0, 0, "command line")
MAPPING = Place(0, 0, 0, "recipe")


@dataclass(frozen=True)
class Problem:
    """One mistake: where, at which key, what, and what to do about it."""

    place: Place
    what: str
    key: Key = ()
    hint: str | None = None

    def __str__(self) -> str:
        """The line that the user reads."""
        where = f"{self.place}: {dotted(self.key)}" if self.key else str(self.place)
        return f"{where}: {self.what}; {self.hint}" if self.hint else f"{where}: {self.what}"


@dataclass(frozen=True)
class Fault:
    """One mistake as an editor shows it, beside its line and at its field."""

    line: int
    """From 1; 0 where it is in an override."""

    column: int
    """From 1; 0 where it is in an override."""

    key: str
    """The dotted key; empty where none is at fault, as in a text that is not YAML."""

    problem: str
    hint: str | None

    @property
    def message(self) -> str:
        """Problem, with its remedy."""
        return f"{self.problem}; {self.hint}" if self.hint else self.problem

    def __str__(self) -> str:
        """The line that the command line shows, without the file's name."""
        where = f"{self.line}:{self.column}: " if self.line else "command line: "
        return f"{where}{self.key}: {self.message}" if self.key else f"{where}{self.message}"


@dataclass
class Places:
    """The place of every key and of every value of a recipe."""

    start: Place
    """Where the recipe begins: the place of what is missing at the top."""

    keys: dict[Key, Place] = field(default_factory=dict)
    values: dict[Key, Place] = field(default_factory=dict)

    def of_key(self, key: Key) -> Place:
        """The place of a key, or of the nearest section or list item above it that was written."""
        while key:
            if key in self.keys:
                return self.keys[key]
            if isinstance(key[-1], int) and key in self.values:
                return self.values[key]
            key = key[:-1]
        return self.start

    def of_value(self, key: Key) -> Place:
        """The place of a key's value, or of the nearest value above it that was written."""
        while key:
            if key in self.values:
                return self.values[key]
            key = key[:-1]
        return self.start

    def forget(self, key: Key) -> None:
        """Drop the places of a key and of everything below it, because something else takes its place."""
        for locations in (self.keys, self.values):
            for other in [other for other in locations if other[: len(key)] == key]:
                del locations[other]


def dotted(key: Key) -> str:
    """A key as people write it: `adapter.rank`, `adapter.target_modules[1]`."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def undotted(text: str) -> Key | None:
    """The key that `dotted` writes so, with spaces around names allowed; None where the text is no key."""
    key: Key = ()
    for part in text.split("."):
        match = _PART.fullmatch(part.strip())
        if match is None:
            return None
        key = (*key, match[1].strip(), *(int(position) for position in re.findall("[0-9]+", match[2])))
    return key


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise all problems as one error, in the order of the file, the command line last.

    Raises:
        RecipeError: There is at least one problem.
    """
    lines = [str(problem) for problem in sorted(problems, key=lambda problem: problem.place)]
    if lines:
        raise RecipeError(redacted("\n".join(dict.fromkeys(lines))))
