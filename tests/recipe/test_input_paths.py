"""Relative paths of a recipe file: the working directory first, then the folder of the file."""

from pathlib import Path

import pytest

import tunekit
from tunekit.errors import DataError
from tunekit.recipe.load import load_recipe_with_notes

ROW = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}\n'


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe file in a folder of the working directory, with its rows in a folder beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kit" / "rows").mkdir(parents=True)
    (tmp_path / "kit" / "rows" / "chats.jsonl").write_text(4 * ROW)
    text = "model: pico\ndata: {train: rows/chats.jsonl, max_length: 64}\ntrain: {max_steps: 1}\noutput: {dir: runs}\n"
    (tmp_path / "kit" / "mine.yaml").write_text(text)
    return "kit/mine.yaml"


def train_path(source: str, *words: str) -> tuple[str, list[str]]:
    """Return the path of the rows that a recipe file leads to, and its notes."""
    loaded, notes = load_recipe_with_notes(source, words)
    return loaded.data.sources[0].path, notes


def test_a_file_that_only_the_recipes_folder_has_is_read_there_with_a_note(recipe: str) -> None:
    note = "data.train.path: rows/chats.jsonl is in the recipe's folder, kit"
    assert train_path(recipe) == ("kit/rows/chats.jsonl", [note])


def test_patterns_folders_and_lists_are_found_there_too(recipe: str) -> None:
    text = "model: pico\ndata: {train: [{path: 'rows/*.jsonl'}, {path: rows}], max_length: 64}\n"
    Path("kit/several.yaml").write_text(text)
    sources = tunekit.load_recipe("kit/several.yaml").data.sources
    assert [source.path for source in sources] == ["kit/rows/*.jsonl", "kit/rows"]


def test_a_model_a_teacher_and_a_template_are_found_there_and_names_stay_names(recipe: str) -> None:
    for name in ("base", "pico", "qwen3"):
        Path("kit", name).mkdir()
    Path("kit/mine.jinja").write_text("{{ messages }}")
    Path("kit/d.yaml").write_text(
        "model: {path: base, chat_template: mine.jinja}\n"
        "method: {type: gkd, teacher: {path: pico, chat_template: qwen3}}\n"
        "data: {train: rows/chats.jsonl}\n"
    )
    loaded = tunekit.load_recipe("kit/d.yaml")
    assert loaded.model.path == "kit/base"
    assert loaded.model.chat_template == "kit/mine.jinja"
    assert loaded.method.teacher.path == "pico"
    assert loaded.method.teacher.chat_template == "qwen3"


def test_the_working_directory_comes_first_and_another_file_of_that_name_is_noted(recipe: str) -> None:
    Path("rows").mkdir()
    Path("rows/chats.jsonl").write_text(ROW)
    path, notes = train_path(recipe)
    assert path == "rows/chats.jsonl"
    assert notes == ["data.train.path: rows/chats.jsonl of the working directory, not that of the recipe's folder, kit"]


def test_paths_of_the_command_line_are_those_of_the_working_directory(recipe: str) -> None:
    assert train_path(recipe, "data.train=rows/chats.jsonl") == ("rows/chats.jsonl", [])


def test_what_a_run_writes_stays_below_the_working_directory(recipe: str) -> None:
    Path("kit/runs").mkdir()
    assert tunekit.load_recipe(recipe).output.dir == "runs"


def test_a_recipe_in_the_working_directory_is_as_ever(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("kit")
    assert train_path("mine.yaml") == ("rows/chats.jsonl", [])


def test_the_rows_are_read_and_a_miss_names_both_places(recipe: str) -> None:
    tunekit.check(recipe)
    with pytest.raises(DataError, match="folder 'rows' does not exist in the working directory or the recipe"):
        tunekit.check(recipe, ["data.train=rows/chats.jsonl"])
