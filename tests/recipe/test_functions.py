"""Functions that a recipe names: found when it is loaded, or told at their place."""

import shlex
import sys

import pytest

from tunekit.errors import RecipeError
from tunekit.recipe.functions import find_function
from tunekit.recipe.load import dump_recipe, load_recipe, reload_recipe

RECIPE = "model: pico\ndata:\n  train: x.jsonl\n  format: "


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rows.py").write_text("TABLE = {}\ndef convert(row):\n    return row\n")
    (tmp_path / "my_kit").mkdir()
    (tmp_path / "my_kit" / "__init__.py").write_text("")
    (tmp_path / "my_kit" / "shapes.py").write_text("from my_rows import convert\n")
    (tmp_path / "my_needs.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "my_slip.py").write_text("def convert(row)\n    return row\n")
    (tmp_path / "my_fault.py").write_text("1 / 0\n")
    return tmp_path


def test_a_function_is_found_from_the_working_directory_which_is_searched_for_that_moment_only(here):
    before = list(sys.path)
    (here / "recipe.yaml").write_text(RECIPE + "my_kit.shapes:convert")
    assert load_recipe(here / "recipe.yaml").data.format == "my_kit.shapes:convert"
    assert sys.path == before
    assert find_function("my_rows:convert")({"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_row:convert", "no module 'my_row'; did you mean 'my_rows'?"),
        ("my_kit.shape:convert", "no module 'my_kit.shape'; did you mean 'my_kit.shapes'?"),
        ("my_rows.x:convert", "no module 'my_rows.x'; write my_module:my_function"),
        ("my_rows:convrt", "module 'my_rows' has no function 'convrt'; did you mean 'convert'?"),
        ("my_rows:x", "module 'my_rows' has no function 'x'; available: convert"),
        ("my_rows:TABLE", "'my_rows:TABLE' is not a function but a dict"),
        (
            "my_needs:convert",
            "importing 'my_needs' failed: No module named 'no_such_package_at_all'; install the missing module",
        ),
        ("my_slip:convert", "importing 'my_slip' failed: {here}/my_slip.py:1: expected ':'"),
        ("my_fault:convert", "importing 'my_fault' raised ZeroDivisionError: division by zero"),
        ("my_rows.py:", "must be module:function, such as my_module:my_function, got 'my_rows.py:'"),
        ("my-rows:convert", "must be module:function, such as my_module:my_function, got 'my-rows:convert'"),
        (
            "mesages",
            "must be one of 14 names (`tunekit explain data.format` lists them) or module:function, got 'mesages'; "
            "did you mean 'messages'?",
        ),
        (
            "dpo",
            "must be one of 14 names (`tunekit explain data.format` lists them) or module:function, got 'dpo'",
        ),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_found_is_told_at_its_place(path, message, here):
    (here / "recipe.yaml").write_text(f"{RECIPE}'{path}'\n  max_lenth: 5\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml")
    assert str(caught.value).splitlines() == [
        f"recipe.yaml:4:11: data.format: {message.format(here=here)}",
        "recipe.yaml:5:3: data.max_lenth: unknown key; did you mean 'max_length'?",
    ]


def test_a_module_of_the_recipes_folder_is_named_with_how_to_import_it(here, monkeypatch):
    (here / "else where").mkdir()
    (here / "else where" / "my_own.py").write_text("def convert(row):\n    return row\n")
    (here / "else where" / "recipe.yaml").write_text(RECIPE + "my_own:convert")
    words = "no module 'my_own'; it is in the recipe's folder: export PYTHONPATH="
    with pytest.raises(RecipeError, match=words) as caught:
        load_recipe("else where/recipe.yaml")
    (path,) = shlex.split(str(caught.value).partition("PYTHONPATH=")[2])
    monkeypatch.syspath_prepend(path)
    assert load_recipe("else where/recipe.yaml").data.format == "my_own:convert"


def test_columns_beside_a_function_are_refused(here):
    (here / "recipe.yaml").write_text(RECIPE + "my_rows:convert\n  columns: {text: a}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml")
    assert str(caught.value) == (
        "recipe.yaml:5:3: data.columns: has no effect with a row function, which reads the columns itself; unset it"
    )


def test_functions_of_single_sources_are_looked_for_too(here):
    text = "model: pico\ndata:\n  train:\n    - {path: a.jsonl, format: 'my_rows:convrt'}\n"
    (here / "recipe.yaml").write_text(text + "  eval: {path: a.jsonl, format: 'my_row:convert'}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipe.yaml")
    assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
        "recipe.yaml:4:31: data.train[0].format: module 'my_rows' has no function 'convrt'",
        "recipe.yaml:5:33: data.eval.format: no module 'my_row'",
    ]


def test_the_recipe_of_a_run_is_read_where_its_functions_are_not(here, tmp_path_factory, monkeypatch):
    (here / "recipe.yaml").write_text(RECIPE + "my_rows:convert")
    recipe = load_recipe("recipe.yaml")
    kept = tmp_path_factory.mktemp("run") / "recipe.yaml"
    kept.write_text(dump_recipe(recipe))
    monkeypatch.chdir(kept.parent)
    del sys.modules["my_rows"]
    assert reload_recipe(kept) == recipe
    with pytest.raises(RecipeError, match="no module 'my_rows'"):
        load_recipe(kept)
