"""Tools and environments in processes of their own: what hangs, dies, raises or says too much."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.waiting import until
from tunekit.errors import RunError
from tunekit.methods.environments import episodes
from tunekit.methods.environments.episodes import (
    Host,
    Limits,
    RaisedError,
    Seeds,
    environment_class,
    fill_lost,
    owns_reward,
    tool_functions,
    tool_methods,
)

MODULE = """
import multiprocessing, os, random, signal, subprocess, sys, threading, time
from pathlib import Path

if "FORK_SECONDS" in os.environ:
    os.register_at_fork(after_in_child=lambda: time.sleep(float(os.environ["FORK_SECONDS"])))

class Trouble:
    '''An environment that does all that it should not.'''

    def __init__(self, start=0):
        if start < 0:
            raise ValueError("start must not be negative")
        self.total = start

    def reset(self, seed, start=0, **row):
        if start == "raise":
            raise KeyError("no such level")
        if start == "hang":
            time.sleep(3600)
        if start == "die once" and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.total = 0
        self.drawn = (seed, random.random(), sorted(row))
        return f"drawn {self.drawn}"

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def hang(self) -> str:
        time.sleep(3600)

    def hang_without_end(self) -> str:
        threading.Thread(target=time.sleep, args=(3600,)).start()
        while True:
            pass

    def die(self) -> str:
        os._exit(3)

    def start(self) -> list:
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
        forked.start()
        program = subprocess.Popen(["sleep", "3600"])
        daemon = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        self.started = forked, program
        return [forked.pid, program.pid, daemon.pid]

    def terminate(self) -> list:
        self.start()
        for each in self.started:
            each.terminate()
        forked, program = self.started
        forked.join()
        return [forked.exitcode, program.wait()]

    def talk(self, num: int) -> str:
        for _ in range(num):
            print("0123456789" * 10)
        return "done"

    def half(self) -> str:
        return "half \\ud83d of a character"

    def half_raised(self) -> str:
        raise ValueError("half \\ud83d of a character")

    def shout(self) -> str:
        return "a" * 50_000_000

    def swallow(self) -> str:
        raise MemoryError

    def leave(self) -> str:
        sys.exit(2)

    def structured(self) -> dict:
        return {"ö": [1, (2, 3)], "other": {4}}

    def _private(self) -> str:
        return ""

    def get_reward(self):
        return {7: float("nan"), 8: None, 9: "many"}.get(self.total, float(self.total))

class Gym:
    def reset(self, seed=None):
        self.place = 0
        return "start", {"info": 1}

    def step(self, action: str):
        self.place += 1
        return f"at {self.place}", 0.5, self.place == 2, False, {}

    def render(self):
        return "a picture"

class Result:
    def __init__(self, observation, reward, done):
        self.observation, self.reward, self.done = observation, reward, done

class OpenEnv:
    def reset(self):
        return Result("begin", None, False)

    def step(self, action: str) -> Result:
        return Result("end", 2, True)

class NoReset:
    pass

def double(number: int) -> int:
    '''Double a number.

    Args:
        number: The number.
    '''
    if number == 13:
        time.sleep(3600)
    return 2 * number
