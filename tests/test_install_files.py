"""Files that install tunekit elsewhere: they name extras, folders and versions that there are.

hadolint accepts the Dockerfile; building it needs Docker and a network.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
CONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "guides" / "install.md").read_text(encoding="utf-8")

(IN_CONDA,) = next(part["pip"] for part in CONDA["dependencies"] if isinstance(part, dict))
EXTRAS = {
    "Dockerfile": re.findall(r"^ARG EXTRAS=(\S+)", DOCKERFILE, re.MULTILINE),
    "environment.yml": re.findall(r"\[(.+)\]", IN_CONDA),
    "devcontainer.json": re.findall(r"\[(.+)\]", CONTAINER["postCreateCommand"]),
    "install.md": re.findall(r"(?:\.|\.whl)\[([a-z,-]+)\]", PAGE),
}


@pytest.mark.parametrize("file", EXTRAS)
def test_extras_are_those_of_the_project(file: str) -> None:
    named = {extra for extras in EXTRAS[file] for extra in extras.split(",")}
    assert named and named <= PROJECT["optional-dependencies"].keys()


def test_the_page_describes_every_extra_for_users() -> None:
    described = {
        name for cell in re.findall(r"^\| (`.+?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(.+?)`", cell)
    }
    assert described == PROJECT["optional-dependencies"].keys() - {"all", "dev", "docs", "test"}


@pytest.mark.parametrize(
    "python",
    [
        re.findall(r"^ARG BASE=python:([\d.]+)", DOCKERFILE, re.MULTILINE)[0],
        re.findall(r"python=([\d.]+)", str(CONDA["dependencies"]))[0],
        re.findall(r"python:([\d.]+)", CONTAINER["image"])[0],
    ],
)
def test_versions_of_python_are_supported(python: str) -> None:
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)


def test_the_image_installs_the_torch_that_the_project_asks_for() -> None:
    (torch,) = [need for need in PROJECT["dependencies"] if need.startswith("torch")]
    assert f'pip install "{torch}" --index-url' in DOCKERFILE


def test_all_that_the_wheel_is_made_of_is_sent_to_docker() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    needed = {
        *build["targets"]["wheel"]["only-include"],
        PROJECT["readme"],
        *PROJECT["license-files"],
        "pyproject.toml",
    }
    assert lines[0] == "*" and sent == needed
    assert all((ROOT / path).exists() for path in sent)
