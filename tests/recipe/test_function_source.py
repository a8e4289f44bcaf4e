"""Functions of a script or cell become modules that any process imports, or what they need is refused by name."""

import json
import os
import subprocess
import sys

import pytest

from tunekit.recipe.function_source import is_written
from tunekit.recipe.functions import find_function

SCRIPT = r'''
import json, math as m, os.path, re, sys
import xml.etree.ElementTree
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from typing import Any

LIMIT = 5
WORDS = {"b", "a"}
PATTERN = re.compile(r"\d+", re.IGNORECASE)
OBJECT = object()
IMPORTED = Counter

@dataclass
class Score:
    value: float = LIMIT

    def twice(self):
        return 2 * m.floor(self.value)

def helper(text: str) -> int:
    return len(PATTERN.findall(text))

@lru_cache
def cached(n, base=LIMIT):
    return 1 if n < 1 else base + cached(n - 1)

def reward(prompts: list[Any], completions, **columns):
    """All that is kept."""
    tag = xml.etree.ElementTree.fromstring("<a/>").tag
    count = IMPORTED(completions)
    return [helper(text) + Score(1.5).twice() + cached(2) + len(WORDS) + len(tag) + count[text] for text in completions]

def plain(row):
    return {"text": row["a"] + os.path.join("b", "c")}

def counting(row):
    global LIMIT
    LIMIT += 1
    return LIMIT

def around():
    secret, other = [], []
    def closed(row):
        return secret, other
    return closed

def uses_object(row):
    return OBJECT, get_ipython, missing

def uses_helper_of_object(row):
    return uses_object(row)

class Kept:
    def score(self, row):
        return row

CASES = {
    "lambda": lambda row: row,
    "closure": around(),
    "object": uses_object,
    "deeper": uses_helper_of_object,
    "method": Kept.score,
    "bound": Kept().score,
    "partial": partial(plain),
    "class": Kept,
}

from tunekit.errors import RecipeError
from tunekit.recipe.function_source import path_of
told = {"reward": path_of(reward), "plain": path_of(plain), "counting": path_of(counting)}
told["again"] = path_of(reward)
for name, function in CASES.items():
    try:
        told[name] = path_of(function)
    except RecipeError as error:
        told[name] = str(error)
told["value"] = reward([], ["a1b22", "c"])
with open(__file__, "a") as script:
    script.write("\n\ndef reward(prompts, completions):\n    return 1\n")
print(json.dumps(told))
'''

REMEDY = "define or import these inside the function, or move it to its own module"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0
    return json.loads(done.stdout), folder


def test_a_function_is_imported_from_its_module_with_all_that_it_needs(told, monkeypatch):
    paths, folder = told
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    module, _, name = paths["reward"].partition(":")
    assert is_written(module) and name == "reward"
    assert paths["again"] == paths["reward"]
    assert find_function(paths["reward"])([], ["a1b22", "c"]) == paths["value"]
    assert find_function(paths["plain"])({"a": "x"}) == {"text": "xb/c"}
    assert [find_function(paths["counting"])({}) for _ in range(2)] == [6, 7]
    text = (folder / "tunekit" / "functions" / f"{module}.py").read_text()
    assert "OBJECT" not in text and "WORDS = {'a', 'b'}" in text


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "lambda",
            "function <lambda> cannot run in another process: a lambda has no source: define it with ",
        ),
        (
            "closure",
            "function closed cannot run in another process: closed takes 'other', 'secret' from the enclosing ",
        ),
        (
            "object",
            "function uses_object cannot run in another process: it uses 'OBJECT', an object of class object; "
            "uses_object uses 'get_ipython', which is not defined; uses_object uses 'missing', which is not defined; "
            + REMEDY,
        ),
        ("deeper", "function uses_helper_of_object cannot run in another process: it uses 'OBJECT', an object of "),
        ("method", "function score cannot run in another process: Kept.score is a method: write it as a function; "),
        ("bound", "must be a function defined with def, got method; wrap it: def my_function(...): ..."),
        ("partial", "must be a function defined with def, got partial; wrap it: def my_function(...): ..."),
        ("class", "must be a function defined with def, got type; wrap it: def my_function(...): ..."),
    ],
)
def test_what_a_function_cannot_take_along_is_named(told, case, message):
    assert told[0][case].startswith(message)


FUTURE = """
from __future__ import annotations
from tunekit.recipe.function_source import path_of

class Later:
    pass

def convert(row: Row) -> Later | None:
    return row

Row = dict
print(path_of(convert))
"""


def test_annotations_stay_text_where_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "script.py").write_text(FUTURE)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, env=os.environ
    )
    convert = find_function(done.stdout.strip())
    assert convert({}) == {} and convert.__annotations__ == {"row": "Row", "return": "Later | None"}
