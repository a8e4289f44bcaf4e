"""Every golden plan is what the planner decides today."""

import json

import pytest

from tests.planner.golden import GOLDEN, MACHINES, SHIPPED, decisions, plans
from tunekit.files import list_recipes


@pytest.fixture(scope="module")
def planned():
    return dict(plans())


@pytest.mark.parametrize("name", sorted(file.stem for file in GOLDEN.glob("*.yaml")))
def test_the_plan_is_the_golden_one(name, planned):
    assert planned[name] == (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")


def test_what_is_decided_for_shipped_recipes_is_what_was():
    assert list(decisions()) == SHIPPED.read_text(encoding="utf-8").splitlines()


def test_every_shipped_recipe_has_a_golden_plan_on_six_machines_or_more(planned):
    assert len(MACHINES) >= 6
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == set(planned)
    kept = [json.loads(line) for line in SHIPPED.read_text(encoding="utf-8").splitlines()]
    wanted = [(shipped.name, machine) for shipped in list_recipes() for machine in MACHINES]
    assert [(one["recipe"], one["machine"]) for one in kept] == wanted
