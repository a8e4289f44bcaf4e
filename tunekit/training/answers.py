"""Answers that were generated in training, and what their rewards said: those to one prompt."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

MAX_LETTERS = 1000
"""Of a prompt and of an answer that are written down. Of a prompt its end is kept, of an answer both ends."""

NUM_SHOWN = 50
"""Approximate maximum number of times that a run records answers."""


MAX_OTHERS = 14
"""Answers of a group that are written down besides the best and the worst; of more, evenly spread ones by advantage."""


class Shown(TypedDict):
    """An answer, what each reward gave it by name, and by how much it is better than the others of its group."""

    answer: str
    rewards: dict[str, float | None]
    advantage: float


class Contrast(TypedDict):
    """A prompt with the best and the worst of its answers, and the others between them, the better ones first."""

    prompt: str
    best: Shown
    others: list[Shown]
    worst: Shown


class Answers:
    """Answers that a trainer generated last, sampled now and then.

    Args:
        kept: Columns `prompt`, `completion`, `advantages`, and `rewards` by name, as TRL's trainer keeps them for its
            own table: those of all processes in the main one.
        num_generations: Answers of a group, which stand one behind the other.
    """

    def __init__(self, kept: Mapping[str, Any], num_generations: int) -> None:
        self._kept = kept
        self._num_generations = num_generations
        self._seen: list[Any] = []

    def look(self) -> Contrast | None:
        """The answers that differ most in what they got; None where no new ones were generated since the last look."""
        answers = list(self._kept["completion"])
        if answers == self._seen:
            return None
        self._seen = answers
        prompts, advantages = list(self._kept["prompt"]), list(self._kept["advantages"])
        rewards = {name: list(values) for name, values in self._kept["rewards"].items()}
        return contrast(prompts, answers, rewards, advantages, self._num_generations)


def contrast(
    prompts: Sequence[Any],
    answers: Sequence[Any],
    rewards: Mapping[str, Sequence[float]],
    advantages: Sequence[float],
    num_generations: int,
) -> Contrast | None:
    """The answers of the group in which the best and the worst are furthest apart; None without a whole group.

    Args:
        prompts: Of each answer, a text or messages.
        answers: Texts or messages.
        rewards: Of each reward by name a value for each answer, NaN where it said nothing.
        advantages: How much better each is than the others of its group.
        num_generations: Answers of a group.
    """
    # Behind answers of an evaluation a group may begin in the middle.
    start = len(answers) % num_generations
    groups = [range(first, first + num_generations) for first in range(start, len(answers), num_generations)]
    if not groups:
        return None

    def apart(group: range) -> float:
        return max(advantages[place] for place in group) - min(advantages[place] for place in group)

    group = max(groups, key=apart)

    def shown(place: int) -> Shown:
        scores = {name: values[place] for name, values in rewards.items()}
        return {
            "answer": _cut(transcript(answers[place])),
            "rewards": {name: None if value != value else value for name, value in scores.items()},
            "advantage": advantages[place],
        }

    best, *middle = sorted(group, key=lambda place: -advantages[place])
    worst = middle.pop() if middle else best
    return {
        "prompt": _text(prompts[group[0]])[-MAX_LETTERS:],
        "best": shown(best),
        "others": [shown(place) for place in middle[:: max(1, math.ceil(len(middle) / MAX_OTHERS))]],
        "worst": shown(worst),
    }


def transcript(answer: Any) -> str:
    """Return an answer as text: of several turns a line for each call of a tool, and for what it returned."""
    if not isinstance(answer, list):
        return str(answer)
    return "\n".join(line for message in answer for line in _lines(message))


def _lines(message: Mapping[str, Any]) -> Iterator[str]:
    content = _content(message)
    if message["role"] == "tool":
        yield f"← {content}"
        return
    if content:
        yield content
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, Mapping):
            arguments = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        yield f"→ {function['name']}({arguments})"


def _text(value: Any) -> str:
    """A text, or what the last of several messages says."""
    return _content(value[-1]) if isinstance(value, list) else str(value)


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a message, of parts together."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return str(content)


def _cut(text: str) -> str:
    """A text, or its beginning and its end."""
    half = MAX_LETTERS // 2
    return text if len(text) <= MAX_LETTERS else f"{text[:half]} [...] {text[-half:]}"
