"""The life of a group of processes on one machine: what ends it, what is said of it, and that nothing is left."""

import contextlib
import itertools
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model
from tests.training.watching import Hold
from tests.waiting import LIMIT_SECONDS, is_gone, until
from tunekit.api import verbs
from tunekit.errors import ExchangeError, RollbackError, RunError, StandstillError, TunekitError
from tunekit.launching.local import launch, supervise
from tunekit.process import processes as group
from tunekit.process.processes import Group
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.record import Record, errors_of
from tunekit.runs.run import Run, list_runs
from tunekit.runs.small_files import Place, place_of
from tunekit.training.worker import work

RECIPE = """\
model: model
adapter: full
data: {train: rows.jsonl, max_length: 64}
train: {max_steps: 6, global_batch_size: 4, save_steps: 2, learning_rate: 1e-3}
output: {sample_prompts: []}
"""
MANY = ("parallel.num_processes=2", "train.max_steps=100000", "train.save_steps=100000")


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


def workers_of(pid):
    """The processes of a group, by rank."""
    found = {}
    for process in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            environment = process.environ()
            if group.SUPERVISOR in environment:
                found[int(environment.get("RANK", 0))] = process
    return found


def are_gone(processes):
    """Whether processes have ended."""
    return all(is_gone(process) for process in processes)


class Terminal:
    """A command in a terminal of its own, as a user sits before it."""

    running: ClassVar[set[int]] = set()
    """Processes whose end no test has seen yet."""

    def __init__(self, folder, *arguments, **environment):
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            # A shell starts what runs in the background with the signal ignored, and the tests may run there.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.environ.update(COLUMNS="160", LINES="50", TERM="xterm-256color", **environment)
            os.execv(sys.executable, [sys.executable, "-m", "tunekit", *arguments])
        self.running.add(self.pid)
        self.seen = ""

    def read_until(self, words):
        while words not in self.seen:
            assert self._read() is not None, self.seen[-3000:]

    def press(self, key):
        os.write(self.file, key)

    def code(self):
        """Its exit code, once it has ended."""
        while self._read() is not None:
            pass
        os.close(self.file)
        return self.end()

    def end(self):
        """Wait for its end, and return its exit code."""
        self.running.discard(self.pid)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self):
        assert select.select([self.file], [], [], LIMIT_SECONDS)[0], self.seen[-3000:]
        try:
            block = os.read(self.file, 65536).decode(errors="replace")
        except OSError:
            return None
        self.seen += block
        return block or None


@pytest.fixture(autouse=True)
def nothing_is_left():
    """End the commands that a failed test leaves, and with them their processes."""
    yield
    while Terminal.running:
        pid = Terminal.running.pop()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


CTRL_C = b"\x03"


def newest(workspace, name):
    return next(run for run in list_runs(workspace / "runs") if run.name.startswith(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), [("early", "loading the model"), ("late", "  lr ")])
def test_one_ctrl_c_in_a_terminal_ends_all_processes_with_a_checkpoint_if_there_are_steps(
    workspace, tmp_path, name, words
):
    # What is to end while it loads never comes to the end of that by itself.
    held = Hold(tmp_path, "model/config.json", supervised=True).environment() if name == "early" else {}
    terminal = Terminal(workspace, "train", "double.yaml", *MANY, f"output.name={name}", **held)
    terminal.read_until(words)
    workers = workers_of(terminal.pid)
    assert set(workers) == {0, 1}
    terminal.press(CTRL_C)
    assert terminal.code() == 130
    assert are_gone(workers.values())
    next_words = "resume with: tunekit resume" if name == "late" else "start over: tunekit train"
    assert "Traceback" not in terminal.seen and next_words in terminal.seen
    run = newest(workspace, name)
    step = run.status()["step"]
    saved = f"checkpoint of step {step}" if name == "late" else "no checkpoint"
    assert (run.state, run.status()["exit_reason"]) == ("interrupted", f"stopped by the user at step {step}, {saved}")
    assert ("stopping after step" in terminal.seen) == (step > 0) == (newest_complete(run.path).step > 0)
    assert [event["phase"] for event in run.events() if event["event"] == "phase"][-1] == "interrupted"


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_all_processes_with_a_checkpoint(workspace):
    terminal = Terminal(workspace, "train", "double.yaml", *MANY, "output.name=closed")
    terminal.read_until("  lr ")
    workers = workers_of(terminal.pid)
    assert set(workers) == {0, 1}
    os.close(terminal.file)
    assert terminal.end() == 129
    assert are_gone(workers.values())
    run = newest(workspace, "closed")
    step = newest_complete(run.path).step
    reason = f"stopped by SIGHUP at step {step}, checkpoint of step {step}"
    assert step > 0 and (run.state, run.status()["exit_reason"]) == ("interrupted", reason)


