"""Runs that are stopped, by signals to one of their processes or to all, once or twice, and by `tunekit stop`.

What a stopped run has when it is gone on with is compared with a run that nothing happened to.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch

from tests.processes import PRELOADED, own_port
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.folders import made_run
from tests.waiting import LIMIT_SECONDS, is_gone, until
from tunekit.api import verbs
from tunekit.errors import RunError, Stopped
from tunekit.launching.remaining import Remaining
from tunekit.process.watchdog import Beat, beats_of
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.run import Run
from tunekit.runs.small_files import EXIT_CODES, forget_request, identity_of, place_of, request, requested
from tunekit.training.worker import work

NUM_STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stop")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    return folder


def made(folder, *, num=1, grace_seconds=LIMIT_SECONDS, **train):
    """A run that is yet to be started, which has all the time to end that there is, unless that is the subject."""
    recipe = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64, **train.pop("data", {})},
        "adapter": {"type": "lora", "dropout": 0.1},
        "train": {"max_steps": NUM_STEPS, "global_batch_size": 4, "learning_rate": 1e-3, "save_steps": 1000, **train},
        "parallel": {"num_processes": num, "grace_seconds": grace_seconds},
        "output": {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())},
    }
    return verbs.make_run(recipe)


def test_who_asks_once_more_takes_nothing_back(tmp_path):
    run = made_run(tmp_path / "run", phase="training")
    request(run.path, now=True, by="SIGTERM", grace_seconds=30)
    request(run.path, now=False)
    asked = requested(run.path)
    assert (asked.now, asked.by, asked.grace_seconds) == (True, "SIGTERM", 30)


class Held:
    """What holds a run up in its processes until the test lets it go on.

    Args:
        places: Where, from which step on: `step`, `evaluation` and `save` after so many steps, `loading` after none.
        rank: Only there.
    """

    def __init__(self, places, rank=None):
        self.places, self.rank = places, rank

    def apply(self):
        for place, num_steps in self.places.items():
            self._hold(place, num_steps)

    def _hold(self, place, num_steps):
        from tunekit.training import build_trainer
        from tunekit.training.callbacks import Boundary
        from tunekit.training.checkpointing.save import Saver

        owner, name, steps_taken = {
            "step": (Boundary, "on_step_begin", lambda args: args[2].global_step),
            "evaluation": (Boundary, "on_prediction_step", lambda args: args[2].global_step),
            "save": (Saver, "_begin", lambda args: args[1].step),
            "loading": (build_trainer, "load_adapted", lambda args: 0),
        }[place]
        original = getattr(owner, name)

        def held(*args, **kwargs):
            if self.rank in (None, place_of().rank) and steps_taken(args) >= num_steps:
                marks = Path(os.environ["MARKS"])
                (marks / f"{place}-{place_of().rank}").touch()
                until((marks / f"{place}-goes-on").exists)
            return original(*args, **kwargs)

        setattr(owner, name, held)


def _work(environment, path, held, same_seconds):
    import tunekit.process.signals

    os.environ.update(environment)
    # A program in the background of a script is started to ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if held is not None:
        held.apply()
    if same_seconds is not None:
        tunekit.process.signals.SAME_SECONDS = same_seconds
    run, place = Run(path), place_of()
    if place.is_main:
        forget_request(run.path)
        run.begin()
    try:
        work(run, place=place)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
    except RunError:
        sys.exit(2)


class Working:
    """The processes of a run that no supervisor has, as a scheduler starts them.

    Args:
        run: The run.
        tmp_path: A folder for what processes and test say to each other.
        num: How many there are.
        held: What holds them up.
        same_seconds: Within which time two SIGTERM are one wish, where it is not the usual one.
    """

    def __init__(self, run, tmp_path, num=1, held=None, same_seconds=None):
        self.run = run
        self.marks = tmp_path / os.urandom(4).hex()
        self.marks.mkdir()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": own_port(), "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num}
        self.processes = []
        for rank in range(num):
            place = {**shared, "RANK": rank, "LOCAL_RANK": rank} if num > 1 else {}
            environment = {name: str(value) for name, value in (place | {"MARKS": self.marks}).items()}
            process = context.Process(target=_work, args=(environment, run.path, held, same_seconds))
            process.start()
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def wait_until(self, holds):
        def look():
            there = holds()
            assert there or all(process.is_alive() for process in self.processes), self._words()
            return there

        until(look, self._words)

    def wait_until_held(self, place, num=None):
        """Until all processes are held up there, or so many."""
        num = len(self.processes) if num is None else num
        self.wait_until(lambda: len(list(self.marks.glob(f"{place}-[0-9]"))) == num)

    def go_on(self, place):
        (self.marks / f"{place}-goes-on").touch()

    def _words(self):
        log = self.run.path / "log.txt"
        codes = [process.exitcode for process in self.processes]
        return codes, self.run.status(), log.read_text()[-3000:] if log.exists() else ""

    def send(self, sign, *ranks):
        for rank in ranks:
            os.kill(self.processes[rank].pid, sign)

    def codes(self):
        """Exit codes, once all have ended by themselves."""
        for process in self.processes:
            process.join(LIMIT_SECONDS)
        return [process.exitcode for process in self.processes]


def resumed(run, tmp_path, num=1):
    with Working(run, tmp_path, num) as working:
        assert working.codes() == [0] * num
    assert run.state == "finished"


def events(run, kind):
    return [event for event in run.events() if event["event"] == kind]


@pytest.fixture(scope="module")
def calm(folder, tmp_path_factory):
    """Results of runs that nothing happens to, by the number of their processes."""
    runs = {}

    def result(num=1, **train):
        key = num, str(train)
        if key not in runs:
            runs[key] = made(folder, num=num, **train)
            resumed(runs[key], tmp_path_factory.mktemp("calm"), num)
        return saved_weights(runs[key].model_path)

    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "sign", "ranks"),
    [(1, signal.SIGINT, (0,)), (1, signal.SIGHUP, (0,)), (2, signal.SIGTERM, (1,)), (2, signal.SIGUSR1, (0, 1))],
    ids=["Ctrl-C", "SIGHUP", "SIGTERM to one", "SIGUSR1 to all"],
)
def test_a_signal_ends_all_after_a_step_with_a_checkpoint_that_is_gone_on_from_exactly(
    num, sign, ranks, folder, tmp_path, calm
):
    run = made(folder, num=num)
    with Working(run, tmp_path, num, Held({"step": 3})) as working:
        working.wait_until_held("step")
        working.send(sign, *ranks)
        working.go_on("step")
        codes = working.codes()
    step = newest_complete(run.path).step
    assert 3 <= step < NUM_STEPS and run.status()["step"] == step
    assert codes == [EXIT_CODES.get(sign.name, 0)] * num
    who = "the user" if sign == signal.SIGINT else sign.name
    reason = f"stopped by {who} at step {step}, checkpoint of step {step}"
    assert (run.state, run.status()["exit_reason"]) == ("interrupted", reason)
    assert [event["now"] for event in events(run, "stop")] == [False]
    resumed(run, tmp_path, num)
    torch.testing.assert_close(saved_weights(run.model_path), calm(num), rtol=0, atol=0)


@pytest.mark.slow
def test_two_signals_that_are_one_wish_save_and_the_second_wish_does_not(folder, tmp_path):
    """A scheduler tells all processes, and the launcher hands it on to them: that is one SIGTERM, not two."""
    once, twice = made(folder, num=2), made(folder, num=2)
    with Working(once, tmp_path, 2, Held({"step": 1}), same_seconds=LIMIT_SECONDS) as working:
        working.wait_until_held("step")
        working.send(signal.SIGTERM, 0, 1, 0, 1)
        working.go_on("step")
        assert working.codes() == [143, 143]
    assert once.status()["exit_reason"].endswith("checkpoint of step 2")
    with Working(twice, tmp_path, 2, Held({"step": 1, "save": 1}), same_seconds=0) as working:
        working.wait_until_held("step")
        working.send(signal.SIGTERM, 0, 1)
        working.go_on("step")
        working.wait_until_held("save", num=1)
        # The save never goes on.
        working.send(signal.SIGTERM, 1)
        assert working.codes() == [143, 143]
    assert newest_complete(twice.path).step == 0
    assert twice.state == "interrupted" and twice.status()["exit_reason"].endswith("no checkpoint")


@pytest.mark.slow
def test_an_evaluation_is_left_between_two_batches_with_the_checkpoint_of_its_step(folder, tmp_path, calm):
    data = {"eval": str(folder / "rows.jsonl")}
    run = made(folder, num=2, eval_steps=3, data=data)
    with Working(run, tmp_path, 2, Held({"evaluation": 3})) as working:
        working.wait_until_held("evaluation")
        working.send(signal.SIGTERM, 1)
        working.go_on("evaluation")
        assert working.codes() == [143, 143]
    assert run.status()["exit_reason"] == "stopped by SIGTERM at step 3, checkpoint of step 3"
    assert [event["step"] for event in events(run, "eval")] == [0]
    resumed(run, tmp_path, 2)
    assert [event["step"] for event in events(run, "eval")][:3] == [0, 3, 6]
    torch.testing.assert_close(saved_weights(run.model_path), calm(2), rtol=0, atol=0)


@pytest.mark.slow
def test_what_has_no_steps_ends_at_once(folder, tmp_path):
    run = made(folder, num=2)
    with Working(run, tmp_path, 2, Held({"loading": 0})) as working:
        working.wait_until_held("loading")
        # It never goes on.
        working.send(signal.SIGTERM, 0)
        assert working.codes() == [143, 143]
    assert run.state == "interrupted" and run.status()["exit_reason"] == "stopped by SIGTERM at step 0, no checkpoint"


@pytest.mark.slow
def test_a_step_that_takes_longer_than_the_grace_is_not_waited_for(folder, tmp_path):
    """The others wait for a rank that never goes on, in an exchange that Python's signals do not reach."""
    run = made(folder, num=2, grace_seconds=6.0, save_steps=2)
    with Working(run, tmp_path, 2, Held({"step": 1}, rank=1)) as working:
        working.wait_until_held("step", num=1)
        exchanges = (2, "forward"), (2, "backward")
        working.wait_until(lambda: any((beat.step, beat.at) in exchanges for beat in beats_of(run) if beat.rank == 0))
        working.send(signal.SIGTERM, 0, 1)
        assert working.codes() == [143, 143]
    assert run.state == "interrupted"
    assert "no checkpoint" in run.status()["exit_reason"]


