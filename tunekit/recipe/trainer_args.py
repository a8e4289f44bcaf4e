"""Keys of `method.trainer_args`: the fields of TRL's config, less those that tunekit sets itself.

The names and types come from the installed TRL, so a recipe is held to the version that will run it. Importing TRL
would take seconds and bring in torch; instead the source files of its config and of the classes that this builds on are
found on disk and their fields read off the syntax tree.
"""

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tunekit.errors import DependencyError
from tunekit.files import read_table
from tunekit.recipe.methods import METHODS
from tunekit.recipe.reading.phrases import KINDS, any_of, meant, near, show, spelling_hint

CONFIGS = {name: method.spec.config for name, method in METHODS.items()}
"""TRL's config of each method: package, file in it, class."""

_MOVED = {("transformers", "TrainingArguments"): "training_args.py"}
"""Classes that are imported from the top of a package, and the file in it where they are defined."""


@cache
def owned_args(method: str | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Arguments that tunekit sets itself, by name and by prefix, and what to use in a recipe.

    Args:
        method: The method's type; None for those of every method.
    """
    tables = read_table(Path(__file__).parent / "owned_args.yaml")
    groups = [tables["names"], *(group["names"] for group in tables["methods"] if method in group["of"])]
    by_name = {name: hint for group in groups for hint, names in group.items() for name in names}
    return by_name, {prefix: hint for hint, names in tables["prefixes"].items() for prefix in names}


@dataclass(frozen=True)
class ConfigField:
    """A field of a TRL config, as its source states it."""

    types: frozenset[str] | None
    """Names of the builtin types that it takes (`int`, `float`, `str`, `bool`, `None`, `dict`, `list`); None where
    its annotation names other types too, so that only TRL can judge a value."""

    choices: tuple[str, ...] = ()
    """The words that it takes, where the source lists them."""


def owner_hint(method: str, name: str) -> str | None:
    """Return the replacement for an argument that tunekit sets itself; None for one that is free to set."""
    if name in METHODS[method].model_fields and name in config_fields(method):
        return f"use method.{name}"
    by_name, by_prefix = owned_args(method)
    by_family = [hint for prefix, hint in by_prefix.items() if name.startswith(prefix)]
    return by_name.get(name, by_family[0] if by_family else None)


def check_trainer_args(method: str, args: dict[str, Any]) -> list[tuple[str, str, str | None, bool]]:
    """Return the problems of `method.trainer_args`: for each bad argument its name, the complaint, the hint, and
    whether the value is at fault rather than the name.

    Args:
        method: The method's type, a key of `CONFIGS`.
        args: The arguments as the recipe gives them.

    Raises:
        DependencyError: TRL is not installed, or not laid out as expected.
    """
    config = CONFIGS[method][2]
    fields = config_fields(method)
    faults: list[tuple[str, str, str | None, bool]] = []
    for name, value in args.items():
        hint = owner_hint(method, name)
        if hint is not None:
            faults.append((name, "set by tunekit", hint, False))
        elif name not in fields:
            faults.append((name, f"not a field of {config}", _meant(method, name), False))
        else:
            fault = _value_fault(fields[name], value)
            if fault is not None:
                faults.append((name, *fault, True))
    return faults


def _meant(method: str, name: str) -> str:
    """Return advice on a name that TRL does not know: the key of the recipe, or the free argument, that it is like."""
    likely = near(name, config_fields(method), cutoff=0.8)
    key = owner_hint(method, likely) if likely is not None else None
    if key is not None and key.startswith("use "):
        return key
    free = [field_name for field_name in config_fields(method) if owner_hint(method, field_name) is None]
    return meant(name, free, cutoff=0.7) or f"see the documentation of TRL's {CONFIGS[method][2]}"


@cache
def config_fields(method: str) -> dict[str, ConfigField]:
    """The fields of a method's TRL config by name, those of its base classes included.

    Raises:
        DependencyError: TRL is not installed, or not laid out as expected.
    """
    package, file, name = CONFIGS[method]
    return _class_fields(_package_folder(package) / file, name)


def _package_folder(package: str) -> Path:
    """Return the folder of an installed package. Looking for a top-level package does not import it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise DependencyError(f"{package} is not installed", hint=f"pip install {package}")
    return Path(spec.origin).parent


def _class_fields(file: Path, name: str) -> dict[str, ConfigField]:
    """The dataclass fields of a class in a source file: those of its bases, then its own over them."""
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
    cls = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if cls is None:
        raise DependencyError(f"{file} does not define {name}", hint="install the version of TRL that tunekit requires")
    fields: dict[str, ConfigField] = {}
    for base in reversed(cls.bases):
        origin = _imported_from(tree, base.id, file) if isinstance(base, ast.Name) else None
        if origin is not None and isinstance(base, ast.Name):
            fields |= _class_fields(origin, base.id)
    for statement in cls.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields |= _field(statement.target.id, statement)
    return fields


def _imported_from(tree: ast.Module, name: str, file: Path) -> Path | None:
    """The source file of a class that a module imports or defines; None where it does neither."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return file
        if not isinstance(node, ast.ImportFrom) or name not in [alias.name for alias in node.names]:
            continue
        module = node.module or ""
        if node.level:
            return file.parents[node.level - 1].joinpath(*module.split(".")).with_suffix(".py")
        package, *inner = module.split(".")
        moved = _MOVED.get((module, name))
        folder = _package_folder(package)
        return folder / moved if moved else folder.joinpath(*inner).with_suffix(".py")
    return None


def _field(name: str, statement: ast.AnnAssign) -> dict[str, ConfigField]:
    """Return the fields that an annotated name in a class body declares: one, or none for class variables."""
    names = {node.id for node in ast.walk(statement.annotation) if isinstance(node, ast.Name)}
    if names & {"ClassVar", "InitVar"}:
        return {}
    choices: tuple[str, ...] = ()
    if isinstance(statement.value, ast.Call):
        for keyword in statement.value.keywords:
            if keyword.arg == "init" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False:
                return {}
            if keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
                choices = _choices(keyword.value)
    return {name: ConfigField(_builtin_types(statement.annotation), choices)}


def _choices(metadata: ast.Dict) -> tuple[str, ...]:
    """The strings under "choices" in a field's metadata; none where they are computed."""
    for key, value in zip(metadata.keys, metadata.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == "choices" and isinstance(value, ast.List):
            words = [item.value for item in value.elts if isinstance(item, ast.Constant)]
            return tuple(word for word in words if isinstance(word, str)) if len(words) == len(value.elts) else ()
    return ()


def _builtin_types(annotation: ast.expr) -> frozenset[str] | None:
    """The builtin types that an annotation allows; None where it allows others."""
    match annotation:
        case ast.Name(id="int" | "float" | "str" | "bool" | "dict" | "list" as name):
            return frozenset({name})
        case ast.Constant(value=None):
            return frozenset({"None"})
        case ast.Subscript(value=ast.Name(id="dict" | "list" as name)):
            return frozenset({name})
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            types = _builtin_types(inner)
            return None if types is None else types | {"None"}
        case ast.BinOp(left=first, op=ast.BitOr(), right=right):
            first_types, other = _builtin_types(first), _builtin_types(right)
            return None if first_types is None or other is None else first_types | other
    return None


_WORDS = {kind.__name__: words for kind, words in KINDS.items()} | {"list": "a list", "None": "null"}


def _value_fault(field: ConfigField, value: Any) -> tuple[str, str | None] | None:
    """Return the problem of a value for a field, and the hint; None if there is none."""
    if field.types is None:
        return None
    kind = "None" if value is None else type(value).__name__
    if kind not in field.types and not (kind == "int" and "float" in field.types):
        expected = any_of([word for name, word in _WORDS.items() if name in field.types])
        return f"must be {expected}, got {show(value)}", spelling_hint(field.types, value)
    if field.choices and value is not None and value not in field.choices:
        what = f"must be one of {', '.join(field.choices)}, got {show(value)}"
        return what, meant(value, field.choices)
    return None