"""
LIMITS = Limits(timeout_seconds=1.0, max_chars=100)


@pytest.fixture
def trouble(tmp_path, monkeypatch):
    """A module with environments, and a function that hosts one of them."""
    (tmp_path / "trouble.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    hosts = []

    def host(name="Trouble", limits=LIMITS, **arguments):
        import trouble

        hosts.append(Host("method.environment", {"path": f"trouble:{name}", "arguments": arguments}, limits))
        return environment_class(vars(trouble)[name], hosts[-1], Seeds(seed=1)), hosts[-1]

    yield host
    sys.modules.pop("trouble", None)
    for each in hosts:
        each.close()


def test_methods_are_passed_on_with_their_signatures(trouble):
    import inspect

    import trouble as module

    episode, _ = trouble()
    assert episode.__name__ == "Trouble"
    assert set(tool_methods(module.Trouble)) == {
        *("add", "die", "half", "half_raised", "hang", "hang_without_end", "leave", "shout", "start", "structured"),
        *("swallow", "talk", "terminate"),
    }
    made = episode()
    assert str(inspect.signature(made.add)) == "(number: int) -> int"
    made.reset()
    assert (made.add(number=2), made.add(number=3)) == ("2", "5")
    assert made.structured() == '{"ö": [1, [2, 3]], "other": "{4}"}'
    assert made.get_reward() == 5.0


def test_instances_know_nothing_of_each_other(trouble):
    episode, _ = trouble()
    one, other = episode(), episode()
    one.reset()
    other.reset()
    one.add(number=2)
    assert (one.get_reward(), other.get_reward()) == (2.0, 0.0)


def test_an_episode_is_seeded_by_run_step_and_row(trouble):
    episode, _ = trouble()
    one, other = episode(), episode()
    first = one.reset(episode=4, level="x", prompt=[])
    assert first.startswith("drawn (") and "['level', 'prompt']" in first
    assert other.reset(episode=4, level="x", prompt=[]) == first
    assert one.reset(episode=5, level="x", prompt=[]) != first
    assert Seeds(1, lambda: 0).of(4) != Seeds(1, lambda: 1).of(4) != Seeds(2, lambda: 1).of(4)
    assert Seeds(1, lambda: "eval").of(4) == Seeds(1, lambda: "eval").of(4)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("hang", "hang did not return within 1 s"),
        ("hang_without_end", "hang_without_end did not return within 1 s"),
        ("die", "its process exited in die"),
        ("leave", "its process exited in leave"),
    ],
)
def test_what_hangs_or_dies_loses_its_episode_alone(action, reason, trouble):
    episode, host = trouble()
    lost, other = episode(), episode()
    for each in (lost, other):
        each.reset()
    process = lost._channel._process_id
    with pytest.raises(RaisedError, match=f"the environment was lost: {reason}"):
        getattr(lost, action)()
    with pytest.raises(RaisedError, match="the environment was lost"):
        lost.add(number=1)
    assert (lost.get_reward(), lost.is_lost) == (None, True)
    other.add(number=1)
    assert (other.get_reward(), other.is_lost) == (1.0, False)
    num_lost, (told,) = host.counts.take()
    assert num_lost == 1 and told.startswith(f"{reason}: the episode takes the mean reward of its group; ")
    assert ("raise method.tool_timeout_seconds" in told) == ("did not return" in told)
    _gone(process)
    lost.reset()
    lost.add(number=4)
    assert (lost.get_reward(), lost.is_lost) == (4.0, False)
    assert host.counts.take() == (0, [])


def test_what_raises_is_said_and_goes_on(trouble):
    episode, host = trouble()
    made = episode()
    made.reset()
    with pytest.raises(RaisedError, match=r"TypeError: .*unexpected keyword argument 'nmber'"):
        made.add(nmber=3)
    with pytest.raises(RaisedError, match=r"^MemoryError$"):
        made.swallow()
    assert (made.add(number=1), made.is_lost, host.counts.take()) == ("1", False, (0, []))


def test_a_result_of_50_mb_is_cut_where_it_is_made(trouble):
    episode, _ = trouble(limits=Limits(20.0, 100))
    made = episode()
    made.reset()
    assert made.shout() == "a" * 100 + " [49,999,900 characters cut]"


@pytest.mark.parametrize("total", [7, 9])
def test_a_reward_that_is_no_number_is_an_error(total, trouble):
    episode, _ = trouble()
    made = episode()
    made.reset()
    made.add(number=total)
    with pytest.raises(RunError, match="get_reward raised ValueError"):
        made.get_reward()


def test_a_reward_of_none_says_nothing(trouble):
    episode, _ = trouble()
    made = episode()
    made.reset()
    made.add(number=8)
    assert (made.get_reward(), made.is_lost) == (None, False)


def test_a_reset_that_raises_ends_the_run_with_the_row(trouble):
    episode, _ = trouble()
    with pytest.raises(
        RunError, match=r"method.environment: reset raised KeyError: 'no such level', for the row \{\"st"
    ):
        episode().reset(start="raise")


def test_a_class_that_cannot_be_made_is_an_error(trouble):
    episode, _ = trouble(start=-1)
    with pytest.raises(RunError, match=r"method.environment: ValueError: start must not be negative"):
        episode()


def test_gymnasium_and_openenv_are_environments(trouble):
    import trouble as module

    gym, _ = trouble("Gym")
    assert list(tool_methods(module.Gym)) == ["step"] and owns_reward(module.Gym)
    made = gym()
    assert made.reset() == "start"
    assert made.step(action="x") == "at 1"
    assert made.step(action="x") == "at 2 (The episode is over.)"
    with pytest.raises(RaisedError, match="the episode is over"):
        made.step(action="x")
    assert (made.get_reward(), made.step_rewards) == (1.0, (0.5, 0.5))
    made.reset()
    assert made.step_rewards == ()
    other, _ = trouble("OpenEnv")
    made = other()
    assert (made.reset(), made.step(action="x"), made.get_reward()) == ("begin", "end (The episode is over.)", 2.0)
    whole, _ = trouble()
    made = whole()
    made.reset()
    made.add(number=1)
    assert made.step_rewards == ()


def test_tools_are_functions_in_a_process_that_is_started_again(trouble):
    import inspect

    paths = {"double": ("trouble:double", {}), "calculator": ("tunekit.methods.environments.tools:calculator", {})}
    host = Host("method.tools", {"tools": paths}, LIMITS)
    double, calculator = tool_functions(paths, host)
    assert (double.__name__, str(inspect.signature(double))) == ("double", "(number: int) -> int")
    assert (double(number=4), calculator(expression="2 * (3 + 4)")) == ("8", "14")
    with pytest.raises(RaisedError, match="double did not return within 1 s"):
        double(number=13)
    assert double(number=5) == "10"
    assert host.counts.take()[0] == 1
    host.close()


def test_a_module_that_cannot_be_imported_is_an_error(trouble, tmp_path):
    (tmp_path / "broken.py").write_text("raise OSError('no such disk')")
    with pytest.raises(RunError, match="importing 'broken' raised OSError: no such disk"):
        Host("method.environment", {"path": "broken:Broken", "arguments": {}}, LIMITS)


def test_all_end_with_the_process_that_started_them(tmp_path):
    (tmp_path / "trouble.py").write_text(MODULE)
    program = """
    import json
    from trouble import Trouble
    from tunekit.methods.environments.episodes import Host, Limits, Seeds, environment_class
    host = Host("method.environment", {"path": "trouble:Trouble", "arguments": {}}, Limits(60.0, 100))
    episodes = [environment_class(Trouble, host, Seeds(0))() for _ in range(3)]
    started = json.loads(episodes[0].start())
    print(host._process.pid, *(each._channel._process_id for each in episodes), *started, flush=True)
    input()
    """
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env=environment,
        text=True,
    )
    assert trainer.stdout is not None
    processes = list(map(int, trainer.stdout.readline().split()))
    assert len(processes) == 7
    trainer.kill()
    trainer.communicate()
    for process in processes:
        _gone(process)


def test_what_an_instance_has_started_ends_with_it_and_the_rest_with_the_host(trouble):
    episode, host = trouble(limits=Limits(60.0, 100))
    made = episode()
    made.reset()
    forked, program, daemon = json.loads(made.start())
    with pytest.raises(RaisedError, match="its process exited in die"):
        made.die()  # though a process that it forked lives on
    _gone(forked)
    _gone(program)
    assert psutil.pid_exists(daemon)
    host.close()
    _gone(daemon)
    _gone(host._process.pid)


def test_what_an_instance_starts_can_be_terminated(trouble):
    """Signals that stop a run are ignored by the host alone."""
    episode, _ = trouble(limits=Limits(60.0, 100))
    made = episode()
    made.reset()
    assert json.loads(made.terminate()) == [-signal.SIGTERM, -signal.SIGTERM]


def test_a_signal_to_a_process_that_was_just_forked_is_not_lost(trouble, monkeypatch):
    """One that comes before what was forked has the signals for itself."""
    import trouble as module

    assert module.os is os, "imported here before forks are slow there"
    monkeypatch.setenv("FORK_SECONDS", "0.3")
    episode, _ = trouble(limits=Limits(60.0, 100))
    instance = episode()
    instance.reset()
    assert json.loads(instance.terminate()) == [-signal.SIGTERM, -signal.SIGTERM]


def test_signals_that_stop_a_run_end_neither_host_nor_instances(trouble):
    episode, host = trouble(limits=Limits(60.0, 100))
    made = episode()
    made.reset()
    for process in (host._process.pid, made._channel._process_id):
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(process, sign)
    made.add(number=2)
    assert episode().reset().startswith("drawn") and made.get_reward() == 2.0


def test_a_reset_that_is_lost_is_tried_once_more_in_a_new_process(trouble):
    episode, host = trouble(limits=Limits(60.0, 100))
    made = episode()
    os.kill(made._channel._process_id, signal.SIGKILL)
    _gone(made._channel._process_id)
    assert made.reset().startswith("drawn") and not made.is_lost
    assert made.reset(start="die once").startswith("drawn") and not made.is_lost
    told = ": it was called again in a new process; see log.txt for what it printed"
    reasons = [f"its process {when} reset{told}" for when in ("had exited before", "exited in")]
    assert host.counts.take() == (0, reasons)


def test_a_reset_that_hangs_twice_ends_the_run_with_the_row_and_the_remedy(trouble):
    episode, _ = trouble()
    with pytest.raises(RunError, match=r'return within 1 s, twice, for the row \{"st') as error:
        episode().reset(start="hang")
    assert error.value.hint == "if it only takes long, raise method.tool_timeout_seconds"


def test_a_host_that_is_killed_is_started_again(trouble):
    episode, host = trouble(limits=Limits(60.0, 100))
    made = episode()
    made.reset()
    os.kill(host._process.pid, signal.SIGKILL)
    _gone(made._channel._process_id)
    with pytest.raises(RaisedError, match="the environment was lost: its process had exited before add"):
        made.add(number=1)
    assert made.reset().startswith("drawn")
    made.add(number=3)
    assert made.get_reward() == 3.0
    told = "the process that starts its instances exited, and was started again; see log.txt"
    assert host.counts.take()[1][1].startswith(told)


def test_tools_whose_host_is_gone_for_good_end_the_run(trouble, monkeypatch, tmp_path):
    host = Host("method.tools", {"tools": {"double": ("trouble:double", {})}}, Limits(60.0, 100))
    (double,) = tool_functions({"double": ("trouble:double", {})}, host)
    (tmp_path / "trouble.py").write_text("raise OSError('no such disk')")
    (instance,) = psutil.Process(host._process.pid).children()
    os.kill(host._process.pid, signal.SIGKILL)
    _gone(instance.pid)
    with pytest.raises(RaisedError, match="its process had exited before double"):
        double(number=4)
    assert "importing 'trouble' raised OSError: no such disk" in str(host.failure)


def test_a_module_whose_import_hangs_is_an_error(trouble, monkeypatch, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3600)")
    monkeypatch.setattr(episodes, "_START_SECONDS", 0.5)
    monkeypatch.setattr(episodes, "_END_SECONDS", 0.5)
    with pytest.raises(RunError, match=r"^method.environment: its import did not end within 0.5 s") as error:
        Host("method.environment", {"path": "slow:Slow", "arguments": {}}, LIMITS)
    assert error.value.hint == "see log.txt for what it printed"
    assert not [child for child in psutil.Process().children() if "environments.host" in " ".join(child.cmdline())]


def test_what_is_printed_comes_to_the_output_of_the_run_up_to_a_limit(trouble, monkeypatch):
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(episodes, "_MAX_PRINTED_CHARS", 1000)
    episode, _ = trouble(limits=Limits(60.0, 100))
    made = episode()
    made.reset()
    assert made.talk(num=2) == "done"
    until(lambda: output.getvalue().count("\n") == 2)
    assert made.talk(num=1000) == "done"
    until(lambda: "further output is skipped" in output.getvalue())
    assert made.talk(num=1000) == "done"
    assert output.getvalue().endswith(
        "method.environment: it has printed 1,010 characters; further output is skipped\n"
    )


def test_what_prints_too_fast_is_not_kept_waiting(trouble, monkeypatch):
    """Looking for secrets takes longer than printing; what is left out is told."""
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(episodes, "_MAX_CHARS_PER_SECOND", 1000)
    episode, _ = trouble(limits=Limits(60.0, 100))
    made = episode()
    made.reset()
    assert made.talk(num=100_000) == "done"
    until(lambda: "it prints too much; the rest of this second is skipped" in output.getvalue())
    assert len(output.getvalue()) < 1_000_000


def test_halves_of_characters_are_question_marks(trouble):
    episode, _ = trouble()
    made = episode()
    made.reset()
    assert made.half() == "half ? of a character"
    with pytest.raises(RaisedError, match=r"^ValueError: half \? of a character$"):
        made.half_raised()


def _gone(process: int) -> None:
    """Wait until a process is there no more, or is a zombie that somebody else has to collect."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {process} is still there")


def test_lost_episodes_take_the_mean_of_their_group():
    rewards = torch.tensor([[1.0, 0.0], [3.0, torch.nan], [9.0, 9.0], [2.0, 1.0], [5.0, 5.0], [5.0, 5.0]])
    filled = fill_lost(rewards, [False, False, True, False, True, True], 3)
    expected = torch.tensor([[1.0, 0.0], [3.0, torch.nan], [2.0, 0.0], [2.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
    torch.testing.assert_close(filled, expected, equal_nan=True)
    assert fill_lost(rewards, [False] * 6, 3) is rewards
    assert fill_lost(rewards[:3], [True] * 3, 3).tolist() == [[0.0, 0.0]] * 3
