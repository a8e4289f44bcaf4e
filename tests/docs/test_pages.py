"""Every block of the documentation is true: recipes load, commands parse, cheap ones run, Python names what there is.

A YAML block with a file name is a whole recipe, unless a command of its page migrates it or plans for it as a machine;
one without a name is a part of a recipe. `text` blocks behind a command that runs here show what it prints. A heading
in backquotes of the page of messages is a message, `…` for what varies.
"""

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path

import pytest
import typer.main
import yaml

import tunekit
from tests.commands import run_command
from tests.documents import Block, blocks_of, check_shown, commands_of, write_files
from tunekit.cli.app import app
from tunekit.files import list_recipes
from tunekit.recipe.load import load_recipe

DOCS = Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.name != "models.md")
NAMES = [str(path.relative_to(DOCS)) for path in PAGES]
BASE = {"model": "pico", "data": {"train": "example:pirate.jsonl"}}
CHEAP = ("check", "plan", "explain", "data", "recipes", "migrate", "schema")
OFFLINE = {"COLUMNS": "100", "HF_ENDPOINT": "http://127.0.0.1:9"}
SHELL = ("bash", "sh")


LONG = ("data.md", "adapters.md")
"""Pages whose cheap commands take seconds together."""


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if page.name in LONG else []


def blocks(page: Path) -> list[Block]:
    return blocks_of(page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[list[str]]:
    return [words for block in blocks(page) if block.language in SHELL for words in commands_of(block)]


def foreign_files(page: Path) -> set[str]:
    """Files of a page that are no recipes: configurations of other tools, and machines."""
    found = [words[1] for words in commands(page) if words[0] == "migrate"]
    return {*found, *(words[words.index("--on") + 1] for words in commands(page) if "--on" in words)}


def merged(base: dict, part: dict) -> dict:
    both = {key: merged(base[key], part[key]) for key in base.keys() & part.keys() if isinstance(base[key], dict)}
    return {**base, **part, **{key: value for key, value in both.items() if isinstance(part[key], dict)}}


def parse(words: list[str]) -> dict:
    """Parse a command line as the real one does, and return its parameters."""
    command, context = typer.main.get_command(app), None
    while True:
        context = command.make_context("tunekit", list(words), parent=context)
        if not hasattr(command, "commands") or not (arguments := [*context._protected_args, *context.args]):
            return context.params
        _, command, words = command.resolve_command(context, arguments)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_recipes_load(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_files(blocks(page), tmp_path)
    for block in blocks(page):
        if block.language != "yaml" or block.file in foreign_files(page):
            continue
        if block.file:
            load_recipe(block.file)
        else:
            part = tmp_path / "part.yaml"
            part.write_text(yaml.safe_dump(merged(BASE, yaml.safe_load(block.text))), encoding="utf-8")
            load_recipe(part)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_parse_and_name_recipes_that_there_are(page):
    shipped = {recipe.name for recipe in list_recipes()}
    known = {*shipped, *(block.file for block in blocks(page))}
    for words in commands(page):
        parameters = parse(words)
        known |= {words[words.index(option) + 1] for option in ("-o", "--output") if option in words}
        known |= {parameters["dest"] and str(parameters["dest"])} if words[:2] == ["recipes", "copy"] else set()
        if isinstance(recipe := parameters.get("recipe"), str):
            assert recipe in known, f"tunekit {' '.join(words)}: no recipe {recipe} on this page"


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks_of(page)) for page in PAGES], ids=NAMES)
def test_cheap_commands_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    of_page = blocks(page)
    write_files(of_page, tmp_path)
    for block, following in pairwise([*of_page, Block("", "", "")]):
        if block.language != "bash" or not all(words[0] in CHEAP for words in commands_of(block)):
            continue
        printed = ""
        for words in commands_of(block):
            answer = run_command(*words, cwd=tmp_path, env=OFFLINE)
            assert answer.returncode == 0, f"tunekit {' '.join(words)}\n{answer.stdout}{answer.stderr}"
            printed += answer.stdout + answer.stderr
        if following.language == "text":
            check_shown(following.text, printed)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_names_what_there_is(page):
    for block in blocks(page):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tunekit":
                assert hasattr(tunekit, node.attr), node.attr
            if isinstance(node, ast.Call) and re.fullmatch(r"tunekit\.\w+", name := ast.unparse(node.func)):
                signature = inspect.signature(getattr(tunekit, name.removeprefix("tunekit.")))
                keywords = {keyword.arg for keyword in node.keywords}
                assert keywords <= signature.parameters.keys(), ast.unparse(node)


def sections(text: str) -> dict[str, str]:
    """The sections of the second level of a page by their anchors."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    titles = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in parts[1::2]]
    return {re.sub(r"\s+", "-", title): body for title, body in zip(titles, parts[2::2], strict=True)}


def test_each_of_ten_tasks_takes_at_most_five_commands():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    links = re.findall(r"^\| [^|]+ \| \[[^]]+\]\((\S+)#(\S+)\) \|$", index, re.MULTILINE)
    assert len(links) == 10
    for page, anchor in links:
        of_section = blocks_of(sections((DOCS / page).read_text(encoding="utf-8"))[anchor])
        cells = [block for block in of_section if block.language == "python"]
        steps = [words for block in of_section if block.language in SHELL for words in commands_of(block)]
        assert 1 <= len(steps) + len(cells) <= 5, (page, anchor)


def test_messages_are_those_that_are_printed():
    page = (DOCS / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(messages) > 15
    sources = [*(ROOT / "tunekit").rglob("*.py"), *(ROOT / "tests" / "photographs").glob("messages-*.txt")]
    printed = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    pieces = [piece.strip() for message in messages for piece in message.split("…")]
    assert [piece for piece in pieces if piece not in printed] == []


def test_fields_that_pages_name_are_fields():
    from tunekit.recipe.explain import document_fields

    keys = {field.key for field in document_fields()}
    pattern = re.compile(r"`((?:model|data|method|adapter|train|parallel|output)(?:\.\w+)+)(?:=[^`]*)?`")
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    named = {(name, key) for name, text in texts.items() for key in pattern.findall(text)}
    assert len(named) > 50
    assert {
        (name, key) for name, key in named if key not in keys and not key.startswith("method.trainer_args.")
    } == set()
