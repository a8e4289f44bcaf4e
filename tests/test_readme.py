"""The README is true: every command in it is run as it stands there, in order, in one new folder.

A fenced block whose info string ends in a file name (as in ```yaml mine.yaml) is written to that file first. What
installs packages or runs the tests is left to `.ci/run`, which takes those lines from the README too.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    """A fenced block: its language, the file that it is, and its text."""

    language: str
    file: str
    text: str


FENCED = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
BLOCKS = [Block(*groups) for groups in FENCED]
COMMANDS = [block.text for block in BLOCKS if block.language == "bash"]


def test_first_command_installs_and_trains() -> None:
    assert COMMANDS[0] == "pip install -e . && tunekit train sft/quickstart\n"


def test_second_command_installs_and_tests_in_one_line() -> None:
    (line,) = COMMANDS[1].splitlines()
    assert line.startswith("pip install -e '.[test]' && pytest")


def test_own_recipe_takes_at_most_15_lines() -> None:
    recipes = [block for block in BLOCKS if block.language == "yaml"]
    assert recipes
    assert all(len(block.text.splitlines()) <= 15 for block in recipes)


def test_every_link_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert not missing


def test_the_plan_that_is_shown_is_the_one_that_is_made(tmp_path: Path) -> None:
    at = next(number for number, block in enumerate(BLOCKS) if block.language == "text")
    words = BLOCKS[at - 1].text.split()
    offline = {"COLUMNS": "100", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | offline)
    assert done.returncode == 0, done.stderr
    made = iter([line.rstrip() for line in done.stdout.splitlines()])
    for shown in BLOCKS[at].text.splitlines():
        assert shown == "..." or shown in made, f"the README shows a line that is not there or elsewhere: {shown}"


@pytest.mark.slow
def test_every_command_runs_as_written(tmp_path: Path) -> None:
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"]}
    for block in BLOCKS:
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        if block.language == "bash" and "pip install" not in block.text:
            command = ["bash", "-euo", "pipefail", "-c", block.text]
        elif block.language == "python":
            command = [sys.executable, "-c", block.text]
        else:
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
