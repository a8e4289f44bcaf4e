"""The share of useful time against runs that fail at random, and against what Llama 3 reported."""

import random

import pytest

from tunekit.estimates.throughput.speed import (
    DEVICE_SECONDS_PER_FAILURE,
    WORTH_SAYING,
    best_interval_seconds,
    goodput_of,
    useful_share,
)

DAY = 86400


def simulated_share(interval, save, between, restart, *, useful) -> float:
    """Useful over all time of a run that is stopped at random moments and goes on from its last checkpoint."""
    chance = random.Random(0)
    done = clock = 0.0
    failure = chance.expovariate(1 / between)
    while done < useful:
        if clock + interval + save > failure:
            clock = failure + restart
            failure = clock + chance.expovariate(1 / between)
        else:
            clock += interval + save
            done += interval
    return done / clock


@pytest.mark.parametrize(
    ("interval", "save", "between", "restart"),
    [(3600, 60, 3 * DAY, 600), (1800, 30, DAY / 2, 300), (7200, 10, 10 * DAY, 1200)],
)
def test_the_share_is_that_of_runs_that_fail_at_random(interval, save, between, restart):
    simulated = simulated_share(interval, save, between, restart, useful=2000 * between)
    assert useful_share(interval, save, between, restart) == pytest.approx(simulated, abs=0.005)


def test_no_other_interval_is_better():
    best = best_interval_seconds(30, DAY)
    assert best == pytest.approx(2277, abs=1)  # sqrt(2 x 30 x 86400)
    shares = {factor: useful_share(factor * best, 30, DAY, 600) for factor in (0.5, 0.8, 1, 1.25, 2)}
    assert max(shares, key=shares.get) == 1


def test_llama_3_was_interrupted_every_three_hours_and_useful_for_more_than_nine_tenths():
    """419 times in 54 days on 16,384 devices (arXiv 2407.21783): every 3.1 hours, with 90 % of useful time."""
    hours = DEVICE_SECONDS_PER_FAILURE / 16384 / 3600
    assert hours == pytest.approx(3.1, rel=0.01)
    found = goodput_of(
        num_devices=16384,
        num_writers=2048,
        num_steps=54 * DAY // 6,
        step_seconds=6,
        checkpoint_bytes=12 * 405e9,
        save_steps=None,
    )
    assert found.share == pytest.approx(0.92, abs=0.02)
    assert found.num_failures == pytest.approx(419 / found.share, rel=0.01)


def run(num_devices, hours, **changes):
    arguments = {
        "num_devices": num_devices,
        "num_writers": max(1, num_devices // 8),
        "num_steps": hours * 360,
        "step_seconds": 10,
        "checkpoint_bytes": 12 * 8e9,
        "save_steps": None,
    }
    return goodput_of(**arguments | changes)


def test_a_short_run_on_few_devices_says_nothing_of_failures():
    assert run(1, 1) is None
    assert run(8, 240) is None
    # 512 devices fail every 4.1 days: a week is to see 1.7 failures.
    assert run(512, 168) is not None
    assert run(8, 24 * 264 * WORTH_SAYING * 1.01) is not None


def test_the_number_of_steps_between_checkpoints_is_suggested_and_what_was_asked_for_is_kept():
    suggested, asked = run(512, 168), run(512, 168, save_steps=500)
    # A node writes its 1.5 GB in 1.5 s: sqrt(2 x 1.5 x 4.12 days) = 1,034 s, 103 steps of 10 s.
    assert (suggested.save_steps, suggested.best_save_steps) == (103, 103)
    assert (asked.save_steps, asked.best_save_steps) == (500, 103)
    assert asked.share < suggested.share
    best = "a checkpoint every 103 steps is best, if saving stalls training for 1.5 s"
    often = "1.7 failures expected (one per 4 days)"
    assert suggested.words() == f"99.5% goodput: {often}, {best}"
    assert asked.words().endswith(f"with a checkpoint every 500 steps; {best}")


def test_an_unlikely_failure_is_said_with_its_chance():
    # 64 devices for a week are 0.212 failures, of which none happens in exp(-0.212) of all weeks.
    assert "19% chance of a failure (one per 33 days)" in run(64, 24 * 7).words()
