"""No module of the package imports itself through others, also where an import stands inside a function."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
MAX_MODULES = 25
"""Modules in one folder; `__init__` is not counted."""


def imports_of(*packages: str) -> dict[str, set[str]]:
    """Return the modules that each module imports anywhere, also in functions and for type checkers alone."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def sorted_modules(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules with each behind those that it imports.

    Raises:
        CycleError: Some import each other in a circle.
    """
    return list(TopologicalSorter(imports).static_order())


def test_no_import_leads_back_to_its_module():
    imports = imports_of("tunekit", "webui")
    assert len(imports) > 300
    sorted_modules({module: imported - {"tunekit"} for module, imported in imports.items()})


def test_a_circle_of_imports_inside_functions_is_seen(tmp_path, monkeypatch):
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring/__init__.py").touch()
    (tmp_path / "ring/a.py").write_text("def f():\n    from ring.b import g\n")
    (tmp_path / "ring/b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ring.a\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CycleError):
        sorted_modules(imports_of("ring"))


def test_no_folder_holds_more_modules_than_a_reader_can_survey():
    folders = {file.parent for file in (ROOT / "tunekit").rglob("*.py")}
    sizes = {folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) - 1 for folder in folders}
    assert {name: size for name, size in sizes.items() if size > MAX_MODULES} == {}
