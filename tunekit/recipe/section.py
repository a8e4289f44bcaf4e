"""What every section of a recipe is: closed, frozen, strictly typed, described by the strings under its fields."""

from typing import Any, ClassVar, NamedTuple, NewType

from pydantic import BaseModel, ConfigDict, model_validator

from tunekit.recipe.places import Key, dotted

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
        super().__init__("\n".join(f"{dotted(one.key)}: {one.what}; {one.hint}" for one in found))


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


def type_alone(value: Any) -> Any:
    """A variant given by its name alone, written out."""
    return {"type": value} if isinstance(value, str) else value
