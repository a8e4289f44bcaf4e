"""Runs that are stopped, by signals to one of their processes or to all, once or twice, and by `tunekit stop`.

What a stopped run has when it is gone on with is compared with a run that nothing happened to.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.processes import PRELOADED, free_port
from tests.tiny import save_chats, save_tiny_model
from tunekit import api
from tunekit.errors import RunError, Stopped
from tunekit.run.alive import identity_of
from tunekit.run.checkpoint import newest_complete
from tunekit.run.place import place_of
from tunekit.run.run import Run
from tunekit.run.stop import EXIT_CODES, forget_request, requested
from tunekit.run.worker import work

NUM_STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stop")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    return folder


def made(folder, *, num=1, grace_seconds=30.0, **train):
    """A run that is yet to be started."""
    recipe = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64, **train.pop("data", {})},
        "adapter": {"type": "lora", "dropout": 0.1},
        "train": {"max_steps": NUM_STEPS, "global_batch_size": 4, "learning_rate": 1e-3, "save_steps": 1000, **train},
        "parallel": {"num_processes": num, "grace_seconds": grace_seconds},
        "output": {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())},
    }
    return api.make_run(recipe)


class Slow:
    """What holds a run up in its processes, where a test wants it to be.

    Args:
        where: Name of what is slow: `step`, `evaluation`, `save` or `loading`.
        seconds: How long each takes.
        rank: Only there.
    """

    def __init__(self, where, seconds, rank=None):
        self.where, self.seconds, self.rank = where, seconds, rank

    def apply(self):
        import tunekit.run.worker
        from tunekit.run.boundary import Boundary
        from tunekit.run.saving import Saver

        owner, name = {
            "step": (Boundary, "on_step_begin"),
            "evaluation": (Boundary, "on_prediction_step"),
            "save": (Saver, "_begin"),
            "loading": (tunekit.run.worker, "load_adapted"),
        }[self.where]
        original = getattr(owner, name)

        def slow(*args, **kwargs):
            if self.rank in (None, place_of().rank):
                (there := folder_of_marks() / f"{self.where}-{os.getpid()}").touch()
                until = time.monotonic() + self.seconds
                while time.monotonic() < until:
                    time.sleep(0.01)
                there.unlink(missing_ok=True)
            return original(*args, **kwargs)

        setattr(owner, name, slow)


def folder_of_marks():
    from pathlib import Path

    return Path(os.environ["MARKS"])


def _work(environment, path, slow):
    os.environ.update(environment)
    # A program in the background of a script is started to ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if slow is not None:
        slow.apply()
    run, place = Run(path), place_of()
    if place.is_main:
        forget_request(run)
        run.begin()
    try:
        work(run, place=place)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
    except RunError:
        sys.exit(2)


class Working:
    """The processes of a run that no supervisor has, as a scheduler starts them."""

    def __init__(self, run, tmp_path, num=1, slow=None):
        self.run, self.marks = run, tmp_path
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num}
        self.processes = []
        for rank in range(num):
            place = {**shared, "RANK": rank, "LOCAL_RANK": rank} if num > 1 else {}
            environment = {name: str(value) for name, value in (place | {"MARKS": tmp_path}).items()}
            process = context.Process(target=_work, args=(environment, run.path, slow))
            process.start()
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def wait_until(self, holds, seconds=120):
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until, (self.run.status(), (self.run.path / "log.txt").read_text()[-2000:])
            assert all(process.is_alive() for process in self.processes), (
                [process.exitcode for process in self.processes],
                (self.run.path / "log.txt").read_text()[-3000:],
            )
            time.sleep(0.02)

    def wait_for_step(self, step):
        self.wait_until(lambda: self.run.status()["step"] >= step)

    def wait_for_mark(self, name):
        self.wait_until(lambda: any(self.marks.glob(f"{name}-*")))

    def send(self, sign, *ranks):
        for rank in ranks:
            os.kill(self.processes[rank].pid, sign)

    def codes(self, seconds=60):
        """Exit codes, once all have ended by themselves."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        return [process.exitcode for process in self.processes]


def resumed(run, tmp_path, num=1):
    with Working(run, tmp_path, num) as working:
        assert working.codes(120) == [0] * num
    assert run.state == "finished"


