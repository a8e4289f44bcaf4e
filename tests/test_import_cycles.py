"""No module of the package imports itself through others, also where an import stands inside a function."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_MODULES = 25
"""Modules in one folder; `__init__` is not counted."""


def modules_of(*packages: str) -> dict[str, Path]:
    """Return the file of each module by its dotted name."""
    files = (file for package in packages for file in sorted((ROOT / package).rglob("*.py")))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported_by(file: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, also in functions and for type checkers alone."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            submodules = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else node.module for name in submodules)


def sorted_modules(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules with each behind those that it imports.

    Raises:
        CycleError: Some import each other in a circle.
    """
    return list(TopologicalSorter(graph).static_order())


def test_no_import_leads_back_to_its_module():
    modules = modules_of("tunekit", "webui")
    # The root package names what is public, by strings; its imports are for type checkers.
    graph = {
        name: set(imported_by(file, modules)) - {name, "tunekit"} for name, file in modules.items() if name != "tunekit"
    }
    assert len(sorted_modules(graph)) == len(modules) - 1


def test_a_circle_of_imports_inside_functions_is_seen(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    from b import g\n")
    (tmp_path / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\n")
    modules = {name: tmp_path / f"{name}.py" for name in "ab"}
    with pytest.raises(CycleError):
        sorted_modules({name: set(imported_by(file, modules)) for name, file in modules.items()})


def test_no_folder_holds_more_modules_than_a_reader_can_survey():
    folders = {file.parent for file in modules_of("tunekit").values()}
    sizes = {folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) - 1 for folder in folders}
    assert {name: size for name, size in sizes.items() if size > MAX_MODULES} == {}
