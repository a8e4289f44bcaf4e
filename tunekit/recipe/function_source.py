"""Functions of a notebook or script, written as modules of their own.

A recipe names functions as `module:function`, and the processes of a run import them. What is defined in a cell, or in
the file that is run, no other process can import. So its source is written to a module that is named by its content,
with what the source needs of its surroundings: imports, functions and classes defined there too, and constants. What
cannot be written down is refused by its name.

Modules lie in the user's cache folder, where `find_function` looks, and each run keeps its own.
"""

import __future__

import ast
import builtins
import hashlib
import inspect
import linecache
import re
import symtable
import sys
import textwrap
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from tunekit.errors import RecipeError

MAIN = "__main__"

POSTPONED = __future__.annotations.compiler_flag
"""Flag of code whose annotations are text (`from __future__ import annotations`)."""

_OF_NOTEBOOKS = ("display", "get_ipython")
"""Names that IPython adds to Python's own."""

_KEPT = re.compile(r"[A-Za-z_]\w*_[0-9a-f]{16}")


def functions_folder() -> Path:
    """Return the folder of these modules, in the user's cache folder."""
    return platformdirs.user_cache_path("tunekit") / "functions"


def is_written(module: str) -> bool:
    """Return whether a module's name may be that of one that was written here."""
    return _KEPT.fullmatch(module) is not None


def path_of(function: Any) -> str:
    """Return `module:function` of a function, after writing it to a module where no other process can import it.

    Raises:
        RecipeError: It is no function with a source of its own, or needs what cannot be written down.
    """
    if not isinstance(function, types.FunctionType):
        what = f"must be a function defined with def, got {type(function).__name__}"
        raise RecipeError(what, hint="wrap it: def my_function(...): ...")
    if function.__module__ != MAIN and "." not in function.__qualname__:
        return f"{function.__module__}:{function.__name__}"
    text = source_of(function)
    module = f"{function.__name__}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder = functions_folder()
    draft = folder / f".{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(folder / f"{module}.py")
    except OSError as error:
        problem = f"cannot write function {function.__name__} to {folder}: {error.strerror}"
        raise RecipeError(problem, hint="free some space, or set XDG_CACHE_HOME") from error
    return f"{module}:{function.__name__}"


def source_of(function: types.FunctionType) -> str:
    """Return the source of a module that defines a function, and all that it needs.

    Raises:
        RecipeError: Its source cannot be read, or needs what cannot be written down.
    """
    module = _Module()
    module.define(function)
    if module.problems:
        problem = f"function {function.__name__} cannot run in another process: {'; '.join(module.problems)}"
        raise RecipeError(problem, hint="define or import these inside the function, or move it to its own module")
    return module.text


class _Module:
    """A module being written.

    Attributes:
        problems: What it cannot hold, each with its name.
    """

    def __init__(self) -> None:
        self._imports: dict[str, None] = {}
        self._postpones = False
        self._definitions: list[str] = []
        self._names: dict[str, object] = {}
        self.problems: list[str] = []

    @property
    def text(self) -> str:
        """Its source."""
        imports = ["from __future__ import annotations"] * self._postpones + list(self._imports)
        return "\n\n".join([*(["\n".join(imports)] if imports else []), *self._definitions]) + "\n"

    def define(self, value: types.FunctionType | type) -> None:
        """Add a function or a class by its source, after what that needs."""
        name = value.__name__
        self._names[name] = value
        function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
        if name == "<lambda>":
            self.problems.append("a lambda has no source: define it with def")
            return
        if "." in value.__qualname__.rpartition("<locals>.")[2]:
            self.problems.append(f"{value.__qualname__} is a method: write it as a function")
            return
        if function is not None and function.__code__.co_freevars:
            self.problems.append(f"{name} takes {_listed(function.__code__.co_freevars)} from the enclosing function")
            return
        try:
            text = textwrap.dedent(
                inspect.getsource(value) if isinstance(value, types.FunctionType) else _source_of_class(value)
            ).strip()
            tree = ast.parse(text)
        except (OSError, TypeError, SyntaxError):
            self.problems.append(f"the source of {name} cannot be read: move it to a module")
            return
        if function is not None and not _is_source_of(text, function.__code__):
            self.problems.append(f"the source of {name} has changed since it was defined: define it again")
            return
        if function is not None and function.__code__.co_flags & POSTPONED:
            self._postpones = True
        namespace = vars(sys.modules[value.__module__]) if function is None else function.__globals__
        for used in _names_used(text):
            if used in namespace:
                self._add(used, namespace[used], tree)
            elif used in _OF_NOTEBOOKS or used not in vars(builtins):
                self.problems.append(f"{name} uses {used!r}, which is not defined")
        self._definitions.append(text)

    def _add(self, name: str, value: Any, tree: ast.Module) -> None:
        """Add what a name stands for."""
        if name in self._names:
            if self._names[name] is not value:
                self.problems.append(f"{name!r} has two definitions")
            return
        self._names[name] = value
        if isinstance(value, types.ModuleType):
            self._import_module(name, value, tree)
        elif (defined := _defined_in_main(value)) is not None:
            self.define(defined)
            if defined.__name__ != name:
                self._definitions.append(f"{name} = {defined.__name__}")
        elif (home := _home_of(value)) is not None:
            self._imports[f"from {home[0]} import {home[1]}" + (f" as {name}" if home[1] != name else "")] = None
        elif isinstance(value, re.Pattern):
            self._imports["from re import compile as _compile"] = None
            self._definitions.append(f"{name} = _compile({value.pattern!r}, {value.flags})")
        elif (literal := _literal(value)) is not None:
            self._definitions.append(f"{name} = {literal}")
        else:
            self.problems.append(f"it uses {name!r}, an object of class {type(value).__name__}")

    def _import_module(self, name: str, module: types.ModuleType, tree: ast.Module) -> None:
        real = module.__name__
        if real == MAIN or module.__spec__ is None:
            self.problems.append(f"it uses {name!r}, a module that cannot be imported")
        elif name == real:
            # `import a.b` binds `a`, and what is used of it shows which of its modules were imported.
            chains = {".".join(chain) for chain in _chains(tree) if chain[0] == name}
            prefixes = {
                ".".join(parts[:end]) for parts in (c.split(".") for c in chains) for end in range(1, len(parts))
            }
            for path in sorted({name, *(p for p in (*chains, *prefixes) if p in sys.modules)}):
                self._imports[f"import {path}"] = None
        else:
            self._imports[f"import {real} as {name}"] = None


