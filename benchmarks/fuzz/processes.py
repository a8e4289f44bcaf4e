"""The process in which cases are trained one after the other: renewed, and ended where a case hangs."""

import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.processes import PRELOADED

SECONDS = 600
"""Limit of a case."""

RENEWED = 150
"""Cases of a process."""


def results_of(seeds: Iterator[int], number: int | None, until: float | None) -> Iterator[dict[str, Any]]:
    """Play seeds in processes of their own, and yield what came of each.

    Args:
        seeds: The seeds.
        number: At most so many.
        until: Time of the monotonic clock to end at.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.fuzz.play", "tunekit.api.verbs", *PRELOADED])
    process: Any = None
    played = 0
    try:
        while (number is None or played < number) and (until is None or time.monotonic() < until):
            seed = next(seeds, None)
            if seed is None:
                return
            if process is None or played % RENEWED == 0:
                _end(process)
                asked, answers = context.Queue(), context.Queue()
                process = context.Process(target=_work, args=(asked, answers))
                process.start()
            asked.put(seed)
            result = _answer(process, answers, seed)
            if result["verdict"] in ("timeout", "died"):
                _end(process)
                process = None
            played += 1
            yield result
    finally:
        _end(process)


def _answer(process: Any, answers: Any, seed: int) -> dict[str, Any]:
    began = time.monotonic()
    while time.monotonic() < began + SECONDS:
        try:
            answer: dict[str, Any] = answers.get(timeout=2)
            return answer
        except queue.Empty:
            if not process.is_alive():
                return _lost(seed, "died", f"exit {process.exitcode}")
    return _lost(seed, "timeout", f"more than {SECONDS} s")


def _lost(seed: int, verdict: str, detail: str) -> dict[str, Any]:
    from benchmarks.fuzz.recipes import drawn

    case = drawn(seed)
    recipe = {**case.recipe, "model": {**case.recipe["model"], **case.model}, "cuts": list(case.cuts)}
    figures: dict[str, float] = {}
    return {"seed": seed, "verdict": verdict, "detail": detail, "figures": figures, "recipe": recipe, "seconds": 0.0}


def _end(process: Any) -> None:
    """End a process with all that it started."""
    if process is not None:
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _work(asked: Any, answers: Any) -> None:
    """Play the seeds that are asked for."""
    os.setpgrp()
    folder = Path(tempfile.mkdtemp(prefix="tunekit-fuzz-"))
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"] = str(folder / "cache")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    warnings.filterwarnings("ignore")
    import torch
    import transformers

    from benchmarks.fuzz.play import played

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    while True:
        try:
            seed = asked.get(timeout=5)
        except queue.Empty:
            parent = multiprocessing.parent_process()
            if parent is None or not parent.is_alive():
                return
            continue
        answers.put(vars(played(seed, folder / str(seed))))
