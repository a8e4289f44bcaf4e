"""An environment, a tool and a reward to which something happens, for `benchmarks.tool_faults`.

It is copied beside a recipe, with `fault.json`. Calls of each kind are counted in files, for they are made in many
processes; `reset` is called once for each episode, from which the step is known.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent


def happen(at: str) -> str | None:
    """Let the fault happen, if this is where; return a result in place of that of the call."""
    if not (HERE / "fault.json").exists():
        return None
    fault = json.loads((HERE / "fault.json").read_text())
    if at != fault["at"] or _size("episodes.txt") <= fault["after"] or _size("happened.txt") >= fault["times"]:
        return None
    _count("happened.txt")
    return _do(fault["does"])


def _do(does: str) -> str | None:
    host = psutil.Process(os.getppid())
    match does:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(3600)
        case "raise":
            raise ValueError("it is broken")
        case "shout":
            return "a" * 50_000_000
        case "print":
            for _ in range(500):
                print("a" * 99_999)
        case "fork":
            _fork()
        case "fork and kill":
            _fork()
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill all":
            for each in host.children():
                each.kill()
        case "kill host":
            host.kill()
            time.sleep(3600)
        case "stop trainer":
            host.parent().terminate()
        case "kill trainer":
            host.parent().kill()
            time.sleep(3600)
        case "fork and kill trainer":
            _fork()
            host.parent().kill()
            time.sleep(3600)
    return None


def _fork() -> None:
    """Leave processes behind: forked, started, and detached."""
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,)).start()
    subprocess.Popen(["sleep", "3600"])
    subprocess.Popen(["sleep", "3600"], start_new_session=True)


def _count(name: str) -> None:
    with (HERE / name).open("ab", buffering=0) as file:
        file.write(b".")


def _size(name: str) -> int:
    return (HERE / name).stat().st_size if (HERE / name).exists() else 0


class Game:
    """A game whose reward is what was guessed."""

    def reset(self, start: int, seed: int) -> str:
        """Begin an episode."""
        _count("episodes.txt")
        happen("reset")
        self.total, self.random = 0, random.Random(seed).random()
        return f" Begin at {start}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        result = happen("guess")
        self.total += number
        return result or ("higher" if number < 8 else "lower")

    def get_reward(self) -> float:
        """Return the reward."""
        happen("get_reward")
        return self.total / 100 + self.random / 10


def guess(number: int) -> str:
    """Guess the number.

    Args:
        number: The guess.
    """
    return happen("tool") or ("higher" if number < 8 else "lower")


def judge(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Score answers by their tokens; without an environment, count them as episodes."""
    if "episode" not in columns:
        for _ in completions:
            _count("episodes.txt")
    return [sum(ids) % 97 / 97 for ids in completion_ids]