def _source_of_class(value: type) -> str:
    """Return the source of a class, also of one in a cell, whose module has no file: that of its methods is its own.

    Raises:
        OSError: It cannot be read.
    """
    codes = (item.__code__ for item in vars(value).values() if isinstance(item, types.FunctionType))
    file = next((code.co_filename for code in codes), None)
    if file is None:
        return inspect.getsource(value)
    text = "".join(linecache.getlines(file))
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == value.__name__
    ]
    if len(nodes) != 1:
        raise OSError(f"{len(nodes)} classes {value.__name__} in {file}")
    first = min([nodes[0].lineno, *(decorator.lineno for decorator in nodes[0].decorator_list)])
    return "".join(text.splitlines(keepends=True)[first - 1 : nodes[0].end_lineno])


def _names_used(text: str) -> list[str]:
    """Return the names that a source takes from its surroundings, in alphabetical order."""

    def walk(table: symtable.SymbolTable, *, is_top: bool) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (not symbol.is_assigned() if is_top else symbol.is_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from walk(child, is_top=False)

    top = symtable.symtable(text, "<function>", "exec")
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_namespace()}
    return sorted(set(walk(top, is_top=True)) - own)


def _chains(tree: ast.Module) -> Iterator[list[str]]:
    """Yield the names in `a.b.c`, wherever that stands."""
    for node in ast.walk(tree):
        parts: list[str] = []
        at: ast.expr | ast.AST = node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if parts and isinstance(at, ast.Name):
            yield [at.id, *reversed(parts)]


def _defined_in_main(value: Any) -> types.FunctionType | type | None:
    """Return a class or function of the notebook or script; of one that a decorator wrapped, what that wraps."""
    inner = inspect.unwrap(value) if callable(value) else value
    return inner if isinstance(inner, types.FunctionType | type) and inner.__module__ == MAIN else None


def _home_of(value: Any) -> tuple[str, str] | None:
    """Return the module and the name that a value can be imported by; None where there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == MAIN or module not in sys.modules:
        return None
    return (module, name) if vars(sys.modules[module]).get(name) is value else None


def _literal(value: Any) -> str | None:
    """Return a constant as Python writes it, the same in every process; None where it has no such form."""
    if type(value) in (set, frozenset) and value:
        items = [_literal(item) for item in value]
        texts = sorted(item for item in items if item is not None)
        text = f"{{{', '.join(texts)}}}"
        return None if len(texts) < len(items) else text if type(value) is set else f"frozenset({text})"
    text = repr(value)
    try:
        same = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return text if type(same) is type(value) and bool(same == value) else None


def _is_source_of(text: str, code: types.CodeType) -> bool:
    """Return whether a source gives the code of a function."""
    compiled = compile(text, "<function>", "exec", flags=code.co_flags & POSTPONED, dont_inherit=True)
    waiting = [compiled]
    while waiting:
        at = waiting.pop()
        if at.co_name == code.co_name and at is not compiled:
            return _are_alike(at, code)
        waiting += [item for item in at.co_consts if isinstance(item, types.CodeType)]
    return False


def _are_alike(one: types.CodeType, other: types.CodeType) -> bool:
    if (one.co_code, one.co_names, len(one.co_consts)) != (other.co_code, other.co_names, len(other.co_consts)):
        return False
    pairs = zip(one.co_consts, other.co_consts, strict=True)
    return all(
        _are_alike(a, b)
        if isinstance(a, types.CodeType) and isinstance(b, types.CodeType)
        else type(a) is type(b) and a == b
        for a, b in pairs
    )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))
