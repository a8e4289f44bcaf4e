"""Completion by a real shell: what its function offers for the words of a line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tunekit.files import list_recipes

SCRIPT = """
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_tunekit_completion tunekit
printf '%s\\n' "${COMPREPLY[@]}"
"""
SHIPPED = {recipe.name for recipe in list_recipes()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("workspace")
    for run in ("first", "second"):
        (home / "runs" / run).mkdir(parents=True)
        # What a run that lost its status with the power leaves.
        (home / "runs" / run / "status.json").touch()
    (home / "configs").mkdir()
    for name in ("mine.yaml", "configs/dpo.yml", "rows.jsonl", ".hidden.yaml"):
        (home / name).touch()
    return home


def run(folder: Path, *command: str) -> str:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(command, cwd=folder, env={"PATH": path}, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def function(folder: Path) -> str:
    """The shell function that `--install-completion` installs."""
    return run(folder, "tunekit", "--show-completion", "bash")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tra",), {"train"}),
        (("runs", ""), {"show", "tag", "note", "delete"}),
        (("train", "mine.yaml", "--deta"), {"--detach"}),
        (("train", ""), SHIPPED | {"mine.yaml", "configs/", "runs/"}),
        (("check", "sft/q"), {"sft/qlora", "sft/quickstart"}),
        (("plan", "configs/"), {"configs/dpo.yml"}),
        (("plan", "./mi"), {"./mine.yaml"}),
        (("plan", "nowhere/"), set()),
        (("stop", "f"), {"first"}),
        (("runs", "show", ""), {"first", "second", "configs/", "runs/"}),
        (("compare", "first", "se"), {"second"}),
        (("resume", "runs/s"), {"runs/second/"}),
        (("chat", "p"), {"pico", "pico-vision"}),
        (("recipes", "copy", "pico/d"), {"pico/dpo"}),
    ],
)
def test_bash_completes_commands_options_recipes_and_runs(
    folder: Path, function: str, words: tuple[str, ...], expected: set[str]
) -> None:
    shown = run(folder, "bash", "--norc", "-c", function + SCRIPT, "bash", "tunekit", *words)
    assert set(shown.splitlines()) - {""} == expected