@pytest.mark.slow
def test_nothing_is_left_where_the_process_that_trains_is_killed(folder):
    """Neither the processes that make its micro-batches, which go on where a terminal or a scheduler tells all."""
    run = made(folder, max_steps=100_000)
    plan = run.path / "plan.yaml"
    plan.write_text(plan.read_text().replace("dataloader_num_workers: 0", "dataloader_num_workers: 2"))
    assert run.plan.dataloader_num_workers == 2
    with subprocess.Popen([sys.executable, "-m", "tunekit.launching.local", str(run.path)]) as parent:
        try:
            _wait_for_step(run, 1)
            children = psutil.Process(parent.pid).children(recursive=True)
            assert len(children) >= 2
            for child in children:
                child.send_signal(signal.SIGINT)
            _wait_for_step(run, run.status()["step"] + 50)
        finally:
            parent.kill()
    until(lambda: all(is_gone(child) for child in children))
    assert run.state == "died"


def _wait_for_step(run, step):
    until(lambda: run.status()["step"] >= step, run.status)


@pytest.mark.slow
def test_tunekit_stop_comes_back_when_nothing_is_left(folder, tmp_path, monkeypatch):
    run, told = made(folder, num=2), []
    # However long the checkpoint takes here, that is waited for, and what it waits for is told once.
    monkeypatch.setattr("tunekit.launching.stop.LEAST_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr("tunekit.launching.stop.TELL_SECONDS", LIMIT_SECONDS)
    with Working(run, tmp_path, 2, Held({"step": 2})) as working:
        working.wait_until_held("step")

        def go_on_when_it_is_heard(words):
            told.append(words)
            working.wait_until(lambda: events(run, "stop"))
            working.go_on("step")

        words = verbs.stop(run.path, on_wait=go_on_when_it_is_heard)
        # The first is a program that may go on with something else.
        assert identity_of(working.processes[1].pid) is None
        assert working.codes() == [0, 0]
    step = newest_complete(run.path).step
    assert words == f"{run.name} was interrupted: stopped by `tunekit stop` at step {step}, checkpoint of step {step}"
    assert told == [f"stopping {run.name} after its step, within {told[0].split()[-2]} s"]
    assert verbs.stop(run.path) == (
        f"{run.name} is not running: it was interrupted, stopped by `tunekit stop` at step {step}, "
        f"checkpoint of step {step}"
    )


@pytest.mark.parametrize(("module", "is_waited_for"), [("tunekit", True), ("ipykernel_launcher", False)])
def test_a_stop_waits_for_the_program_that_trained_unless_it_may_go_on_with_something_else(
    module, is_waited_for, tmp_path, monkeypatch
):
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: [sys.executable, "-m", module, "train"])
    own = {"pid": os.getpid(), "identity": identity_of(os.getpid()), "host": os.uname().nodename}
    run = made_run(tmp_path / "run", phase="training", **own)
    remaining = Remaining(run)
    assert remaining.look()
    run.update_status(phase="interrupted")
    assert remaining.look() == is_waited_for


