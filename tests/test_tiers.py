"""The tiers of the suite: shards are all of it, quarantine says why, and the nearest tests of a change are chosen."""

import pytest

from tests import affected, tiers

FILES = {f"tests/test_{number}.py": float(number) for number in range(1, 40)}


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_shards_are_all_files_once_and_about_as_long_as_each_other(num_shards):
    shards = [tiers.files_of_shard(f"{index}/{num_shards}", FILES, FILES) for index in range(1, num_shards + 1)]
    assert sorted(path for shard in shards for path in shard) == sorted(FILES)
    lengths = [sum(FILES[path] for path in shard) for shard in shards]
    # Graham's bound of the longest-first rule (1969).
    assert max(lengths) <= 4 / 3 * max(sum(lengths) / num_shards, *FILES.values())


@pytest.mark.parametrize("shard", ["0/3", "4/3", "3", "a/b", "1/0", "-1/3"])
def test_a_shard_that_is_none_is_refused(shard):
    with pytest.raises(pytest.UsageError, match="expected K/N with K from 1 to N"):
        tiers.files_of_shard(shard, FILES, FILES)


@pytest.mark.parametrize(("num_kept", "num_left"), [(3, 9), (12, 0), (20, 0)])
def test_cases_that_stay_quick_cover_every_value_and_then_most_pairs(num_kept, num_left):
    cases = [{"adapter": adapter, "option": option} for adapter in range(3) for option in range(4)]
    left = tiers.leave_out_of_quick(cases, num_kept)
    assert len(left) == num_left
    kept = [case for number, case in enumerate(cases) if number not in left]
    assert {case["adapter"] for case in kept} == {0, 1, 2}
    assert len({case["option"] for case in kept}) == min(num_kept, 4)


def test_quarantine_says_why_and_since_when():
    tiers.check_quarantine("x", pytest.mark.quarantined(reason="a port is taken", since="2026-11-23").mark)
    for mark in (
        pytest.mark.quarantined,
        pytest.mark.quarantined(reason="a port is taken"),
        pytest.mark.quarantined(reason="", since="2026-11-23"),
        pytest.mark.quarantined(reason="a port is taken", since="yesterday"),
        pytest.mark.quarantined("a port is taken", since="2026-11-23", reason="a port is taken"),
    ):
        with pytest.raises(pytest.UsageError, match="expected quarantined"):
            tiers.check_quarantine("x", mark.mark)


def test_the_tests_of_a_changed_module_come_first_and_those_of_its_importers_follow():
    distances = affected.distances(["tunekit/estimates/memory/states.py"])
    assert distances["tests/estimates/test_states.py"] == 0
    assert distances["tests/planner/test_candidates.py"] <= 3
    assert distances["tests/training/test_options.py"] > 1
    assert "tests/kernels/test_rope.py" not in distances


def test_a_changed_test_helper_affects_the_tests_that_import_it():
    distances = affected.distances(["tests/training/folders.py"])
    assert distances["tests/webui/test_controls.py"] == 1
    assert "tests/kernels/test_rope.py" not in distances


def test_data_files_recipes_and_the_readme_affect_what_reads_them():
    assert affected.distances(["README.md"]) == {"tests/test_readme.py": 0}
    assert affected.distances(["recipes/pico/sft.yaml"])["tests/recipe/test_library.py"] == 0
    assert "tests/estimates/test_known_models.py" in affected.distances(["tunekit/estimates/models/models.yaml"])


def test_a_budget_takes_the_nearest_files_that_fit_and_names_the_rest():
    choices = [
        affected.Choice("near", 0, 50.0),
        affected.Choice("long", 1, 500.0),
        affected.Choice("far", 2, 40.0),
    ]
    taken, left_out = affected.within(choices, 100.0)
    assert [choice.path for choice in taken] == ["near", "far"]
    assert [choice.path for choice in left_out] == ["long"]


def test_files_that_are_nearer_come_first_and_cheaper_ones_before_dearer():
    choices = affected.choose(
        ["tunekit/estimates/memory/sharding.py"], dict.fromkeys(["tests/planner/test_candidates.py"], 1e6)
    )
    assert [choice.distance for choice in choices] == sorted(choice.distance for choice in choices)
    same = [choice for choice in choices if choice.distance == choices[-1].distance]
    assert [choice.seconds for choice in same] == sorted(choice.seconds for choice in same)
