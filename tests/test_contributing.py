"""Paths and rooms that CONTRIBUTING.md names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`((?:tunekit|webui|tests|recipes|examples|benchmarks|docs)/[\w./-]*)`", TEXT)))


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_contributing_exists(path):
    assert (ROOT / path).exists()


def test_every_room_of_the_package_is_named():
    rooms = {f"tunekit/{init.parent.name}/" for init in (ROOT / "tunekit").glob("*/__init__.py")}
    assert rooms - set(PATHS) == set()


@pytest.mark.parametrize("what", ["method", "optimizer", "model family", "reward", "launcher", "data format"])
def test_it_says_where_each_kind_of_thing_is_added(what):
    (row,) = re.findall(rf"^\| an? {what} \| (.+) \|$", TEXT, flags=re.MULTILINE)
    assert re.search(r"`tunekit/\S+`", row)
