"""Every golden plan is what the planner decides today."""

import json

import pytest

from tests.planner.golden import GOLDEN, MACHINES, SHIPPED, SMALL_MODEL, decisions, facts, fits, plans
from tunekit.files import GPU_SIZES, list_recipes
from tunekit.recipe.load import load_recipe


@pytest.fixture(scope="module")
def planned():
    return dict(plans())


@pytest.mark.parametrize("name", sorted(file.stem for file in GOLDEN.glob("*.yaml")))
def test_the_plan_is_the_golden_one(name, planned):
    assert planned[name] == (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")


def test_what_is_decided_for_shipped_recipes_is_what_was():
    assert list(decisions()) == SHIPPED.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("shipped", list_recipes(), ids=lambda shipped: shipped.name)
def test_the_memory_of_a_shipped_recipe_is_what_the_planner_says_today(shipped):
    loaded = load_recipe(shipped.name)
    assert shipped.method == loaded.method.type
    if shipped.gpu_gb == 0:
        assert facts(loaded).num_params < SMALL_MODEL
        return
    place = len(GPU_SIZES) if shipped.gpu_gb is None else GPU_SIZES.index(shipped.gpu_gb)
    assert all(fits(loaded, size) for size in GPU_SIZES[place : place + 1])
    assert not any(fits(loaded, size) for size in GPU_SIZES[max(place - 1, 0) : place])


def test_every_shipped_recipe_has_a_golden_plan_on_six_machines_or_more(planned):
    assert len(MACHINES) >= 6
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == set(planned)
    kept = [json.loads(line) for line in SHIPPED.read_text(encoding="utf-8").splitlines()]
    wanted = [(shipped.name, machine) for shipped in list_recipes() for machine in MACHINES]
    assert [(one["recipe"], one["machine"]) for one in kept] == wanted
