r"""The reward for mathematics: whether an answer is equal to the expected one, however both are written.

math-verify finds the expression in an answer, with `\boxed{}` before others, and compares with sympy. An answer may
well be an expression that takes hours or all memory (`9^{9^{9^9}}`), which nothing in Python can stop; so both happen
in a process of their own, which is ended when an answer takes too long and started anew for the next. Such an answer
gets 0, as does one without an expression.
"""

import importlib.util
import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunekit.errors import DependencyError
from tunekit.methods.rewards.answers import Answers, Judge, UnjudgedError
from tunekit.recipe.sections.rewards import MathReward

_SCRIPT = Path(__file__).with_name("math_worker.py")
_START_SECONDS, _SECONDS = 60.0, 5.0
_LONGEST = 20_000
"""Letters at the end of an answer that are looked at."""


def math(section: MathReward) -> Judge:
    """1 where an answer is mathematically equal to the expected one, else 0.

    Raises:
        DependencyError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise DependencyError("method.rewards: math needs math-verify", hint="pip install 'tunekit[rewards]'")
    comparing = Comparing()

    def score(answers: Answers) -> list[float]:
        scores = []
        for index, (text, expected) in enumerate(zip(answers.texts, answers.expected, strict=True)):
            equal = comparing.are_equal(text, expected)
            if equal is None:
                raise UnjudgedError(
                    index, f"the column {section.column!r} has no mathematical expression: {expected!r}"
                )
            scores.append(float(equal))
        return scores

    return Judge(score, section.column, _expression, load=lambda device: comparing.start())


def _expression(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError("is not a mathematical expression")
    return str(value)


class Comparing:
    """The process that compares. It ends with this one, since it reads from it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, which takes longer than to compare.

        Raises:
            DependencyError: It does not start.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_SCRIPT), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # What a terminal sends is for the run, which still needs it in the step that is computed.
            start_new_session=True,
        )
        if self._reply(_START_SECONDS) is None:
            raise DependencyError("method.rewards: math: math-verify does not start", hint=f"run python {_SCRIPT} $$")

    def are_equal(self, answer: str, expected: str) -> bool | None:
        """Return whether an answer equals the expected one; None where one of them cannot be parsed."""
        if self._process is None:
            self.start()
        assert self._process is not None and self._process.stdin is not None, "it has been started"
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([answer[-_LONGEST:], expected]).encode() + b"\n")
            self._process.stdin.flush()
        reply = self._reply(_SECONDS)
        return False if reply is None else {b"1\n": True, b"0\n": False}.get(reply)

    def _reply(self, seconds: float) -> bytes | None:
        """Return its reply; None if it does not reply in time, and is ended."""
        process = self._process
        assert process is not None and process.stdout is not None, "it has been started"
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        reply = process.stdout.readline() if ready else b""
        if reply:
            return reply
        process.kill()
        process.communicate()
        self._process = None
        return None
