"""Every golden plan is what the planner decides today."""

import pytest

from tests.planner.golden import GOLDEN, MACHINES, plans
from tunekit.recipe.library import list_recipes

PLANS = dict(plans())


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_the_golden_one(name):
    assert PLANS[name] == (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")


def test_every_shipped_recipe_has_a_golden_plan_on_six_machines_or_more():
    assert len(MACHINES) >= 6
    kept = {file.stem for file in GOLDEN.glob("*.yaml")}
    assert kept == set(PLANS)
    for shipped in list_recipes():
        assert {f"{shipped.name.replace('/', '-')}-on-{machine}" for machine in MACHINES} <= kept
