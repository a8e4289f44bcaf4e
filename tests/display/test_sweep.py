"""What a sweep tells as it goes: how long those runs take that are left."""

import io

import pytest
from rich.console import Console

from tunekit.display.sweep import SweepProgress
from tunekit.sweeps.folder import Outcome, Trial


@pytest.mark.parametrize(("number", "words"), [(1, "about 20 s left"), (2, "about 10 s left"), (3, None)])
def test_the_time_that_is_left_is_that_of_the_runs_that_are_to_come(number, words):
    console = Console(file=io.StringIO(), width=200)
    one = Outcome(Trial(number, {"train.seed": number}), run=None, state="finished", seconds=10.0)
    SweepProgress(console)({"event": "ends", "outcome": one, "num_runs": 3})
    shown = console.file.getvalue()
    assert f"{number} of 3" in shown
    assert words in shown if words else "left" not in shown
