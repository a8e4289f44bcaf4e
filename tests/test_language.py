"""Docstrings begin with a verb or a noun, and locals are nouns of the field."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [file for package in ("tunekit", "webui") for file in sorted((ROOT / package).rglob("*.py"))]

QUESTION = re.compile(r"(What|Whether|How|Where|Who|Whom|Whose|Why|When|Which)\b")
MAX_QUESTIONS = 0.02
"""Share of docstrings. Strings under the fields of recipes are help texts, some of which begin so."""

VAGUE = re.compile(
    "found|told|given|asked|kept|made|wanted|said|taken|known|left|gone|meant|seen|got|held|brought|thing|things|those|"
    "others|rest|done|wished|looked|shown|stood|stands|lies|went|one"
)
MAX_VAGUE = 0.005
"""Share of locals."""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions, and the strings under fields and constants."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        texts = (statement.value for statement in node.body if isinstance(statement, ast.Expr))
        constants = (text.value for text in texts if isinstance(text, ast.Constant))
        yield from (text.strip() for text in constants if isinstance(text, str))


def locals_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names that functions bind, each once a function."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
            yield from {node.id for node in names if isinstance(node.ctx, ast.Store)}


def test_docstrings_begin_with_a_verb_or_a_noun():
    texts = [text for file in FILES for text in docstrings(ast.parse(file.read_text(encoding="utf-8")))]
    questions = [text for text in texts if QUESTION.match(text)]
    assert len(texts) > 3000
    assert len(questions) <= MAX_QUESTIONS * len(texts), questions[:10]


def test_locals_are_nouns_of_the_field():
    names = [name for file in FILES for name in locals_of(ast.parse(file.read_text(encoding="utf-8")))]
    vague = [name for name in names if VAGUE.fullmatch(name)]
    assert len(names) > 10_000
    assert len(vague) <= MAX_VAGUE * len(names), vague[:10]


def test_what_is_banned_is_seen():
    tree = ast.parse('"""What it is."""\ndef f():\n    """Whether so."""\n    found = 1\n')
    assert [bool(QUESTION.match(text)) for text in docstrings(tree)] == [True, True]
    assert [name for name in locals_of(tree) if VAGUE.fullmatch(name)] == ["found"]
