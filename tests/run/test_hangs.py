"""Runs of two processes in which one stands still, is gone, or loses what makes its rows: what ends them, and the words.

Each process has a few seconds to move here, where users' have minutes; what a test waits for is far longer.
"""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import time

import pytest
import torch

from tests.processes import PRELOADED, free_port
from tests.tiny import save_chats, save_tiny_model
from tunekit import api
from tunekit.errors import DataWorkerError, RunError, StandstillError
from tunekit.run import worker
from tunekit.run.launch import supervise
from tunekit.run.place import place_of
from tunekit.run.record import Record
from tunekit.run.run import Run

TIMEOUT_SECONDS = 5
BOUND_SECONDS = 90
"""Within which a run must be over that stands still: its timeout, two looks at the others, and a slow machine."""

FAULT_STEP = 3

RECIPE = """\
model: model
adapter: full
data: {train: rows.jsonl, max_length: 64}
train: {max_steps: 100000, global_batch_size: 4, micro_batch_size: 1, save_steps: 100000, logging_steps: 1}
parallel: {num_processes: 2, timeout_seconds: 5}
output: {sample_prompts: []}
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    (folder / "double.yaml").write_text(RECIPE, encoding="utf-8")
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


def stand_still_here():
    time.sleep(10_000)


def in_forward(fault):
    """Something that happens to rank 1 in the forward pass of a step."""

    def change(trainer):
        compute = trainer.compute_loss

        def faulty(*args, **kwargs):
            if place_of().rank == 1 and trainer.state.global_step == FAULT_STEP - 1:
                fault()
            return compute(*args, **kwargs)

        trainer.compute_loss = faulty

    return change


def in_row(fault):
    """Something that happens to the process that makes rank 1's rows."""

    def change(trainer):
        collate, calls = trainer.data_collator, []

        def faulty(rows):
            calls.append(1)
            if place_of().rank == 1 and len(calls) > 10:
                assert torch.utils.data.get_worker_info() is not None
                fault()
            return collate(rows)

        trainer.data_collator = faulty

    return change


def fail_slowly():
    """An error that the others would be heard of first, if those who see a peer leave were believed first."""
    write = Record.write_error

    def write_late(self, error):
        time.sleep(4)
        write(self, error)

    Record.write_error = write_late
    torch.distributed.destroy_process_group()
    raise ValueError("what went wrong first")


FAULTS = {
    "sleep": in_forward(stand_still_here),
    "stop": in_forward(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "leave": in_forward(lambda: os._exit(0)),
    "slow error": in_forward(fail_slowly),
    "row kill": in_row(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "row sleep": in_row(stand_still_here),
}


def work_with(fault, folder, environment):
    """What each process does."""
    os.environ.update({name: str(value) for name, value in environment.items()})
    build = worker.build_trainer

    def build_faulty(*args, **kwargs):
        trainer = build(*args, **kwargs)
        FAULTS[fault](trainer)
        return trainer

    worker.build_trainer = build_faulty
    # As in a process of a user's: this one was forked by a server, from which its own would be too.
    multiprocessing.set_start_method("fork", force=True)
    os.setsid()
    try:
        worker.work(Run(folder), place=place_of(), supervised=True)
    except RunError:
        os._exit(2)


class Forked:
    """Processes that a supervisor looks after, forked from one that has imported the libraries."""

    def __init__(self, fault, folder):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "tunekit.run.worker"])
        shared = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        self.all = []
        for rank in range(2):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1, **shared}
            self.all.append(context.Process(target=work_with, args=(fault, folder, environment)))
            self.all[-1].start()

    def codes(self):
        return {rank: process.exitcode for rank, process in enumerate(self.all)}

    def wait(self, seconds):
        until = time.monotonic() + seconds
        for process in self.all:
            process.join(max(0.0, until - time.monotonic()))


def end_of(name, fault, *, num_workers=0):
    """The error with which a run with a fault ends, the run, and how long it took from the fault to the end."""
    run = api.make_run("double.yaml", [f"output.name={name}"])
    path = run.path.resolve()
    plan = path / "plan.yaml"
    words = plan.read_text(encoding="utf-8")
    assert f"timeout_seconds: {TIMEOUT_SECONDS}\n" in words
    plan.write_text(
        re.sub("dataloader_num_workers: .*", f"dataloader_num_workers: {num_workers}", words), encoding="utf-8"
    )
    last = []

    @contextlib.contextmanager
    def start():
        processes = Forked(fault, path)
        try:
            yield processes
        finally:
            for process in processes.all:
                process.kill()
                process.join()

    with pytest.raises((RunError, RuntimeError)) as caught:
        supervise(Run(path), start, lambda event: last.append(time.monotonic()))
    return caught.value, Run(path), time.monotonic() - [0.0, *last][-4]


def stacks_of(run, rank):
    return (run.path / "stacks" / f"rank-{rank}.txt").read_text(encoding="utf-8")


def test_a_rank_that_stands_still_is_named_with_the_place_and_the_stacks_of_all(here):
    error, run, seconds = end_of("sleep", "sleep")
    assert isinstance(error, StandstillError)
    assert re.fullmatch(rf"rank 1 stood still for \d+ s, in forward of step {FAULT_STEP}", error.problem)
    assert str(run.path / "stacks") in error.hint
    assert "stand_still_here" in stacks_of(run, 1)
    assert "stand_still_here" not in stacks_of(run, 0) and "torch" in stacks_of(run, 0)
    assert seconds < BOUND_SECONDS
    assert run.state == "failed" and "rank 1 stood still" in run.status()["exit_reason"]


def test_a_rank_that_is_stopped_is_named_by_those_that_wait_for_it(here):
    error, run, seconds = end_of("stop", "stop")
    assert isinstance(error, StandstillError)
    assert re.fullmatch(
        r"rank 1 \(process \d+ on .*\) gives no sign of life, last heard of in .*"
        rf"; rank 0 waited for it \d+ s, in forward of step {FAULT_STEP}",
        error.problem,
    )
    assert "_sync_buffers" in stacks_of(run, 0), "which is where it waits"
    assert seconds < BOUND_SECONDS


def test_a_rank_that_ends_without_a_word_is_named_and_not_those_that_lost_it(here):
    error, run, seconds = end_of("leave", "leave")
    assert error.problem == "rank 1 ended with exit code 0 and no word of why"
    assert seconds < BOUND_SECONDS
    assert json.loads((run.path / "errors" / "rank-0.json").read_text())["kind"] == "ExchangeError"


def test_the_first_error_is_shown_though_those_that_it_hit_were_heard_of_first(here):
    error, run, _ = end_of("slow", "slow error")
    assert "rank 1:\nTraceback" in str(error) and "what went wrong first" in str(error)


def test_a_killed_process_that_makes_rows_is_told_without_a_traceback(here):
    error, run, seconds = end_of("row-kill", "row kill", num_workers=1)
    assert isinstance(error, DataWorkerError)
    assert re.search(r"process \d+, which makes micro-batches for rank 1, was ended by a signal \(Killed\)", str(error))
    assert "main memory" in error.hint
    assert seconds < BOUND_SECONDS


def test_a_process_that_makes_no_rows_any_more_is_told_with_its_stack(here):
    error, run, seconds = end_of("row-sleep", "row sleep", num_workers=1)
    assert isinstance(error, StandstillError)
    assert re.fullmatch(r"rank 1 stood still for \d+ s, waiting for the rows of step \d+", error.problem)
    assert "stand_still_here" in stacks_of(run, 1), "that of the process that makes them"
    assert seconds < BOUND_SECONDS
