"""The public names are the recorded ones: functions with their signatures, classes with fields and methods, the schema.

Where a name lives is left out, so that it may move.
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import tunekit
from tests.photographs.recorded import check_recorded
from tunekit import frontend
from tunekit.recipe.explain import explain

PUBLIC = {*tunekit.__all__, *frontend.__all__} - {"frontend"}

MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")
"""What stands before a name in an annotation that is text: the modules that it is in."""


def written(annotation: Any) -> str:
    """Return a type as its users write it, without modules; alike in every version of Python."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, str | typing.ForwardRef):
        return MODULES.sub("", annotation if isinstance(annotation, str) else annotation.__forward_arg__)
    if isinstance(annotation, list):
        return f"[{', '.join(map(written, annotation))}]"
    if annotation in (None, type(None), ...):
        return "..." if annotation is ... else "None"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(written, arguments))
    if origin is typing.Annotated:
        return written(arguments[0])
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    name = (origin or annotation).__name__
    return f"{name}[{', '.join(map(written, arguments))}]" if arguments else name


class Written:
    """An annotation of a signature that is printed as it is written."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation

    def __repr__(self) -> str:
        return written(self.annotation)


def plain(annotation: Any) -> Any:
    return annotation if annotation is inspect.Parameter.empty else Written(annotation)


def signature(function: Any) -> str:
    """Return the signature of a function, without the modules of its types."""
    found = inspect.signature(function)
    parameters = [one.replace(annotation=plain(one.annotation)) for one in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=plain(found.return_annotation)))


def fields(kind: type) -> Iterator[str]:
    """Yield the public fields of a dataclass or of a model of pydantic: name, type and default."""
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            if not field.name.startswith("_"):
                yield f"{field.name}: {written(field.type)}{default_of(field, dataclasses.MISSING)}"
    for name, field in getattr(kind, "model_fields", {}).items():
        yield f"{name}: {written(field.annotation)}{default_of(field, PydanticUndefined)}"


def default_of(field: Any, missing: object) -> str:
    """Return a field's default behind an `=`; of a section its class alone, as the schema has the values below it."""
    if field.default_factory not in (None, missing):
        return f" = {field.default_factory.__name__}()"
    if isinstance(field.default, BaseModel):
        return f" = {type(field.default).__name__}()"
    return "" if field.default is missing else f" = {field.default!r}"


def members(kind: type) -> Iterator[str]:
    """Yield the public methods and properties of a class and of what tunekit derives it from."""
    own = [base for base in reversed(kind.__mro__) if base.__module__.startswith("tunekit")]
    found = {name: value for base in own for name, value in vars(base).items() if not name.startswith("_")}
    for name, value in sorted(found.items()):
        function = getattr(value, "__func__", value)
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            yield f"{name} (property)"
        elif inspect.isfunction(function):
            yield f"{name}{signature(function)}"


def described(name: str) -> str:
    """Return a public name with all that its users may rely on, a line each."""
    value = getattr(frontend if name in frontend.__all__ else tunekit, name)
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if is_public(base))
        lines = [f"class {name}({bases})" if bases else f"class {name}"]
        if not dataclasses.is_dataclass(value) and "__init__" in vars(value):
            lines.append(f"{name}{signature(value.__init__)}")
        return "\n    ".join([*lines, *fields(value), *members(value)])
    if inspect.isfunction(value):
        return f"{name}{signature(value)}"
    return f"{name} = {written(value) if typing.get_origin(value) else repr(value)}"


def is_public(base: type) -> bool:
    return base is not object and (base.__module__ == "builtins" or base.__name__ in PUBLIC)


def test_the_public_names_are_the_recorded_ones():
    check_recorded("names.txt", "\n".join(described(name) for name in sorted(PUBLIC)))


def test_the_keys_of_recipes_their_types_and_defaults_are_the_recorded_ones():
    text = re.sub(r"\n  (?=\S)", " ", explain(None))
    keys = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert len(keys) > 150
    check_recorded("schema.txt", "\n".join(keys))
