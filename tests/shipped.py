"""The model that a chain of shipped recipes starts from."""

from functools import cache

from tunekit.files import list_recipes
from tunekit.recipe.load import load_recipe
from tunekit.recipe.schema import Recipe


@cache
def _models_of_runs() -> dict[str, str]:
    recipes = [load_recipe(shipped.name) for shipped in list_recipes()]
    return {recipe.output.name: recipe.model.path for recipe in recipes if recipe.output.name}


def first_model(recipe: Recipe) -> str:
    """Name of the model of `recipe`, or of the shipped recipe whose run it starts from, and so on."""
    name = recipe.model.path
    while name in _models_of_runs():
        name = _models_of_runs()[name]
    return name
