"""The texts: each language has all of them with the same blanks, and code asks for none that is not there."""

import ast
import re
import string
from pathlib import Path

import pytest

import webui
from tunekit import frontend
from webui.form import EVERYDAY, info_of, name_of
from webui.site import LANGUAGES
from webui.words import Words, texts_of, translations

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


SHOWN = [
    {"type": "sft"},
    {"type": "dpo"},
    {"type": "kto"},
    {"type": "grpo", "rewards": ["numeric_match"]},
    {"type": "gkd", "teacher": "pico"},
]


def entries(method):
    sections = {"model": "pico", "data": {"train": "a.jsonl", "eval": "b.jsonl"}, "method": method}
    return frontend.recipe_entries(sections)


@pytest.mark.parametrize("method", SHOWN, ids=lambda method: method["type"])
def test_the_help_of_everyday_fields_is_chinese_on_chinese_pages(method):
    everyday = [entry for entry in entries(method) if name_of(entry.key) in EVERYDAY]
    assert len(everyday) > 10
    told = {entry.key: info_of(entry, Words("zh"), None) for entry in everyday}
    assert [key for key, text in told.items() if not re.search("[\u4e00-\u9fff]{3}", text)] == []
    told = {entry.key: info_of(entry, Words("en"), None) for entry in everyday}
    assert [key for key, text in told.items() if re.search("[\u4e00-\u9fff]", text)] == []


def test_a_translated_text_is_one_of_tunekit():
    """One whose English was changed is not shown any more: it is to be translated again."""
    helps = {text for method in SHOWN for entry in entries(method) for text in texts_in(entry)}
    sentences = {english for english in translations("zh") if " " in english and english.endswith(".")}
    assert len(sentences) > 40 and sentences <= helps


def texts_in(entry):
    words = "|".join(re.escape(str(word)) for word in entry.choices)
    return (
        [entry.description, *re.split(rf" ?(?:^|\b)(?:{words}): ", entry.description)]
        if entry.is_tag
        else [entry.description]
    )
