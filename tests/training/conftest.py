"""Fixtures of runs whose recipe lies in a folder of their module."""

from pathlib import Path

import pytest


@pytest.fixture
def recipe(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe of the module's workspace, in which the test runs."""
    monkeypatch.chdir(workspace)
    return workspace / "recipe.yaml"