def saved(run):
    (file,) = run.model_path.glob("*.safetensors")
    return load_file(file)


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
        return saved(runs[key])

    return result


@pytest.mark.parametrize(
    ("num", "sign", "ranks"),
    [(1, signal.SIGINT, (0,)), (1, signal.SIGHUP, (0,)), (2, signal.SIGTERM, (1,)), (2, signal.SIGUSR1, (0, 1))],
    ids=["Ctrl-C", "SIGHUP", "SIGTERM to one", "SIGUSR1 to all"],
)
def test_a_signal_ends_all_after_a_step_with_a_checkpoint_that_is_gone_on_from_exactly(
    num, sign, ranks, folder, tmp_path, calm
):
    run = made(folder, num=num)
    with Working(run, tmp_path, num, Slow("step", 0.2)) as working:
        working.wait_for_step(3)
        working.send(sign, *ranks)
        codes = working.codes()
    step = newest_complete(run.path).step
    assert 3 <= step < NUM_STEPS and run.status()["step"] == step
    assert codes == [EXIT_CODES.get(sign.name, 0)] * num
    who = "the user" if sign == signal.SIGINT else sign.name
    reason = f"stopped by {who} at step {step}, checkpoint of step {step}"
    assert (run.state, run.status()["exit_reason"]) == ("interrupted", reason)
    assert [event["now"] for event in events(run, "stop")] == [False]
    resumed(run, tmp_path, num)
    torch.testing.assert_close(saved(run), calm(num), rtol=0, atol=0)


def test_two_signals_that_are_one_wish_save_and_the_second_wish_does_not(folder, tmp_path):
    """A scheduler tells all processes, and the launcher hands it on to them: that is one SIGTERM, not two."""
    once, twice = made(folder, num=2), made(folder, num=2)
    with Working(once, tmp_path, 2, Slow("step", 2.0)) as working:
        working.wait_for_step(1)
        # The end of the first step, at which a wish would still be heard, is over when the second has begun.
        working.wait_for_mark("step")
        working.send(signal.SIGTERM, 0, 1, 0, 1)
        assert working.codes() == [143, 143]
    assert once.status()["exit_reason"].endswith("checkpoint of step 2")
    with Working(twice, tmp_path, 2, Slow("save", 30.0)) as working:
        working.wait_for_step(1)
        working.send(signal.SIGTERM, 0, 1)
        working.wait_for_mark("save")
        time.sleep(1.5)
        working.send(signal.SIGTERM, 1)
        assert working.codes(20) == [143, 143]
    assert newest_complete(twice.path).step == 0
    assert twice.state == "interrupted" and twice.status()["exit_reason"].endswith("no checkpoint")


def test_an_evaluation_is_left_between_two_batches_with_the_checkpoint_of_its_step(folder, tmp_path, calm):
    data = {"eval": str(folder / "rows.jsonl")}
    run = made(folder, num=2, eval_steps=3, data=data)
    with Working(run, tmp_path, 2, Slow("evaluation", 0.3)) as working:
        working.wait_for_step(3)
        working.wait_for_mark("evaluation")
        working.send(signal.SIGTERM, 1)
        assert working.codes() == [143, 143]
    assert run.status()["exit_reason"] == "stopped by SIGTERM at step 3, checkpoint of step 3"
    assert [event["step"] for event in events(run, "eval")] == [0]
    resumed(run, tmp_path, 2)
    assert [event["step"] for event in events(run, "eval")][:3] == [0, 3, 6]
    torch.testing.assert_close(saved(run), calm(2), rtol=0, atol=0)


def test_what_has_no_steps_ends_at_once(folder, tmp_path):
    run = made(folder, num=2)
    with Working(run, tmp_path, 2, Slow("loading", 60.0)) as working:
        working.wait_for_mark("loading")
        working.send(signal.SIGTERM, 0)
        assert working.codes(30) == [143, 143]
    assert run.state == "interrupted" and run.status()["exit_reason"] == "stopped by SIGTERM at step 0, no checkpoint"


def test_a_step_that_takes_longer_than_the_grace_is_not_waited_for(folder, tmp_path):
    """The others wait for a rank that is slow, in an exchange that Python's signals do not reach."""
    run = made(folder, num=2, grace_seconds=6.0, save_steps=2)
    with Working(run, tmp_path, 2, Slow("step", 90.0, rank=1)) as working:
        working.wait_for_mark("step")
        time.sleep(1)
        began = time.monotonic()
        working.send(signal.SIGTERM, 0, 1)
        assert working.codes(60) == [143, 143]
        assert time.monotonic() - began < 60
    assert run.state == "interrupted"
    assert "no checkpoint" in run.status()["exit_reason"]


