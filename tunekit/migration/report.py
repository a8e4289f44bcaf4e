"""Result of a migration: a recipe, and the fate of every key of the original."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tunekit.recipe.schema import Recipe

Kind = Literal["carried", "decided", "different", "unsupported", "silent"]
"""Fate of a key: set in the recipe; decided by tunekit; trains differently here; unsupported; or without effect."""

TOOLS: Mapping[str, str] = {
    "axolotl": "Axolotl",
    "llama-factory": "LLaMA-Factory",
    "trl": "TRL",
    "torchtune": "torchtune",
    "ms-swift": "ms-swift",
}
"""The tools that are read, by the names that `--from` takes."""


class Fate(NamedTuple):
    """Fate of a key, with its target or reason in words."""

    kind: Kind
    words: str
    remedy: str = ""
    """Where it is `different`: the recipe's field that makes it the same, if there is one."""


@dataclass(frozen=True)
class Line:
    """A key of the original and what became of it."""

    kind: Kind
    key: str
    value: Any
    line: int
    """From 1, in the original; 0 for one that was given beside it."""
    words: str
    remedy: str = ""
    """Where it is `different`: the recipe's field that makes it the same, if there is one."""


class Assumed(NamedTuple):
    """Something that the original leaves out and that its tool does otherwise than tunekit: the recipe says it."""

    key: str
    """Of the recipe."""
    value: Any
    words: str


class Suspicion(NamedTuple):
    """Something in the original that may not be what its author wanted."""

    line: int
    """From 1; 0 where it is about something that is not there."""
    words: str


@dataclass(frozen=True)
class Migration:
    """A recipe made of another tool's configuration, and the report of it."""

    path: str
    tool: str
    """One of `TOOLS`."""
    recipe: Recipe
    text: str
    """The recipe as YAML: what differs from the defaults, with comments."""
    lines: tuple[Line, ...]
    """Every key of the original, once, in its order."""
    assumed: tuple[Assumed, ...]
    suspicious: tuple[Suspicion, ...]
    unsaid: tuple[Line, ...] = ()
    """Defaults of the tool that differ from the recipe's, where the original sets nothing."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of the Python files that the recipe needs next to it, by their names."""

    def of_kind(self, kind: Kind) -> tuple[Line, ...]:
        """The keys that something became of."""
        return tuple(line for line in self.lines if line.kind == kind)

    @property
    def different(self) -> tuple[Line, ...]:
        """All in which the recipe trains otherwise than the original."""
        return (*self.of_kind("different"), *self.unsaid)

    @property
    def is_whole(self) -> bool:
        """True if no key was left behind; those that are there may still be `different`."""
        return not self.of_kind("unsupported")

    @property
    def is_same(self) -> bool:
        """True if it is whole, and a field of the recipe makes the same of all that is different."""
        return self.is_whole and all(line.remedy for line in self.different)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "file": self.path,
            "tool": self.tool,
            "recipe": self.text,
            "files": dict(self.files),
            "keys": [vars(line) for line in self.lines],
            "unsaid": [vars(line) for line in self.unsaid],
            "assumed": [assumption._asdict() for assumption in self.assumed],
            "suspicious": [assumption._asdict() for assumption in self.suspicious],
        }
