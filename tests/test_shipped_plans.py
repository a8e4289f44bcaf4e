"""Every shipped recipe has a plan on the machines that people have, with rows of the shape that it names."""

import pytest

from tests.rows import save_rows
from tests.shipped import first_model
from tunekit.api import verbs
from tunekit.files import list_recipes
from tunekit.planner.plan import Plan
from tunekit.recipe.load import load_recipe


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes()])
def test_a_shipped_recipe_has_a_plan_on_one_device_and_on_eight(name, tmp_path):
    recipe = load_recipe(name)
    method = recipe.method.type
    rows = save_rows(tmp_path / "rows.jsonl", method, 200)
    own_rows = [f"data.train={rows}", "data.eval=null", "data.columns=null", "data.format=auto"]
    changes = [*own_rows, f"model={first_model(recipe)}"]
    planned = verbs.compare_plans(name, changes, on=["h100", "8xh100"])
    assert all(isinstance(plan, Plan) for plan in planned.values()), planned
    if method != "sft":
        assert planned["h100"].recipe.method.type == method
