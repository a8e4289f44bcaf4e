"""Runs of two processes in which one stands still, is gone, or loses what makes its rows: what ends them, and how.

Each process has a few seconds to move here, where users' have minutes, but only once it went wrong: until then a busy
machine may take its time. That a run ends at all shows what ended it, since what stands still never goes on.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.processes import PRELOADED, own_port
from tests.tiny import save_chats, save_tiny_model
from tests.waiting import LIMIT_SECONDS, until
from tunekit.api import verbs
from tunekit.errors import DataWorkerError, ExchangeError, RunError, StandstillError
from tunekit.launching.local import supervise
from tunekit.process import watchdog
from tunekit.process.watchdog import Beat, Pulse, Sight, limit_of
from tunekit.runs.record import Record, errors_of
from tunekit.runs.run import Run
from tunekit.runs.small_files import place_of
from tunekit.training import build_trainer, train, worker

TIMEOUT_SECONDS = 5

WRONG = "gone-wrong"
"""File of a run folder that is there once it has."""

LIMIT = range(TIMEOUT_SECONDS, int(LIMIT_SECONDS))
"""How long a process has stood by its own count that sees that it stood too long, and not by the limit before."""

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
    while True:
        time.sleep(LIMIT_SECONDS)


def in_forward(fault):
    """Something that happens to rank 1 in the forward pass of a step."""

    def change(trainer, wrong):
        compute = trainer.compute_loss

        def faulty(*args, **kwargs):
            if place_of().rank == 1 and trainer.state.global_step == FAULT_STEP - 1:
                wrong.touch()
                fault()
            return compute(*args, **kwargs)

        trainer.compute_loss = faulty

    return change


def in_row(fault):
    """Something that happens to the process that makes rank 1's rows."""

    def change(trainer, wrong):
        collate, calls = trainer.data_collator, []

        def faulty(rows):
            calls.append(1)
            if place_of().rank == 1 and len(calls) > 10:
                assert torch.utils.data.get_worker_info() is not None
                wrong.touch()
                fault()
            return collate(rows)

        trainer.data_collator = faulty

    return change


def fail_slowly():
    """An error that the others would be heard of first, if those who see a peer leave were believed first."""
    write = Record.write_error

    def write_late(self, error):
        until((self.run.path / "errors" / "rank-0.json").exists)
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
    build = build_trainer.build_trainer

    def build_faulty(*args, **kwargs):
        trainer = build(*args, **kwargs)
        FAULTS[fault](trainer, Path(folder) / WRONG)
        return trainer

    limit = watchdog.limit_of
    watchdog.limit_of = lambda *args: limit(*args) if (Path(folder) / WRONG).exists() else LIMIT_SECONDS
    build_trainer.build_trainer = build_faulty
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
        context.set_forkserver_preload(PRELOADED)
        shared = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": own_port()}
        self.all = []
        for rank in range(2):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1, **shared}
            self.all.append(context.Process(target=work_with, args=(fault, folder, environment)))
            self.all[-1].start()

    def codes(self):
        return {rank: process.exitcode for rank, process in enumerate(self.all)}

    def wait(self, seconds):
        ends = time.monotonic() + seconds
        for process in self.all:
            process.join(max(0.0, ends - time.monotonic()))


def end_of(name, fault, *, num_workers=0):
    """The error with which a run with a fault ends, and the run."""
    run = verbs.make_run("double.yaml", [f"output.name={name}"])
    path = run.path.resolve()
    plan = path / "plan.yaml"
    words = plan.read_text(encoding="utf-8")
    assert f"timeout_seconds: {TIMEOUT_SECONDS}\n" in words
    plan.write_text(
        re.sub("dataloader_num_workers: .*", f"dataloader_num_workers: {num_workers}", words), encoding="utf-8"
    )

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
        supervise(Run(path), start, None)
    return caught.value, Run(path)


