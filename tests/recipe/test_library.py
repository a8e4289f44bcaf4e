"""The shipped recipes and example data: listed, found, copied; and each recipe fit to be learned from."""

from pathlib import Path
from typing import Any

import pytest

from tunekit.errors import DataError, RecipeError
from tunekit.files import (
    copy_recipe,
    example_root,
    find_example,
    find_recipe,
    list_recipes,
    recipe_root,
    recipe_table,
)
from tunekit.recipe.load import load_recipe
from tunekit.recipe.reading.overrides import spell_out
from tunekit.recipe.reading.parse import MAPPING, read_yaml
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.section import Section

NAMES = [recipe.name for recipe in list_recipes()]


def test_the_quickstart_ships() -> None:
    assert "sft/quickstart" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_is_valid(name: str) -> None:
    # Recipes that go on from each other name their runs, as those of another model have the same file names.
    assert load_recipe(name).output.name in (name.rpartition("/")[2], name.replace("/", "-"))


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_is_a_page_that_says_what_it_is(name: str) -> None:
    lines = find_recipe(name).read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[0].endswith(".")
    assert 10 <= len([line for line in lines if line.strip()]) <= 25


def restated_defaults(values: dict[str, Any], section: Section, above: str = "") -> list[str]:
    """The keys of a recipe's values that say what holds anyway; a tag always has to be said."""
    found = []
    for name, value in values.items():
        field = type(section).model_fields[name]
        below = getattr(section, name)
        if isinstance(value, dict) and isinstance(below, Section):
            found += restated_defaults(value, below, f"{above}{name}.")
        elif name != "type" and not field.is_required() and value == field.default:
            found.append(above + name)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_states_no_default(name: str) -> None:
    values, _, _ = read_yaml(find_recipe(name).read_text(), MAPPING)
    assert restated_defaults(spell_out(values), load_recipe(name)) == []


def test_a_restated_default_would_be_noticed() -> None:
    values = {"model": {"path": "pico", "dtype": "auto"}, "data": {"train": {"path": "x"}, "max_length": 64}}
    assert restated_defaults(values, Recipe.model_validate(values)) == ["model.dtype"]


def test_a_description_is_the_first_comment_line() -> None:
    for recipe in list_recipes():
        assert recipe.path.read_text().startswith(f"# {recipe.description}\n")
        assert recipe.path == find_recipe(recipe.name)
        assert recipe.path.is_relative_to(recipe_root())


def test_the_table_of_recipes_is_theirs() -> None:
    """Print a new one with `python -c "from tunekit.files import recipe_table; print(recipe_table())"`."""
    assert recipe_table() in (recipe_root() / "README.md").read_text(encoding="utf-8")


def test_the_figures_of_the_recipes_for_pico_are_those_that_were_measured() -> None:
    shown = (recipe_root() / "README.md").read_text(encoding="utf-8")
    measured = (recipe_root().parent / "benchmarks" / "results" / "alignment.md").read_text(encoding="utf-8")
    assert measured.partition("\n\n")[2] in shown


def test_an_unknown_recipe_is_told_with_what_is_near() -> None:
    with pytest.raises(RecipeError) as error:
        find_recipe("sft/quikstart")
    expected = "sft/quikstart: no shipped recipe has this name; did you mean 'sft/quickstart' or 'vision/quickstart'? "
    assert str(error.value) == expected + "`tunekit recipes` lists them"


def test_a_recipe_is_copied_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert copy_recipe("sft/quickstart") == Path("quickstart.yaml")
    assert load_recipe("quickstart.yaml") == load_recipe("sft/quickstart")


def test_a_recipe_is_copied_to_a_file_or_into_a_folder(tmp_path: Path) -> None:
    assert copy_recipe("sft/quickstart", tmp_path) == tmp_path / "quickstart.yaml"
    assert copy_recipe("sft/quickstart", tmp_path / "mine.yaml") == tmp_path / "mine.yaml"
    assert (tmp_path / "mine.yaml").read_text() == find_recipe("sft/quickstart").read_text()


def test_a_copy_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("mine")
    with pytest.raises(RecipeError, match=r"quickstart\.yaml: already exists; pass another file to copy to$"):
        copy_recipe("sft/quickstart", tmp_path)
    assert (tmp_path / "quickstart.yaml").read_text() == "mine"


def test_a_copy_needs_a_folder_to_lie_in(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"folder .*/no does not exist; create it first$"):
        copy_recipe("sft/quickstart", tmp_path / "no" / "mine.yaml")


def test_example_data_is_found_by_name() -> None:
    assert find_example("pirate.jsonl") == example_root() / "pirate.jsonl"


def test_unknown_example_data_is_told_with_what_is_near() -> None:
    with pytest.raises(DataError) as error:
        find_example("pirat.jsonl")
    assert str(error.value).startswith("example:pirat.jsonl: no such example file; did you mean 'pirate.jsonl'")


@pytest.mark.parametrize("name", ["../data/pirate.jsonl", "make.py", "", "."])
def test_only_data_in_the_example_folder_is_found(name: str) -> None:
    with pytest.raises(DataError):
        find_example(name)


def test_the_data_that_shipped_recipes_name_ships_too() -> None:
    for name in NAMES:
        data = load_recipe(name).data
        for source in (*data.sources, *data.eval_sources):
            if source.path.startswith("example:"):
                find_example(source.path.removeprefix("example:"))
