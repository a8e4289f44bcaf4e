"""A sample of `benchmarks.tool_faults`: what goes wrong with tools and servers, and what becomes of the run."""

import pytest

from benchmarks.tool_faults import ToolBench, cases


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ToolBench(tmp_path_factory.mktemp("tool-faults"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "environment: leaves processes and is killed",
        "environment: their host is killed",
        "environment: guess returns 50 MB",
        "tool: kills itself",
        "run: SIGTERM within an episode",
        "run: killed, processes left behind",
        "server: killed within an answer",
        "server: killed within a later step's answer",
    ],
)
def test_a_run_goes_on_or_ends_as_specified(words, bench):
    (case,) = (case for case in cases() if f"{case.group}: {case.words}" == words)
    assert not bench.run(case).problems


def test_every_case_has_a_name_of_its_own_and_says_what_is_shown_where_something_is_lost():
    names = [(case.group, case.words) for case in cases()]
    assert len(set(names)) == len(names) >= 20
    assert all(case.says for case in cases() if case.loses or case.ends in ("fails", "stops"))