def test_ctrl_c_before_there_is_a_run_leaves_none(workspace, tmp_path):
    # It never comes to the end of the rows by itself.
    hold = Hold(tmp_path, "rows.jsonl")
    terminal = Terminal(workspace, "train", "double.yaml", *MANY, "output.name=none", **hold.environment())
    terminal.read_until("reading the data")
    # Python loses an interrupt that comes while an extension module is imported.
    hold.wait()
    terminal.press(CTRL_C)
    assert terminal.code() == 130
    assert "Traceback" not in terminal.seen
    assert not any(run.name.startswith("none") for run in list_runs(workspace / "runs"))


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "state"), [(signal.SIGTERM, "interrupted"), (signal.SIGKILL, "died")])
def test_the_end_of_the_supervisor_ends_all_processes(workspace, sign, state):
    name = state
    command = [sys.executable, "-m", "tunekit", "train", "double.yaml", *MANY, f"output.name={name}"]
    with subprocess.Popen(command, cwd=workspace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        next(line for line in process.stdout if line.startswith("step 1/"))
        workers = workers_of(process.pid)
        assert set(workers) == {0, 1}
        process.send_signal(sign)
        process.communicate(timeout=LIMIT_SECONDS)
    until(lambda: are_gone(workers.values()))
    assert process.returncode == (143 if sign == signal.SIGTERM else -signal.SIGKILL)
    assert newest(workspace, name).state == state


def test_a_process_that_cannot_react_ends_with_its_group(here):
    run = verbs.make_run("double.yaml", ["parallel.num_processes=2", "output.name=stiff"])
    words = ["tunekit.training.worker", str(run.path.resolve())]
    with (run.path / group.LOG).open("ab") as log, Group(words, run.plan.environment, log, num=2):
        # A process is known by its environment, which it has once it runs its own program.
        workers = until(lambda: both if len(both := workers_of(os.getpid())) == 2 else None)
        workers[1].suspend()
        until(lambda: workers[1].status() == psutil.STATUS_STOPPED)
    assert are_gone(workers.values())


def kill_worker(rank, sign=signal.SIGKILL):
    """Send a signal to one of the processes as soon as it is there."""

    def kill():
        until(lambda: workers_of(os.getpid()).get(rank)).send_signal(sign)

    threading.Thread(target=kill, daemon=True).start()


def test_a_rank_that_is_killed_ends_the_others_and_is_named(here):
    run = verbs.make_run("double.yaml", ["parallel.num_processes=2", "output.name=killed"])
    kill_worker(1)
    with pytest.raises(RunError) as caught:
        launch(run)
    assert caught.value.problem == "rank 1 was killed by SIGKILL"
    assert str(run.path / "launcher.log") in caught.value.hint
    assert workers_of(os.getpid()) == {}
    assert run.state == "failed" and "rank 1 was killed by SIGKILL" in run.status()["exit_reason"]


@pytest.mark.slow
def test_what_the_user_can_mend_comes_without_a_traceback_and_is_not_tried_again(workspace):
    arguments = ["parallel.num_processes=2", "train.learning_rate=1e30", "parallel.max_restarts=2", "output.name=nan"]
    command = [sys.executable, "-m", "tunekit", "train", "double.yaml", *arguments]
    answer = subprocess.run(command, cwd=workspace, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "the loss is" in answer.stderr and "lower train.learning_rate" in answer.stderr
    assert "Traceback" not in answer.stdout + answer.stderr
    assert not [event for event in newest(workspace, "nan").events() if event["event"] == "restart"]


@pytest.mark.slow
def test_a_defect_keeps_the_traceback_of_its_rank(here):
    run = verbs.make_run("double.yaml", ["parallel.num_processes=2", "output.name=defect"])
    rows = run.path / "data" / "train.arrow"
    rows.unlink()  # it is a second name of a file of the cache, from which others' runs are made
    rows.write_bytes(b"no rows")
    with pytest.raises(RuntimeError, match=r"(?s)^rank [01]:\nTraceback .*read_dataset"):
        launch(run)
    assert run.state == "failed"


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_by_those_that_waited(here):
    run = verbs.make_run("double.yaml", [*MANY, "output.name=hung"])
    plan = run.path / "plan.yaml"
    text = plan.read_text(encoding="utf-8")
    assert "timeout_seconds: 600" in text
    plan.write_text(text.replace("timeout_seconds: 600", "timeout_seconds: 20"), encoding="utf-8")

    def stop(event):
        if event["event"] == "log" and event["step"] == 1:
            workers_of(os.getpid())[1].suspend()

    with pytest.raises(StandstillError) as caught:
        launch(run, stop)
    told = caught.value.problem
    assert told.startswith("rank 1 (process ") and "stopped sending heartbeats" in told and "rank 0 waited " in told
    assert workers_of(os.getpid()) == {}


def test_the_first_error_counts_but_not_one_that_another_process_caused(here, monkeypatch):
    clock = itertools.count(1.0)
    monkeypatch.setattr("tunekit.runs.record.time", SimpleNamespace(time=lambda: next(clock)))
    run = verbs.make_run("double.yaml", ["output.name=errors"])
    for rank, error in ((0, ExchangeError("lost")), (2, RunError("first")), (1, RunError("second"))):
        Record(run, Place(rank=rank, num_processes=3)).write_error(error)
    assert [words["problem"] for words in errors_of(run)] == ["first", "second", "lost"]


class Ended:
    """Processes of which some ended, with some exit codes."""

    def __init__(self, *codes):
        self.all = dict(enumerate(codes))

    def codes(self):
        return self.all

    def wait(self, seconds):
        pass


NO_WORD = "exited with code {} without an error message"


@pytest.mark.parametrize(
    ("codes", "told", "shown"),
    [
        ((-signal.SIGSEGV, None), ExchangeError("rank 0 waited"), "rank 0 waited; no report from rank 1"),
        ((-signal.SIGSEGV, None), None, "rank 0 was killed by SIGSEGV"),
        ((2, 7), ExchangeError("rank 0 waited"), f"rank 1 {NO_WORD.format(7)}"),
        ((2, 0), ExchangeError("rank 0 waited"), f"rank 1 {NO_WORD.format(0)}"),
        ((-signal.SIGABRT, 7), None, f"rank 1 {NO_WORD.format(7)}"),
    ],
)
def test_what_a_process_said_counts_more_than_how_it_crashed_on_its_way_out(codes, told, shown, here):
    run = verbs.make_run("double.yaml", [*MANY, "output.name=crashed"])

    @contextlib.contextmanager
    def start():
        if told is not None:
            Record(run, Place(rank=0, num_processes=2)).write_error(told)
        yield Ended(*codes)

    with pytest.raises(RunError) as caught:
        supervise(run, start, None)
    assert caught.value.problem == shown


def test_a_run_that_is_stopped_while_it_goes_back_to_a_checkpoint_does_not_start_again(here):
    run, starts = verbs.make_run("double.yaml", [*MANY, "output.name=back"]), []

    class Stopping(Ended):
        def wait(self, seconds):
            if len(starts) == 2:
                signal.raise_signal(signal.SIGTERM)

    @contextlib.contextmanager
    def start():
        starts.append(True)
        assert len(starts) < 3
        Record(run, Place(rank=0, num_processes=2)).write_error(RollbackError("step 5: loss is NaN"))
        yield Stopping(1, 1)

    with pytest.raises(TunekitError):
        supervise(run, start, None)
    assert len(starts) == 2
    assert [event["event"] for event in run.events()].count("restart") == 1


def losses(run):
    """The last word on the loss of each step."""
    return {event["step"]: event["loss"] for event in run.events() if event["event"] == "log"}


def work_in_place(folder):
    work(Run(folder), place=place_of())


@pytest.fixture(scope="module")
def uninterrupted(workspace):
    """Losses of two processes that nothing happened to."""
    with contextlib.chdir(workspace):
        run = verbs.make_run("double.yaml", ["parallel.num_processes=2", "output.name=whole"])
        in_processes(2, work_in_place, str(run.path.resolve()))
        return losses(Run(run.path.resolve()))


@pytest.fixture
def kill_once(tmp_path, monkeypatch):
    """A listener that kills a process, once, between the checkpoints of steps 2 and 4."""
    hold = Hold(tmp_path / "hold", "checkpoint-4", supervised=True)
    monkeypatch.syspath_prepend(str(hold.folder))

    def kill(event):
        if event["event"] == "log" and event["step"] == 3 and hold.holds:
            workers_of(os.getpid())[1].kill()
            hold.go_on()

    return kill


@pytest.mark.slow
def test_a_killed_rank_is_made_up_for_by_a_restart_from_the_last_checkpoint(here, uninterrupted, kill_once):
    overrides = ["parallel.num_processes=2", "parallel.max_restarts=1", "output.name=restarted"]
    run = tunekit.train("double.yaml", overrides, on_event=kill_once)
    assert run.state == "finished"
    assert losses(run) == uninterrupted
    (restart,) = [event for event in run.events() if event["event"] == "restart"]
    assert restart["attempt"] == 1 and "rank 1 was killed by SIGKILL" in restart["reason"]
    (resumed,) = [event for event in run.events() if event["event"] == "resume"]
    assert resumed["step"] == restart["step"] >= 2
    assert list(run.metrics().index) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_run_that_failed_is_resumed_in_its_folder(here, uninterrupted, kill_once):
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        tunekit.train("double.yaml", ["parallel.num_processes=2", "output.name=failed"], on_event=kill_once)
    run = newest(here, "failed")
    command = [sys.executable, "-m", "tunekit", "resume", run.name]
    answer = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "resuming from step" in answer.stdout
    assert run.state == "finished"
    assert losses(run) == uninterrupted


def stop_at(step):
    def interrupt(event):
        if event["event"] == "log" and event["step"] == step:
            raise KeyboardInterrupt

    return interrupt


def test_a_checkpoint_that_is_not_whole_is_passed_over_and_named(here):
    whole = tunekit.train("double.yaml", ["output.name=one"])
    with pytest.raises(KeyboardInterrupt):
        tunekit.train("double.yaml", ["output.name=damaged"], on_event=stop_at(5))
    run = newest(here, "damaged")
    assert newest_complete(run.path).step == 4
    weights = run.path / "checkpoints" / "checkpoint-4" / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    assert tunekit.resume(run).state == "finished"
    (resumed,) = [event for event in run.events() if event["event"] == "resume"]
    assert resumed["step"] == 2
    fault = f"model.safetensors has {size - 1:,} bytes instead of {size:,}"
    assert resumed["skipped"] == [f"checkpoint-4: {fault}; renamed to checkpoint-4.bad"]
    assert losses(run) == losses(whole)


def test_what_cannot_be_resumed_is_refused_with_what_to_do(here):
    finished = tunekit.train("double.yaml", ["output.name=done"])
    empty = verbs.make_run("double.yaml", ["output.name=empty"])
    alive = verbs.make_run("double.yaml", ["output.name=alive"])
    empty.update_status(phase="failed")
    for run, words in (
        (finished, f"is finished, after 6 steps; train further: tunekit resume {finished.path} train.max_steps=12"),
        (empty, f"has no complete checkpoint to resume from; start over: tunekit train {empty.path / 'recipe.yaml'}"),
        (
            alive,
            f"is starting in process {os.getpid()} of {os.uname().nodename}; "
            f"wait until it ends, or stop it first: tunekit stop {alive.path}",
        ),
    ):
        with pytest.raises(RunError) as caught:
            tunekit.resume(run)
        assert str(caught.value) == f"{run.name} {words}"
