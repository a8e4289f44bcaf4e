"""A sample of `benchmarks.faults`: what goes wrong with a run, and that it goes on as if it had not."""

import pytest

from benchmarks.faulted import Bench
from benchmarks.faults import GROUPS, cases_of
from benchmarks.prepared import ENGINES


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "kind", "words"),
    [
        ("single full", "save", ".manifest.json written"),
        ("single full", "save", "checkpoint-6 renamed"),
        ("single full", "damage", "optimizer.pt a byte changed"),
        ("single full", "damage", "scheduler.pt removed"),
        ("single full", "damage", "both: "),
        ("single full", "damage", "manifest.json lists a file outside"),
        ("single full", "result", "model renamed"),
        ("single full", "disk", "optimizer.pt is written"),
        ("single full", "disk", "read-only from step"),
        ("fsdp2 x2 full", "save", ".metadata"),
        ("fsdp2 x2 full", "phase", "optimizer"),
        ("zero2 x2 lora", "save", "killed"),
        ("zero2 x2 lora", "event", "is killed, one restart"),
    ],
)
def test_a_run_goes_on_as_if_nothing_had_happened_to_it(engine, kind, words, bench):
    case = next(
        case for case in cases_of(ENGINES[engine], bench.prepared(engine)) if case.group == kind and words in case.words
    )
    outcome = bench.run(case)
    if outcome.not_run:
        pytest.skip(outcome.not_run)
    assert not outcome.problems


def test_there_are_more_than_a_hundred_cases_and_some_of_each_kind(bench):
    cases = list(cases_of(ENGINES["single full"], bench.prepared("single full")))
    assert len(cases) > 100
    assert {case.group for case in cases} == set(GROUPS)
