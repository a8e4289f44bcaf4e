"""Runs that wait for devices in line: real ones, each a process of its own, some of which are killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from filelock import FileLock

import tunekit
from tests.tiny import save_chats
from tests.waiting import LIMIT_SECONDS, until
from tunekit.errors import Stopped
from tunekit.estimates.hardware.machines import find_machine
from tunekit.launching.local import Ticket, devices_of, tickets, turn, when_served
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.run import Run


@contextlib.contextmanager
def holder(folder, ticket):
    """Another process, which has a ticket."""
    folder.mkdir(parents=True)
    file = folder / f"{ticket.number:08d}.json"
    program = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held'); input()"
    command = [sys.executable, "-u", "-c", program, str(file.with_suffix(".lock"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    file.write_text(json.dumps({**vars(ticket), "devices": list(ticket.devices)}), encoding="utf-8")
    yield
    process.kill()
    process.communicate()


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Starts runs that wait in a line of the test's own; what is left of them at its end is killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    # However long their last checkpoint takes, it is waited for.
    monkeypatch.setattr("tunekit.launching.stop.LEAST_SECONDS", LIMIT_SECONDS)
    begun = []

    def begin(name, num_steps):
        recipe = {
            "model": "pico",
            "data": {"train": "rows.jsonl", "max_length": 64},
            "train": {"max_steps": num_steps, "global_batch_size": 4},
            "output": {"sample_prompts": [], "dir": f"runs/{name}"},
        }
        begun.append(tunekit.start(recipe, queue=True))
        return begun[-1]

    yield begin
    for run in begun:
        tunekit.stop(run, now=True)


def place(run):
    return run.status().get("place_in_line")


def trains(run):
    return any(event["event"] == "log" for event in run.events())


@pytest.mark.slow
def test_runs_are_served_in_their_order_and_a_killed_one_gives_back_what_it_had(begin):
    first = begin("first", 100_000)
    second, third = begin("second", 100_000), begin("third", 2)
    assert (second.state, place(second)) == ("queued", 1)
    assert (third.state, place(third)) == ("queued", 2)
    until(lambda: trains(first))
    (device,) = tunekit.devices()
    assert device.uuid == "cpu"
    assert [Run(path).name for path in device.runs] == ["first"]
    assert [Run(path).name for path in device.waiting] == ["second", "third"]

    os.kill(first.status()["pid"], signal.SIGKILL)
    until(lambda: trains(second))
    assert first.state == "died"
    until(lambda: place(third) == 1)
    assert third.state == "queued"
    told = [(event["place"], event["behind"]) for event in third.events() if event["event"] == "queue"]
    # It may look between the end of the first and the turn of the second.
    assert told[0] == (2, ["first", "second"]) and told[-1] == (1, ["second"])
    assert told[1:-1] in ([], [(2, ["second"])])

    tunekit.stop(second)
    until(lambda: third.state in FINAL_PHASES)
    assert (third.state, third.status()["step"], place(third)) == ("finished", 2, None)
    assert until(lambda: not tickets())


@pytest.mark.slow
def test_a_run_that_waits_is_stopped_and_leaves_the_line(begin):
    first, second, third = begin("first", 100_000), begin("second", 2), begin("third", 2)
    said = tunekit.stop(second)
    assert second.state == "interrupted" and "was waiting for cpu" in said
    assert not any(event["event"] == "log" for event in second.events())
    until(lambda: place(third) == 1)
    # A signal does the same, and one that cannot be heard leaves nothing behind either.
    os.kill(third.status()["pid"], signal.SIGTERM)
    until(lambda: third.state == "interrupted")
    fourth = begin("fourth", 2)
    assert fourth.state == "queued"
    os.kill(fourth.status()["pid"], signal.SIGKILL)
    until(lambda: fourth.state == "died")
    # Its other threads may take a moment more.
    until(lambda: [ticket.run for ticket in tickets()] == [str(first.path.resolve())])
    # It can be gone on with, and is at the end of the line then.
    tunekit.stop(first)
    again = tunekit.start_resume(first, queue=True)
    assert until(lambda: again.state == "training")


def planned_run(folder, monkeypatch):
    """A run on another machine's accelerator, in a line of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    recipe = {"model": "pico", "data": {"train": str(folder / "rows.jsonl")}, "train": {"max_steps": 2}}
    return Run.create(tunekit.plan(recipe | {"output": {"dir": str(folder / "run")}}, on="h100"))


def test_a_run_that_does_not_wait_is_told_to_have_begun_on_an_accelerator_too(tmp_path, monkeypatch):
    run = planned_run(tmp_path, monkeypatch)
    told = []
    with turn(run, waits=False, listener=told.append):
        assert told == [{"event": "begun", "run": run}]
        assert [ticket.run for ticket in tickets()] == [str(run.path)]


def test_a_run_waits_behind_one_that_waits_for_the_same_device(tmp_path, monkeypatch):
    run, places = planned_run(tmp_path, monkeypatch), []
    folder = tmp_path / "state" / "tunekit" / "line" / os.uname().nodename
    folder.mkdir(parents=True)
    earlier = Ticket(1, str(tmp_path / "earlier"), devices_of(run.plan), waits=True)
    (folder / "00000001.json").write_text(json.dumps({**vars(earlier), "devices": list(earlier.devices)}))

    def stop_waiting(event):
        if event["event"] == "queue":
            places.append((event["place"], event["behind"]))
            raise KeyboardInterrupt

    with FileLock(folder / "00000001.lock"), pytest.raises(Stopped), turn(run, waits=True, listener=stop_waiting):
        pass
    assert places == [(2, ["earlier"])] and run.state == "interrupted"


def test_an_idle_device_is_taken_before_one_that_has_to_be_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    machine = find_machine("2xh100").hardware()
    named = tuple(
        device.model_copy(update={"visible_as": f"GPU-{index}", "memory_free_bytes": int(free)})
        for index, (device, free) in enumerate(zip(machine.accelerators, (5e9, 84e9), strict=True))
    )
    machine = machine.model_copy(update={"accelerators": named})
    assert when_served(machine) == machine
    with holder(tmp_path / "tunekit" / "line" / os.uname().nodename, Ticket(1, str(tmp_path), ("GPU-0",), waits=False)):
        served = when_served(machine)
        # Its memory is taken for free, but that of the other is still more.
        assert 75e9 < served.accelerators[0].memory_free_bytes < served.accelerators[1].memory_free_bytes
        assert [device.visible_as for device in served.freest(1)] == ["GPU-1"]
    assert when_served(machine) == machine
