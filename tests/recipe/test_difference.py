"""In what recipes differ."""

from tunekit.recipe.edits import recipe_diff
from tunekit.recipe.load import load_recipe


def test_recipes_differ_in_the_fields_whose_values_do():
    first = load_recipe("sft/quickstart")
    second = load_recipe("sft/quickstart", ["train.learning_rate=0.001", "train.seed=7"])
    third = load_recipe("sft/quickstart", ["train.seed=7"])
    assert recipe_diff(first, second, third)["train.seed"] == ("42", "7", "7")
    assert recipe_diff(first, second).keys() == {"train.learning_rate", "train.seed"}
    assert recipe_diff(first, first) == {} == recipe_diff(first)


def test_a_field_that_another_kind_lacks_has_no_value_there():
    lora, full = (load_recipe("sft/quickstart", [f"adapter.type={kind}"]) for kind in ("lora", "full"))
    found = recipe_diff(lora, full)
    assert found["adapter.type"] == ("lora", "full")
    assert found["adapter.rank"][1] is None and found["adapter.rank"][0] is not None
