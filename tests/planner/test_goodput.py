"""What checkpoints and failures cost, worked out by hand."""

import pytest

from tunekit.planner.goodput import checkpoint_interval_seconds, goodput

HOUR = 3600


def test_the_interval_is_youngs():
    # A checkpoint of 50 s and a failure every 10,000 s: sqrt(2 x 50 x 10,000) = sqrt(1,000,000).
    assert checkpoint_interval_seconds(50, 10_000) == 1000


def test_goodput_loses_saves_half_an_interval_and_the_restart():
    # 5 % for saves (50 of 1000), 5 % for work done twice (500 of 10,000), 2 % for the restart (200 of 10,000).
    assert goodput(50, 10_000, 200, interval_seconds=1000) == pytest.approx(0.88)


def test_no_other_interval_is_better():
    best = checkpoint_interval_seconds(30, 24 * HOUR)
    others = [goodput(30, 24 * HOUR, 600, interval_seconds=best * factor) for factor in (0.5, 0.9, 1.1, 2)]
    assert max(others) < goodput(30, 24 * HOUR, 600, interval_seconds=best)


def test_where_failures_come_faster_than_work_is_saved_nothing_is_left():
    assert goodput(60, 60, 60, interval_seconds=60) == 0
