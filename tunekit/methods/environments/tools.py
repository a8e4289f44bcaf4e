"""Tools that come with tunekit: a calculator, Python in a sandbox, and a search in a folder of texts."""

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_MAX_CHARS, _MAX_BITS = 200, 2048


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: The expression, such as `12 * (3 + 4)`.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"an expression may have {_MAX_CHARS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an expression") from None
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]  # as just seen
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))  # type: ignore[no-any-return]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        first, second = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(second) * math.log2(abs(first) + 2) > _MAX_BITS:
            raise ValueError("the power is too large")
        result = _BINARY[type(node.op)](first, second)
        if isinstance(result, complex):
            raise ValueError("the result is not a real number")
        return result  # type: ignore[no-any-return]
    raise ValueError("only numbers, parentheses and + - * / // % ** are allowed")


class Python:
    """Python in the sandbox of the reward `code`."""

    def __init__(self, memory_mib: int, timeout_seconds: float) -> None:
        self._memory_bytes = memory_mib * 2**20
        self._timeout_seconds = timeout_seconds

    def __call__(self, code: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            code: The program. It has the standard library, but no files, network or processes.
        """
        from tunekit.methods.rewards.sandbox import printed

        return printed(code, timeout_seconds=self._timeout_seconds, memory_bytes=self._memory_bytes)


def texts_in(path: str) -> list[Path]:
    """Return the texts of a folder that `search` reads.

    Raises:
        ValueError: There are none.
    """
    files = sorted(file for file in Path(path).rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
    if not files:
        raise ValueError(f"{path} has no .txt or .md files")
    return files


class Search:
    """A search in a folder of texts, ranked by BM25 (Robertson and Zaragoza 2009, k1 1.2, b 0.75)."""

    def __init__(self, path: str, num_results: int) -> None:
        folder, files = Path(path), texts_in(path)
        self._num_results = num_results
        self._passages = [
            (str(file.relative_to(folder)), passage.strip())
            for file in files
            for passage in re.split(r"\n\s*\n", file.read_text(encoding="utf-8"))
            if passage.strip()
        ]
        self._counts = [Counter(_words(passage)) for _, passage in self._passages]
        self._num_with = Counter(word for counts in self._counts for word in counts)
        self._mean_length = sum(counts.total() for counts in self._counts) / len(self._counts)

    def __call__(self, query: str) -> str:
        """Search a folder of texts.

        Args:
            query: Words to look for.
        """
        words = set(_words(query))
        scores = [self._score(words, counts) for counts in self._counts]
        best = sorted(range(len(scores)), key=lambda place: -scores[place])[: self._num_results]
        results = [f"{self._passages[place][0]}: {self._passages[place][1]}" for place in best if scores[place] > 0]
        return "\n\n".join(results) or "nothing found"

    def _score(self, words: set[str], counts: Counter[str]) -> float:
        longer = 1.2 * (0.25 + 0.75 * counts.total() / self._mean_length)
        shared = words & counts.keys()
        return sum(self._rarity(word) * counts[word] * 2.2 / (counts[word] + longer) for word in shared)

    def _rarity(self, word: str) -> float:
        num_with = self._num_with[word]
        return math.log(1 + (len(self._counts) - num_with + 0.5) / (num_with + 0.5))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
