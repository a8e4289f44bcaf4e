"""Texts for users are in the words of TRL, PEFT and Transformers: a list of phrases that they must not contain.

Messages and help texts in the packages (strings that are not docstrings, the strings under the fields of recipes, the
docstrings of commands), their YAML tables, the English texts of the web UI, shipped recipes, notebooks, and Markdown.
"""

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.test_language import FILES, ROOT

BANNED = {
    r"(go|goes|going|went) on (with|from)": "resume, continue",
    r"anew": "again, start over",
    r"begun": "started",
    r"what (came|comes) out": "result, summary",
    r"(is|are|be) told": "gets, is reported",
    r"what there is": "available: ...",
    r"what is (there|left|said|asked)": "available, the rest, reported, requested",
    r"(is|are|was|were) gone": "no longer exists, has exited",
    r"by (itself|themselves)": "automatically, separately",
    r"wish(ed|es)?": "requested, setting",
    r"of (its|their|your|our|my|one's) own": "its own ..., a custom ..., separate",
    r"as ever": "as before, unchanged",
    r"told apart|tells? apart": "rewards/accuracies",
    r"(reward|rewards|log odds) of the (better|worse)": "rewards/chosen, rewards/rejected",
    r"cannot be had": "unsupported, not available",
    r"asks? for nothing": "has no effect",
    r"is asked to|were asked for": "will ..., requested",
    r"one behind the other": "padding-free, concatenated",
    r"(is|are) no (data|link|regular|regex|identit|expression|linear|stack|model|valid)\w*": "is not a ...",
    r"beside": "next to, with, in addition to, compared with",
    r"(whole|undivided) (weights|tables|gradients|parameters)": "unsharded, full",
    r"divided (weights|layers|sequences)|divides weights": "sharded, split",
    r"(text|model|weights|base|tower|layers|recipe) alone": "only ...",
    r"(do|does) not go with|goes with": "is unsupported with",
    r"has no use": "has no effect",
    r"in the mean": "on average",
    r"at the most": "at most",
    r"(leaves?|left) (it |them |others )?out": "exclude, skip, drop",
    r"(stays?|is kept|are kept) as (it|they) (is|are|was|were)": "unchanged, keeps its format",
    r"each time that": "each time",
    r"from the shortest to the longest": "ascending, shortest first",
    r"makes? up for": "requires, compensates",
    r"is of (an?|the|another) ": "is a ...",
    r"(never|is|are|be|gets?) cut": "truncated",
    r"(?<!three )things?": "name it",
    r"falls? silent|keeps? silent": "stops responding",
    r"dear(er|est)": "slower, more expensive",
    r"mend (it|them|this|that|the)": "fix",
    r"(says|said|saying) so": "reports it",
    r"(stands?|stood) (in|at|behind|before|beside|for)": "is in, precedes",
    r"behind (it|the|a|each|both)": "after",
    r"till": "until",
    r"there(by|in|of|with)": "name the noun",
    r"(is|are) not known": "unknown",
    r"comes? back": "returns",
    r"for want of": "without, for lack of",
    r"in vain": "without effect",
    r"of which (none|it|each|some|all|one|there)": "split the sentence",
    r"draws? (rows|\w+ times)|drawn by": "sample",
    r"evaluations in a row": "consecutive evaluations",
    r"a (step|token|parameter|table|micro-batch), (as|at) each": "per step",
    r"(does|do|did) nothing": "has no effect",
    r"gives? back": "returns, releases",
    r"have .* do so": "use",
    r"like(ly)? so": "like this",
    r"a part of the (tokens|model|layers)": "tiles of tokens, part of the model",
    r"at several places": "in several places",
    r"(has|have) not(?! (yet )?\w+(ed|en)\b)": "does not have",
    r"no less than": "at least",
    r"other than before": "changed",
}
"""Phrases of other trades and times as regular expressions, each with the words to use instead."""
PATTERNS = {phrase: re.compile(rf"(?<![\w/'-])(?:{phrase})(?![\w'-])", re.IGNORECASE) for phrase in BANNED}
PAGES = ("README.md", "SECURITY.md", "docs/*.md", "docs/guides/*.md", "recipes/**/*.md", "recipes/**/*.yaml")
TABLES = ("tunekit/**/*.yaml", "webui/locales/en/*.yaml")
SECTIONS = ("tunekit/recipe/sections/", "tunekit/recipe/methods/", "tunekit/recipe/schema.py")
"""Modules whose strings under fields are the help of `tunekit explain` and of forms."""
RECORDED = {"models.md"}
"""Pages that quote what was measured."""


