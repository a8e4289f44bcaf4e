"""Base of every section of a recipe: closed, frozen, strictly typed, described by the strings under its fields."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, NewType

from pydantic import BaseModel, ConfigDict, model_validator

from tunekit.recipe.reading.parse import Key, dotted

TAG = "type"
"""The key by which the variants of a section are told apart."""

EXPANDS_ENV = {"expands_env": True}
"""Marks the string fields in which `${NAME}` stands for an environment variable, and a leading `~` for the home
folder. Elsewhere `${NAME}` is refused."""

FUNCTION_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
"""What the path of a function looks like: `my_package.my_module:my_function`."""

FunctionPath = NewType("FunctionPath", str)
"""A function of the user's own, `module:function`. It is looked up when the recipe is loaded."""


class Conflict(NamedTuple):
    """A field that does not go together with others."""

    key: Key
    """The field, below the section that says so."""

    what: str
    hint: str


class Conflicts(ValueError):
    """Fields that are right one by one and do not go together: a section raises it, and readers find its places."""

    def __init__(self, found: list[Conflict]) -> None:
        self.found = found
        super().__init__("\n".join(f"{dotted(item.key)}: {item.what}; {item.hint}" for item in found))


class Section(BaseModel):
    """A part of a recipe: closed, frozen, strictly typed, described by the strings under its fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    shorthand: ClassVar[str | None] = None
    """The key that a lone string in the section's place stands for: `model: pico` means `model: {path: pico}`."""

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        return {cls.shorthand: value} if isinstance(value, str) and cls.shorthand else value


def from_word(sections: Sequence[type[Section]], word: str) -> dict[str, Any] | None:
    """Return the section that a lone word abbreviates; None where a word cannot stand for one.

    Among variants it is the name of one; with a colon it is `module:function` if one of them takes that.
    """
    shorthands = {section.shorthand: section for section in sections if section.shorthand is not None}
    name = TAG if TAG in shorthands else next(iter(shorthands), None)
    if name == TAG and ":" in word and len(shorthands) > 1:
        return next(
            {TAG: section.model_fields[TAG].default, other: word}
            for other, section in shorthands.items()
            if other != TAG
        )
    return {name: word} if name is not None else None


def type_alone(value: Any) -> Any:
    """A variant given by its name alone, written out."""
    return {"type": value} if isinstance(value, str) else value
