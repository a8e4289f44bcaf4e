"""The faults of `tests/faults.yaml` can be planted: each is where it says it is, and what takes its place is Python."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FAULTS = yaml.safe_load((ROOT / "tests" / "faults.yaml").read_text(encoding="utf-8"))
LEAST = 60
"""Fewer say little of a package of three hundred modules."""

FOLDERS = (
    *("tunekit/recipe", "tunekit/recipe/migrate", "tunekit/planner", "tunekit/probe", "tunekit/data", "tunekit/model"),
    *("tunekit/methods", "tunekit/methods/rewards", "tunekit/kernels", "tunekit/run", "tunekit/sweeps", "webui"),
)
TOP = ("api", "cli", "detached", "display", "redact", "repetition", "resumption")
"""What names of modules at the top of `tunekit` begin with."""


def test_there_are_enough_faults_and_no_two_of_one_name():
    assert len(FAULTS) >= LEAST
    assert [name for name, times in Counter(fault["id"] for fault in FAULTS).items() if times > 1] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["id"])
def test_a_fault_stands_once_where_it_is_said_to_and_leaves_python_behind(fault):
    assert fault.keys() - {"proved_by"} == {"id", "file", "old", "new", "kind", "harm"}
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", fault["id"])
    text = (ROOT / fault["file"]).read_text(encoding="utf-8")
    assert text.count(fault["old"]) == 1
    assert fault["old"] != fault["new"]
    compile(text.replace(fault["old"], fault["new"]), fault["file"], "exec")


def test_half_of_the_faults_undo_what_a_change_had_proved():
    proved = [fault for fault in FAULTS if re.fullmatch("[0-9a-f]{7,40}", fault.get("proved_by", ""))]
    assert len(proved) >= len(FAULTS) / 2


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_package_has_a_fault(folder):
    assert any(Path(fault["file"]).parent.as_posix() == folder for fault in FAULTS)


@pytest.mark.parametrize("name", TOP)
def test_the_modules_at_the_top_have_faults_too(name):
    files = [Path(fault["file"]) for fault in FAULTS]
    assert any(file.parent == Path("tunekit") and file.name.startswith(name) for file in files)
