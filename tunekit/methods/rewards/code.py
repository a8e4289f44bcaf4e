"""The reward for programs: the share of a row's tests that the one in an answer passes.

The program is the answer's last fenced block of Python that is closed, or the whole answer where it has no such fence.
An answer without a program, or one that does not get as far as its tests, gets 0.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tunekit.methods.rewards.answers import Answers, Judge
from tunekit.methods.rewards.sandbox import check_sandbox, passed_tests
from tunekit.recipe.sections.rewards import CodeReward

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE
)


def code(section: CodeReward) -> Judge:
    """The share of its row's tests that the program in an answer passes in the sandbox.

    Raises:
        DependencyError: There is no sandbox here.
    """
    check_sandbox()

    def share(text: str, tests: list[str]) -> float:
        program = program_in(text)
        if not program.strip():
            return 0.0
        memory_bytes = section.memory_mib * 2**20
        passed = passed_tests(program, tests, timeout_seconds=section.timeout_seconds, memory_bytes=memory_bytes)
        return sum(passed) / len(passed)

    def score(answers: Answers) -> list[float]:
        with ThreadPoolExecutor(section.num_parallel) as pool:
            return list(pool.map(share, answers.texts, answers.expected))

    return Judge(score, section.column, _tests)


def program_in(text: str) -> str:
    """The program in an answer."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def _tests(value: Any) -> list[str]:
    tests = [value] if isinstance(value, str) else value
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise ValueError("is not a list of Python statements")
    for test in tests:
        try:
            compile(test, "<test>", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"is not a list of Python statements: {error}") from None
    return tests