def test_nothing_is_left_where_the_process_that_trains_is_killed(folder):
    """Neither the processes that make its micro-batches, which go on where a terminal or a scheduler tells all."""
    run = made(folder, max_steps=100_000)
    plan = run.path / "plan.yaml"
    plan.write_text(plan.read_text().replace("dataloader_num_workers: 0", "dataloader_num_workers: 2"))
    assert run.plan.dataloader_num_workers == 2
    with subprocess.Popen([sys.executable, "-m", "tunekit.run.launch", str(run.path)]) as parent:
        try:
            _wait_for_step(run, 1)
            children = psutil.Process(parent.pid).children(recursive=True)
            assert len(children) >= 2
            for child in children:
                child.send_signal(signal.SIGINT)
            _wait_for_step(run, run.status()["step"] + 50)
        finally:
            parent.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert run.state == "died"


def _wait_for_step(run, step, seconds=150):
    until = time.monotonic() + seconds
    while run.status()["step"] < step:
        assert time.monotonic() < until, run.status()
        time.sleep(0.05)


def test_tunekit_stop_comes_back_when_nothing_is_left(folder, tmp_path):
    run, told = made(folder, num=2), []
    with Working(run, tmp_path, 2, Slow("step", 0.2)) as working:
        working.wait_for_step(2)
        words = api.stop(run.path, on_wait=told.append)
        # The first is a program that may go on with something else.
        assert identity_of(working.processes[1].pid) is None
        assert working.codes() == [0, 0]
    step = newest_complete(run.path).step
    assert words == f"{run.name} was interrupted: stopped by `tunekit stop` at step {step}, checkpoint of step {step}"
    assert told == [f"{run.name} is asked to end after its step; it has {told[0].split()[-2]} s"]
    assert api.stop(run.path) == (
        f"{run.name} is not running: it was interrupted, stopped by `tunekit stop` at step {step}, "
        f"checkpoint of step {step}"
    )


def test_a_process_that_does_not_react_is_named_and_killed(folder, tmp_path, monkeypatch):
    run, told = made(folder), []
    monkeypatch.setattr("tunekit.run.stopping.LEAST_SECONDS", 1)
    monkeypatch.setattr("tunekit.run.stopping.NOW_SECONDS", 2)
    with Working(run, tmp_path, 1, Slow("step", 0.2)) as working:
        working.wait_for_step(1)
        working.send(signal.SIGSTOP, 0)
        with pytest.raises(RunError, match=r"did not end in \d+ s: rank 0 in \w+ of step \d+ for .*--now"):
            api.stop(run)
        assert requested(run) is not None and not requested(run).now
        words = api.stop(run, now=True, on_wait=told.append)
        assert working.codes(5) == [-signal.SIGKILL]
    assert words.startswith(f"{run.name} was interrupted: stopped by `tunekit stop` at step ")
    assert run.state == "interrupted"


def test_a_number_that_another_process_has_by_now_is_not_taken_for_the_run(folder, tmp_path):
    """What is asked for is the process that the folder names, and it has ended."""
    run = made(folder)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        run.update_status(phase="training", pid=stranger.pid, identity="another boot-1")
        assert run.state == "died"
        assert api.stop(run, now=True).endswith("is not running: it died")
        run.update_status(identity=identity_of(stranger.pid))
        assert run.state == "training"
        stranger.communicate(b"\n")
    assert run.state == "died"


def test_a_run_on_another_host_has_died_when_it_gave_no_sign_for_long(folder):
    run = made(folder)
    run.update_status(phase="training", host="elsewhere")
    assert run.state == "training"
    status, now = run.path / "status.json", time.time()
    os.utime(status, (now - 100, now - 100))
    assert run.state == "training"
    os.utime(status, (now - 130, now - 130))
    assert run.state == "died"
    # One of its processes still does.
    (run.path / "ranks").mkdir()
    (run.path / "ranks" / "rank-1.json").write_text('{"host": "elsewhere"}')
    assert run.state == "training"
