"""Answers that depend on the prompt, the place in the group and the weights alone, and a reward that tells them apart.

GRPO's answers are drawn from each process's own stream of random numbers, so that runs in one and in several processes
cannot be compared. Here the number that is drawn with is fixed: it is that of the answer's place in its group.
"""

import contextlib
import os
from collections.abc import Iterator

import torch

GROUP = 4
"""Answers to a prompt."""


def pick(probabilities: torch.Tensor, num_samples: int, **_: object) -> torch.Tensor:
    """The token at which the summed probability passes the number of the row, instead of a random one.

    The rows of all processes, one process's behind the other's, are the answers of a step, group by group.
    """
    assert num_samples == 1
    num_rows = len(probabilities)
    places = (torch.arange(num_rows) + int(os.environ.get("RANK", "0")) * num_rows) % GROUP
    numbers = (places + 0.5) / GROUP
    summed = probabilities.double().cumsum(dim=-1)
    return (summed < numbers[:, None] * summed[:, -1:]).sum(dim=-1, keepdim=True)


@contextlib.contextmanager
def fixed_numbers() -> Iterator[None]:
    """Within it, tokens are drawn with fixed numbers."""
    original = torch.multinomial
    torch.multinomial = pick
    try:
        yield
    finally:
        torch.multinomial = original


def reward(completions: list[str], **columns: object) -> list[float]:
    """Something that most answers of a group differ in."""
    return [sum(map(ord, answer)) % 97 / 97 for answer in completions]


def reward_of_some(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """The same, and nothing that tells the answers to every second prompt apart."""
    rewards = reward(completions)
    return [value if len(prompt) % 2 else 0.5 for prompt, value in zip(prompts, rewards, strict=True)]


def length(completions, pattern, **columns):
    """Return the lengths of answers to rows with a column `pattern`."""
    return [float(len(completion)) for completion, _ in zip(completions, pattern, strict=True)]
