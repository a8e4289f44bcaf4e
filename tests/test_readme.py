"""The README is true: every command in it is run as it stands there, in order, in one new folder.

What installs packages or runs the tests is left to `.ci/run`, which takes those lines from the README too.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import blocks_of, check_shown, run_blocks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = blocks_of(README)
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
    check_shown(BLOCKS[at].text, done.stdout)


@pytest.mark.slow
def test_every_command_runs_as_written(tmp_path: Path) -> None:
    run_blocks(BLOCKS, tmp_path)