def docstring_ids(tree: ast.Module, *, commands: bool) -> set[int]:
    """Return the ids of the nodes of docstrings, and of strings under constants, that only programmers read."""
    ids = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_command = commands and isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        for number, statement in enumerate(node.body):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                is_field = isinstance(node, ast.ClassDef) and number > 0
                if not is_field and not is_command:
                    ids.add(id(statement.value))
    return ids


def strings_of(source: str, *, fields: bool, commands: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module that reach users, with their lines; f-strings with `{}` for values.

    Args:
        source: The module.
        fields: Whether strings under the fields of its classes are help texts.
        commands: Whether docstrings of its public functions are.
    """
    tree = ast.parse(source)
    skipped = docstring_ids(tree, commands=commands)
    if not fields:
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        statements = (statement for node in classes for statement in node.body if isinstance(statement, ast.Expr))
        skipped |= {id(statement.value) for statement in statements}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(value) for value in node.values}
            parts = (value.value if isinstance(value, ast.Constant) else "{}" for value in node.values)
            yield node.lineno, " ".join("".join(map(str, parts)).split())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, " ".join(node.value.split())


def values_of(table: Any) -> Iterator[str]:
    """Yield the texts in a YAML table, keys included."""
    if isinstance(table, str):
        yield " ".join(table.split())
    elif isinstance(table, dict):
        for key, value in table.items():
            yield from (*values_of(key), *values_of(value))
    elif isinstance(table, list):
        for value in table:
            yield from values_of(value)


def user_texts() -> Iterator[tuple[str, str]]:
    """Yield every text that users read, with its place."""
    for file in FILES:
        name = file.relative_to(ROOT).as_posix()
        fields = name.startswith(SECTIONS) and not name.endswith(("spec.py", "__init__.py"))
        source = file.read_text(encoding="utf-8")
        for line, text in strings_of(source, fields=fields, commands=name.startswith("tunekit/cli/")):
            if " " in text and "=>" not in text:
                yield f"{name}:{line}", text
    for pattern in TABLES:
        for file in sorted(ROOT.glob(pattern)):
            place = file.relative_to(ROOT).as_posix()
            texts = values_of(yaml.safe_load(file.read_text(encoding="utf-8")))
            yield from ((place, text) for text in texts if " " in text)
    for pattern in PAGES:
        for file in sorted(ROOT.glob(pattern)):
            if file.name not in RECORDED:
                text = re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
                yield file.relative_to(ROOT).as_posix(), " ".join(text.split())
    for file in sorted(ROOT.glob("examples/*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        texts = (" ".join("".join(cell["source"]).split()) for cell in cells if cell["cell_type"] == "markdown")
        yield from ((file.relative_to(ROOT).as_posix(), text) for text in texts)


def banned_in(text: str) -> Iterator[str]:
    """Yield the phrases in a text that should be others, each with its surroundings and the words to use."""
    for phrase, pattern in PATTERNS.items():
        for found in pattern.finditer(text):
            around = text[max(0, found.start() - 40) : found.end() + 40]
            yield f"...{around}...: instead of {found[0]!r}: {BANNED[phrase]}"


def test_what_users_read_is_in_the_words_of_the_field():
    texts = list(user_texts())
    assert len(texts) > 5000
    faults = [f"{place}: {fault}" for place, text in texts for fault in banned_in(text)]
    assert faults == [], "\n".join(faults)


def test_each_banned_phrase_has_other_words():
    assert len(BANNED) >= 40
    assert all(BANNED.values())


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('raise RunError("the run cannot be gone on", hint="go on with: tunekit resume")', "go on with"),
        ('raise RunError(f"{name} is no model: start"\n    " anew")', "anew"),
        ('class Section:\n    rank: int = 8\n    """Rank of a module of its own."""\n', "of its own"),
        ('def stop() -> None:\n    """Stop a run that was wished."""\n', "wished"),
    ],
)
def test_a_banned_phrase_is_found_in_messages_help_and_commands(source, fault):
    texts = [text for _, text in strings_of(source, fields=True, commands=True)]
    assert any(f"instead of {fault!r}" in found for text in texts for found in banned_in(text))


def test_docstrings_and_comments_are_for_programmers():
    field = 'class C:\n    """As ever."""\n    x: int\n    """Begun."""\n'
    source = f'"""Begun anew."""\ndef f():\n    """Wished."""\n    # anew\n{field}'
    assert list(strings_of(source, fields=False)) == []
    assert [text for _, text in strings_of(source, fields=True)] == ["Begun."]
