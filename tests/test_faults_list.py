"""The faults of `tests/faults.yaml` can be planted: each is where it says it is, and what takes its place is Python."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from benchmarks import planted, planted_faults

ROOT = Path(__file__).parents[1]
FAULTS = yaml.safe_load((ROOT / "tests" / "faults.yaml").read_text(encoding="utf-8"))
LEAST = 60
"""Fewer say little of a package of three hundred modules."""

ROOMS = tuple(
    package.parent.relative_to(ROOT).as_posix()
    for package in (*sorted(ROOT.glob("tunekit/*/__init__.py")), ROOT / "webui" / "__init__.py")
)
"""Rooms of the package, each with at least one fault."""


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


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_fault(room):
    assert any(Path(fault["file"]).is_relative_to(room) for fault in FAULTS)


def test_the_nearest_tests_are_those_that_mirror_the_module():
    fault = next(fault for fault in planted.read_faults() if fault.file == "tunekit/training/health_warnings.py")
    assert planted.near_tests(fault, {})[0] == "tests/training/test_health_warnings.py"
    slow = {"tests/training/test_health_warnings.py": 10 * planted.NEAR_SECONDS}
    assert planted.near_tests(fault, slow) == ["tests/training/test_health_warnings.py"]


def test_a_group_has_no_two_faults_in_one_file():
    faults = planted.read_faults()
    groups = planted_faults.groups_of(faults)
    assert sorted(fault.id for group in groups for fault in group) == sorted(fault.id for fault in faults)
    for group in groups:
        assert len(group) <= planted_faults.GROUP
        assert len({fault.file for fault in group}) == len(group)


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("tests/runs/test_stop_request.py", True),
        ("tests/runs/", True),
        ("tests/runs/test_stop_request.py::test_it", True),
        ("tests/runs/test_stop_request.py::test_it[twice]", True),
        ("tests/runs/test_stopping.py", False),
        ("tests/runs/test_stop_request.py::test_it[once]", False),
    ],
)
def test_a_test_is_among_the_lines_that_name_it_its_file_or_its_folder(line, is_one):
    assert planted.is_among("tests/runs/test_stop_request.py::test_it[twice]", [line]) is is_one


def test_what_was_seen_of_other_code_is_not_taken_over(tmp_path):
    fault, other = planted.read_faults()[:2]
    state = tmp_path / "state.jsonl"
    known = planted_faults.Known(state, "this tree")
    known.add(fault, "near", "tests/test_it.py::test_it")
    known.add(other, "near", None)
    assert planted_faults.Known(state, "this tree").caught_by(fault, "near") == "tests/test_it.py::test_it"
    assert planted_faults.Known(state, "another tree").get(fault, "near") is None


def test_a_tier_has_caught_what_a_narrower_one_has_and_says_where_it_was_not_run(tmp_path):
    caught, missed, unknown = planted.read_faults()[:3]
    known = planted_faults.Known(tmp_path / "state.jsonl", "this tree")
    known.add(caught, "near", "tests/test_it.py::test_it")
    for stage in ("near", "quick"):
        known.add(missed, stage, None)
    rows = planted_faults.rows_of([caught, missed, unknown], known)
    test = "tests/test_it.py::test_it"
    assert [row["tiers"] for row in rows] == [{"quick": test, "full": test}, {"quick": None}, {}]
    assert planted_faults.totals_of(rows)["quick"] == {"run": 2, "caught": 1}