@pytest.mark.slow
def test_a_process_that_does_not_react_is_named_and_killed(folder, tmp_path, monkeypatch):
    run, told = made(folder), []
    monkeypatch.setattr("tunekit.launching.stop.LEAST_SECONDS", 1)
    monkeypatch.setattr("tunekit.launching.stop.NOW_SECONDS", 2)
    with Working(run, tmp_path, 1, Held({"step": 1})) as working:
        working.wait_until_held("step")
        working.send(signal.SIGSTOP, 0)
        with pytest.raises(RunError, match=r"did not stop within \d+ s: rank 0 in \w+ of step \d+ for .*--now"):
            verbs.stop(run)
        assert requested(run.path) is not None and not requested(run.path).now

        def give_it_time_to_be_killed(words):
            told.append(words)
            monkeypatch.setattr("tunekit.launching.stop.NOW_SECONDS", LIMIT_SECONDS)

        words = verbs.stop(run, now=True, on_wait=give_it_time_to_be_killed)
        assert working.codes() == [-signal.SIGKILL]
    assert words.startswith(f"{run.name} was interrupted: stopped by `tunekit stop` at step ")
    assert run.state == "interrupted"


@pytest.mark.slow
def test_a_number_that_another_process_has_by_now_is_not_taken_for_the_run(folder, tmp_path):
    """What is asked for is the process that the folder names, and it has ended."""
    run = made(folder)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        run.update_status(phase="training", pid=stranger.pid, identity="another boot-1")
        assert run.state == "died"
        assert verbs.stop(run, now=True).endswith("is not running: it died")
        run.update_status(identity=identity_of(stranger.pid))
        assert run.state == "training"
        stranger.communicate(b"\n")
    assert run.state == "died"


