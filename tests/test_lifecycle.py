"""A short life of a run at random; `benchmarks.lifecycle` does longer ones."""

import pytest
from rich.console import Console

from benchmarks.lifecycle import live


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["single full", "ddp x2 lora"])
def test_whatever_happens_to_a_run_it_ends_as_one_that_nothing_happened_to(engine):
    found = live(engine, 12, 3, Console())
    assert sum(found.steps.values()) == 12
    assert found.broken == []
