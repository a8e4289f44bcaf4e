"""What a run of several processes reports: real groups of them, beside what can be counted without them."""

import subprocess
import sys
from statistics import mean

import pytest
import torch

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model
from tunekit.api import make_run
from tunekit.planner.facts import Figures
from tunekit.run.callback import rates
from tunekit.run.place import place_of
from tunekit.run.run import Run
from tunekit.run.timing import WINDOW_STEPS, slow_ranks
from tunekit.run.worker import work

ROWS = [("say " * (1 + n % 7), f"{n}") for n in range(24)]

STOP_AND_GO = """
import os, signal, sys, time
while os.getppid() == int(sys.argv[1]):
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.03)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.01)
"""
"""Lets its parent run for a quarter of the time, as a device that is too hot or shared with another."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ROWS)
    return folder


def run_for(workspace, folder, *, num=2, strategy="auto", **train):
    recipe = {
        "model": str(workspace / "model"),
        "data": {"train": str(workspace / "rows.jsonl"), "max_length": 64, "shuffle": False},
        "adapter": "full",
        "train": {"max_steps": 5, "global_batch_size": 4, "logging_steps": 2, **train},
        "parallel": {"num_processes": num, "strategy": strategy},
        "output": {"dir": str(folder), "sample_prompts": []},
    }
    return make_run(recipe)


def work_on(folder):
    work(Run(folder), place=place_of())


def work_slowly_as_rank_1(folder):
    """Train; the second process is stopped again and again."""
    place = place_of()
    if place.rank != 1:
        work(Run(folder), place=place)
        return
    import os

    with subprocess.Popen([sys.executable, "-c", STOP_AND_GO, str(os.getpid())]) as brake:
        try:
            work(Run(folder), place=place)
        finally:
            brake.kill()


def tokens_of(question, answer):
    """Of a row in tests/tiny.py's template: a token each for a byte and for the two marks around a turn."""
    return sum(1 + len(role) + 1 + len(text) + 1 + 1 for role, text in (("user", question), ("assistant", answer)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_speed_is_that_of_all_ranks_and_each_has_its_report(strategy, workspace, tmp_path):
    run = run_for(workspace, tmp_path / "run", strategy=strategy)
    in_processes(2, work_on, str(run.path))
    result = run.result()
    # Five steps of four rows, and the last step behind the last one that was logged.
    assert result["num_tokens"] == sum(tokens_of(*row) for row in ROWS[:20])
    print(result)
