"""Pairs of levers: each is planned, or refused with a remedy, and the table of refusals is kept."""

import pytest

from tests.planner.combinations import LEVERS, TABLE, refusal, table


@pytest.mark.parametrize("name", LEVERS)
def test_a_lever_alone_is_planned(name):
    assert refusal(LEVERS[name]) is None


@pytest.mark.slow
def test_every_pair_is_planned_or_refused_as_recorded():
    assert table() == TABLE.read_text(encoding="utf-8"), "if this is meant: python -m tests.planner.combinations"
