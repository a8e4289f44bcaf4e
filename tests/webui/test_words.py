"""The texts: each language has all of them with the same blanks, and code asks for none that is not there."""

import ast
import re
import string
from pathlib import Path

import pytest

import webui
from webui.site import LANGUAGES
from webui.words import texts_of

CODE = sorted(Path(webui.__file__).parent.glob("*.py"))


def blanks(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def asked():
    """The keys that code asks for by a literal, with the beginnings of those that it puts together."""
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                panel, dot, key = node.value.partition(".")
                if dot and re.fullmatch(r"[a-z_0-9]+", key) and any(k.startswith(f"{panel}.") for k in texts_of("en")):
                    yield path.name, node.value


@pytest.mark.parametrize("language", [code for code in LANGUAGES if code != "en"])
def test_a_language_has_every_text_with_the_same_blanks(language):
    english, other = texts_of("en"), texts_of(language)
    assert english.keys() == other.keys()
    assert {key: blanks(text) for key, text in other.items()} == {key: blanks(text) for key, text in english.items()}


def test_chinese_texts_are_chinese():
    names = {"shell.name"}
    told = {key: text for key, text in texts_of("zh").items() if re.search("[A-Za-z]{3}", texts_of("en")[key])}
    plain = {key for key, text in told.items() if not re.search("[\u4e00-\u9fff]", text) and key not in names}
    same = {key for key in plain if texts_of("en")[key] == told[key]}
    assert len(same) < len(told) / 20, sorted(same)


def test_code_asks_for_texts_that_are_there():
    found = list(asked())
    assert len(found) > 200
    panels = {key.partition(".")[0] for key in texts_of("en")}
    of_recipes = {"data", "model", "train"}
    unknown = [
        (file, key)
        for file, key in found
        if key not in texts_of("en")
        and key.partition(".")[0] in panels - of_recipes
        and not key.endswith((".json", ".txt", ".yaml"))
        and not (key.endswith("_") and any(known.startswith(key) for known in texts_of("en")))
    ]
    assert not unknown