def stacks_of(run, rank):
    return (run.path / "stacks" / f"rank-{rank}.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_with_the_place_and_the_stacks_of_all(here):
    error, run = end_of("sleep", "sleep")
    assert isinstance(error, StandstillError)
    found = re.fullmatch(rf"rank 1 made no progress for (\d+) s, in forward of step {FAULT_STEP}", error.problem)
    assert int(found[1]) in LIMIT
    assert str(run.path / "stacks") in error.hint
    assert "stand_still_here" in stacks_of(run, 1)
    assert "stand_still_here" not in stacks_of(run, 0) and "torch" in stacks_of(run, 0)
    assert run.state == "failed" and "rank 1 made no progress" in run.status()["exit_reason"]


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_by_those_that_wait_for_it(here):
    error, run = end_of("stop", "stop")
    assert isinstance(error, StandstillError)
    found = re.fullmatch(
        r"rank 1 \(process \d+ on .*\) stopped sending heartbeats, last (in|waiting for) .*"
        rf"; rank 0 waited (?P<seconds>\d+) s for it, in forward of step {FAULT_STEP}",
        error.problem,
    )
    assert int(found["seconds"]) in LIMIT
    assert "_sync_buffers" in stacks_of(run, 0), "which is where it waits"


def test_a_rank_that_ends_without_a_word_is_named_and_not_those_that_lost_it(here):
    error, run = end_of("leave", "leave")
    assert error.problem == "rank 1 exited with code 0 without an error message"
    told = json.loads((run.path / "errors" / "rank-0.json").read_text())
    assert told["kind"] == "ExchangeError"
    assert "waited" not in told["problem"], "it sees that the other is gone before its own limit"


@pytest.mark.slow
def test_the_first_error_is_shown_though_those_that_it_hit_were_heard_of_first(here, monkeypatch):
    # Both end by themselves.
    monkeypatch.setattr("tunekit.launching.local.SETTLE_SECONDS", LIMIT_SECONDS)
    error, run = end_of("slow", "slow error")
    first, later = (json.loads((run.path / "errors" / f"rank-{rank}.json").read_text())["time"] for rank in (0, 1))
    assert first < later
    assert "rank 1:\nTraceback" in str(error) and "what went wrong first" in str(error)


@pytest.mark.slow
def test_a_killed_process_that_makes_rows_is_told_without_a_traceback(here):
    error, _ = end_of("row-kill", "row kill", num_workers=1)
    assert isinstance(error, DataWorkerError)
    assert re.search(r"data worker \d+ of rank 1 was killed by a signal \(Killed\)", str(error))
    assert "host memory" in error.hint


@pytest.mark.slow
def test_a_killed_process_that_makes_rows_is_told_also_where_its_signal_comes_with_another_error(here, monkeypatch):
    def lose_the_others(*_):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer")

    def hear_of_the_child(*_):
        raise RuntimeError("DataLoader worker (pid 1355) is killed by signal: Killed. ")

    monkeypatch.setattr(train, "load_train_save", lose_the_others)
    monkeypatch.setattr("tunekit.process.watchdog.exchange_problem", hear_of_the_child)
    with pytest.raises(DataWorkerError, match="data worker 1355 of rank 0 was killed"):
        worker.work(verbs.make_run("double.yaml", ["output.name=both", "parallel={}"]))


def say_it_is_killed(*_):
    raise RuntimeError("DataLoader worker (pid 1355) is killed by signal: Killed. ")


@pytest.mark.slow
def test_a_lost_data_worker_is_named_where_its_connection_breaks_before_its_signal(here, monkeypatch):
    def break_the_connection(*_):
        signal.signal(signal.SIGCHLD, say_it_is_killed)
        subprocess.Popen(["sleep", "0.1"])
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(train, "load_train_save", break_the_connection)
    before = signal.getsignal(signal.SIGCHLD)
    try:
        with pytest.raises(DataWorkerError, match="data worker 1355 of rank 0 was killed"):
            worker.work(verbs.make_run("double.yaml", ["output.name=late", "parallel={}"]))
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow
def test_a_lost_data_worker_is_named_where_its_signal_comes_when_the_watchdog_ends(here, monkeypatch):
    def fail(*_):
        raise ValueError("something else")

    def end_late(*args):
        end(*args)
        say_it_is_killed()

    end = watchdog.Watchdog.__exit__
    monkeypatch.setattr(train, "load_train_save", fail)
    monkeypatch.setattr(watchdog.Watchdog, "__exit__", end_late)
    with pytest.raises(DataWorkerError, match="data worker 1355 of rank 0 was killed"):
        worker.work(verbs.make_run("double.yaml", ["output.name=later", "parallel={}"]))


@pytest.mark.slow
def test_a_process_that_makes_no_rows_any_more_is_told_with_its_stack(here):
    error, run = end_of("row-sleep", "row sleep", num_workers=1)
    assert isinstance(error, StandstillError)
    found = re.fullmatch(r"rank 1 made no progress for (\d+) s, waiting for data of step \d+", error.problem)
    assert int(found[1]) in LIMIT
    assert "stand_still_here" in stacks_of(run, 1), "that of the process that makes them"


def beat(rank, at="forward", step=7, *, marks=2, moves=0, host="here"):
    """What a process says of itself."""
    return Beat(rank, 100 + rank, "id", host, 0.0, step, at, 0.0, marks=marks, moves=moves, is_warm=True)


@pytest.mark.parametrize(
    ("mine", "others", "seen", "kind", "words"),
    [
        (beat(0), [beat(1)], {}, StandstillError, "rank 0 made no progress for 60 s, in forward of step 7"),
        (
            beat(0, "backward", marks=3),
            [beat(1), beat(2, "backward", marks=3)],
            {"waits": True},
            ExchangeError,
            "rank 0 waited 60 s, in backward of step 7, for rank 1, which was stuck in forward of step 7",
        ),
        (
            beat(1, "data", marks=1),
            [beat(0, "forward")],
            {},
            StandstillError,
            "rank 1 made no progress for 60 s, waiting for data of step 7",
        ),
        (
            beat(0),
            [beat(1)],
            {"waits": True},
            ExchangeError,
            "rank 0 waited 60 s, in forward of step 7, for the other processes",
        ),
        (
            beat(0),
            [beat(1, "data", step=6)],
            {"silent": [1]},
            StandstillError,
            "rank 1 (process 101 on here) stopped sending heartbeats, last waiting for data of step 6; "
            "rank 0 waited 60 s for it, in forward of step 7",
        ),
        (
            beat(0, "saving"),
            [],
            {"num_processes": 3},
            ExchangeError,
            "rank 0 waited 60 s, in saving of step 7, for ranks 1, 2, which had exited",
        ),
    ],
)
def test_who_is_behind_hangs_and_who_is_before_waits(mine, others, seen, kind, words):
    defaults = {"waits": False, "silent": [], "moving": [], "num_processes": 1 + len(others)}
    error = Sight(mine, others=others, **(defaults | seen)).verdict(60.0, Path("stacks"))
    assert (type(error), error.problem) == (kind, words)


def test_who_waits_for_one_that_moves_is_patient_and_who_is_waited_for_is_not():
    behind, ahead = beat(1, "generation", marks=1, moves=3), beat(0, "forward", marks=2)
    seen = {"waits": True, "silent": [], "num_processes": 2}
    assert Sight(ahead, others=[behind], moving=[1], **seen).is_patient
    assert not Sight(ahead, others=[behind], moving=[], **seen).is_patient
    assert not Sight(behind, others=[ahead], moving=[0], **seen).is_patient
    # Answers differ in length: who has made more tokens is not further.
    assert beat(0, "generation", moves=9).position == beat(1, "generation", moves=2).position


def test_only_a_warm_step_has_the_short_limit(here):
    plan = verbs.make_run("double.yaml", ["output.name=limits"]).plan
    assert (plan.timeout_seconds, plan.patience_seconds) == (5, 600)
    warm = {at: limit_of(plan, beat(0, at)) for at in ("data", "backward", "evaluation", "saving", "generation")}
    assert warm == {"data": 5, "backward": 5, "evaluation": 5, "saving": 600, "generation": 600}
    assert limit_of(plan, dataclasses.replace(beat(0, "forward"), is_warm=False)) == 600


def test_a_supervisor_hears_that_one_of_its_processes_gives_no_sign(here, monkeypatch):
    """Nobody else is left to see it where all stand still. The clock is moved, and not waited for."""
    run, clock = verbs.make_run("double.yaml", ["output.name=pulse"]), [1000.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    (run.path / "ranks").mkdir()
    pulse = Pulse(run)
    file = run.path / "ranks" / "rank-1.json"

    def wait(seconds, *, beats):
        found = []
        for second in range(seconds):
            clock[0] += 1
            if beats:
                file.write_text(json.dumps(dataclasses.asdict(beat(1))), encoding="utf-8")
                os.utime(file, (second, second))
            found += pulse.silent([0, 1])
        return found

    assert wait(300, beats=True) == []
    assert wait(64, beats=False) == [], "5 s and a minute more"
    clock[0] += 10_000
    assert pulse.silent([0, 1]) == [beat(1)], "what it slept itself counts as a second or two"
    pulse.tell([beat(1)])
    (told,) = errors_of(run)
    assert told["rank"] == 1 and told["kind"] == "StandstillError"
    assert re.search(r"stopped sending heartbeats, .*; silent for \d\d s$", told["problem"])
    assert pulse.silent([0]) == [], "one that has ended is not waited for"
