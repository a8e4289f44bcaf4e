"""The schema as a form needs it: which fields there are, and what each takes."""

from typing import Any

import pytest

from tunekit import frontend
from tunekit.files import list_recipes
from tunekit.frontend import UNSET, Entry
from tunekit.recipe.explain import explain
from tunekit.recipe.load import load_recipe, read_text
from tunekit.recipe.methods import METHODS
from tunekit.recipe.methods.on_policy import RewardedMethod
from tunekit.recipe.reading.parse import undotted
from tunekit.recipe.schema import Recipe, all_fields, sections_of, tag_of


def entries(**values: Any) -> dict[str, Entry]:
    return {entry.key: entry for entry in frontend.recipe_entries(values)}


def tags(name: str) -> list[str]:
    return [str(tag_of(section)) for section in sections_of(Recipe.model_fields[name])]


def test_the_fields_are_those_of_the_variant() -> None:
    assert "adapter.rank" in entries()
    assert "adapter.quant_type" not in entries()
    assert "adapter.quant_type" in entries(adapter="qlora")
    assert "adapter.rank" not in entries(adapter={"type": "full"})
    assert "method.beta" not in entries()
    assert entries(method="grpo")["method.beta"].default == 0.0
    assert entries(method="rloo")["method.beta"].default == 0.05


def test_a_field_says_what_it_takes() -> None:
    entry = entries(adapter={"type": "lora", "rank": "x"})["adapter.rank"]
    assert (entry.kind, entry.takes, entry.above, entry.default) == ("int", "an integer greater than 0", 0, 16)
    assert entry.value == "x"
    assert entry.section == "adapter"
    found = entries()
    assert found["data.eval_size"].above == 0 and found["data.eval_size"].at_most == 0.5
    assert found["model.path"].is_required and found["model.path"].value is UNSET
    assert found["data.packing"].kind == "bool"
    assert found["data.padding_free"].choices == ("auto", True, False)
    assert found["train.greater_is_better"].choices == (True, False)
    assert found["data.format"].is_open and "sharegpt" in found["data.format"].choices
    assert found["data.columns"].kind == "mapping"
    assert (found["output.sample_prompts"].kind, found["output.sample_prompts"].item_kind) == ("list", "text")
    assert entries(method="dpo")["method.loss_type"].choices[:2] == ("sigmoid", "hinge")


def test_what_a_section_requires_is_required_where_it_is_there():
    key = "model.rope_scaling.factor"
    assert not entries()[key].is_required
    assert entries(model={"path": "pico", "rope_scaling": {"rope_type": "linear"}})[key].is_required


def test_a_tag_is_explained_by_each_of_its_words() -> None:
    entry = entries(adapter="full")["adapter.type"]
    assert entry.is_tag
    assert (entry.choices, entry.value, entry.default) == (
        ("full", "lora", "qlora", "ia3", "vera", "oft", "miss", "adalora", "prompt_tuning"),
        "full",
        "lora",
    )
    assert "full: Full fine-tuning. lora: Low-rank adaptation." in entry.description


def test_sections_in_lists_have_fields_each() -> None:
    found = entries(data={"train": ["a", {"path": "b", "weight": 2}]})
    assert found["data.train"].num_items == 2 and found["data.train"].is_list
    assert found["data.train[0].path"].value == "a"
    assert found["data.train[1].weight"].value == 2
    assert found["data.eval"].num_items == 0
    one = entries(data={"train": "a"})
    assert one["data.train"].num_items == 1 and not one["data.train"].is_list
    assert one["data.train.path"].value == "a"
    rewards = entries(method={"type": "grpo", "rewards": ["math", "a:b", {"type": "judge"}]})
    assert rewards["method.rewards[0].type"].value == "math"
    assert rewards["method.rewards[1].path"].value == "a:b"
    assert "method.rewards[2].base_url" in rewards


@pytest.mark.parametrize(
    "values", [{"data": 3}, {"data": {"train": [None, 3]}}, {"adapter": "lroa"}, {"method": {"type": ["x"]}}, {"x": 1}]
)
def test_what_is_wrong_has_fields_too(values: dict[str, Any]) -> None:
    found = entries(**values)
    assert {"model.path", "data.train", "adapter.type", "method.type", "output.name"} <= set(found)


TEACHERS_OWN = ("dtype", "attn_implementation", "kernels", "image_processor", "video_processor")
"""Fields of a teacher that a recipe does not set: they are those of the model."""


def test_every_field_that_a_recipe_may_give_is_reached() -> None:
    rewards = next(sections_of(field) for key, field in all_fields() if key == ("method", "rewards"))
    tools, environments = (
        next(sections_of(field) for key, field in all_fields() if key == ("method", name))
        for name in ("tools", "environment")
    )
    reached: set[tuple[str, ...]] = set()
    for section in environments:
        acting = {"type": "grpo", "environment": {"type": tag_of(section)}}
        for key in entries(method=acting):
            reached.add(tuple(part for part in undotted(key) or () if isinstance(part, str)))
    for method in tags("method"):
        for adapter in tags("adapter"):
            values: dict[str, Any] = {"adapter": adapter, "method": {"type": method}, "data": {"eval": "a"}}
            if issubclass(METHODS[method], RewardedMethod):
                values["method"]["rewards"] = [{"type": tag_of(section)} for section in rewards]
            if method == "grpo":
                values["method"]["tools"] = [{"type": tag_of(section)} for section in tools]
            for key in entries(**values):
                reached.add(tuple(part for part in undotted(key) or () if isinstance(part, str)))
    refused = {("method", "teacher", name) for name in TEACHERS_OWN}
    assert reached == {key for key, _ in all_fields()} - refused - {("data", "eval", "weight")}


def test_descriptions_are_those_that_explain_shows() -> None:
    for entry in entries(method={"type": "grpo", "rewards": ["math"]}).values():
        name = ".".join(part for part in undotted(entry.key) or () if isinstance(part, str))
        assert entry.description
        if not entry.is_tag:
            assert entry.description in " ".join(explain(name).split()), name


@pytest.mark.parametrize("recipe", [recipe.name for recipe in list_recipes()])
def test_what_a_shipped_recipe_states_stands_at_its_fields(recipe: str) -> None:
    assert frontend.recipe_text(recipe) == next(one.path for one in list_recipes() if one.name == recipe).read_text()
    loaded = load_recipe(recipe)
    for entry in frontend.recipe_entries(read_text(frontend.recipe_text(recipe))):
        at: Any = loaded.model_dump()
        for part in undotted(entry.key) or ():
            at = at[part] if isinstance(part, int) else at.get(part) if at is not None else None
        if entry.kind not in ("section", "sections") and entry.value is not UNSET:
            assert at == entry.value or at == [entry.value]