def test_a_run_that_ends_while_it_is_looked_at_has_not_died(tmp_path, monkeypatch):
    run = made_run(tmp_path / "run", phase="training")

    def ends(pid, identity):
        run.update_status(phase="finished")
        return False

    with monkeypatch.context() as patch:
        patch.setattr("tunekit.runs.small_files.is_alive", ends)
        assert run.state == "finished"
    run.update_status(phase="training")
    monkeypatch.setattr("tunekit.runs.small_files.is_alive", lambda pid, identity: False)
    assert run.state == "died"


def test_a_run_on_another_host_has_died_when_it_gave_no_sign_for_long(folder, monkeypatch):
    run = made(folder)
    run.update_status(phase="training", host="elsewhere")
    assert run.state == "training"
    status, now = run.path / "status.json", time.time()
    # By the clock of the disk, which is stopped here.
    monkeypatch.setattr("tunekit.runs.small_files._now", lambda folder: now)
    os.utime(status, (now - 100, now - 100))
    assert run.state == "training"
    os.utime(status, (now - 130, now - 130))
    assert run.state == "died"
    # One of its processes still does.
    (run.path / "ranks").mkdir()
    beat = Beat(rank=1, pid=1, identity="it", host="elsewhere", time=now, step=1, at="forward", since=now)
    (run.path / "ranks" / "rank-1.json").write_text(json.dumps(asdict(beat)))
    assert run.state == "training"
