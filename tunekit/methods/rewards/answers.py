"""Inputs of tunekit's own rewards, and the form of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Answers:
    """Answers to be judged, with what each was asked and what was expected.

    Attributes:
        prompts: Texts, or lists of messages.
        completions: The same.
        expected: What a reward's column says in the row of each answer, as the reward's `read` returned it.
        token_ids: Tokens of each answer, its end token among them.
    """

    prompts: list[Any]
    completions: list[Any]
    expected: list[Any]
    token_ids: list[list[int]]

    @property
    def texts(self) -> list[str]:
        """The answers as text."""
        return [text_of(completion) for completion in self.completions]


class UnjudgedError(Exception):
    """An answer that cannot be judged."""

    def __init__(self, index: int, what: str) -> None:
        self.index = index
        """Index of the answer."""

        self.what = what
        super().__init__(what)


class Judge(NamedTuple):
    """A reward that comes with tunekit."""

    score: Callable[[Answers], list[float]]
    """A finite number for each answer. It raises an UnjudgedError."""

    column: str | None = None
    """Column of the rows that it reads."""

    read: Callable[[Any], Any] = lambda value: value
    """Parser of that column's values. It raises a ValueError that names the problem."""

    load: Callable[[str], None] = lambda device: None
    """Loads to a device what is too large to be loaded only to check a recipe."""


def each(score: Callable[[str, Any], float]) -> Callable[[Answers], list[float]]:
    """A judgement of one answer's text and what was expected, made of each."""
    return lambda answers: [
        score(text, expected) for text, expected in zip(answers.texts, answers.expected, strict=True)
    ]


def text_of(completion: Any) -> str:
    """An answer as text: of messages the content of the last, which is empty where it only calls a tool.

    Where the last message is a tool's, the model has not answered.
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion and completion[-1].get("role") != "tool" else ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
