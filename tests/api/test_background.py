"""Runs that are started as processes of their own: they outlive whoever starts them, and say why there is none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import tunekit
from tests.tiny import save_chats
from tests.training.watching import Hold
from tests.waiting import until
from tunekit.api.background import CONSOLE
from tunekit.errors import RecipeError, RunError, TunekitError
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow

FINAL = (*FINAL_PHASES, "died")


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A folder with rows and a recipe of a few steps, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    text = "model: pico\ndata: {train: rows.jsonl, max_length: 64}\ntrain: {max_steps: 3, global_batch_size: 4}\n"
    (tmp_path / "mine.yaml").write_text(f"{text}output: {{sample_prompts: []}}\n", encoding="utf-8")
    return tmp_path


def ended(run):
    """How a run ended that is waited for."""
    return until(lambda: state if (state := run.state) in FINAL else None)


def test_a_detached_run_is_there_at_once_and_trains_to_the_end_by_itself(workspace):
    run = tunekit.start("mine.yaml", ["train.max_steps=2"])
    assert run.path.parent == Path("runs") and run.name.startswith("mine-")
    assert run.state not in FINAL
    pid = run.status()["pid"]
    assert pid != os.getpid() and os.getsid(pid) == pid
    assert psutil.Process(pid).cmdline()[1:4] == ["-m", "tunekit", "train"]
    assert ended(run) == "finished"
    assert run.status()["step"] == 2
    words = (run.path / CONSOLE).read_text(encoding="utf-8")
    assert "reading the data" in words and f"run  {run.path}" in words and "Traceback" not in words
    # Nothing is left of it, not even a number.
    until(lambda: not psutil.pid_exists(pid))


def test_a_mapping_and_a_loaded_recipe_start_as_their_file_does(workspace):
    recipe = tunekit.load_recipe("mine.yaml", ["train.max_steps=1"])
    run = tunekit.start(recipe)
    assert run.name.startswith("mine-") and run.recipe.train.max_steps == 1
    assert ended(run) == "finished"


def test_a_run_goes_on_when_its_starter_is_killed(workspace, tmp_path):
    # It does not come to its end before.
    hold = Hold(tmp_path / "hold", "/stacks/rank-0.txt")
    program = "import tunekit; print(tunekit.start('mine.yaml', ['train.max_steps=30']).path, flush=True); input()"
    starter = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | hold.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run = Run(starter.stdout.readline().strip())
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    assert run.state not in FINAL
    hold.go_on()
    assert ended(run) == "finished"


def test_a_run_begins_although_its_starter_dies_before_it_hears_of_it(workspace):
    program = "import tunekit; tunekit.start('mine.yaml', ['output.dir=runs/alone'])"
    starter = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    until(lambda: psutil.Process(starter.pid).children())
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    until(lambda: Path("runs/alone/status.json").exists())
    assert ended(Run("runs/alone")) == "finished"


@pytest.mark.parametrize(
    ("source", "overrides", "kind", "words"),
    [
        ("mine.yaml", ["adapter.rnak=3"], RecipeError, "did you mean 'rank'"),
        ("nowhere.yaml", [], RecipeError, "nowhere.yaml"),
        ("mine.yaml", ["data.train=missing.jsonl"], TunekitError, "missing.jsonl"),
    ],
)
def test_a_run_that_cannot_be_started_says_so_as_the_command_line_does(workspace, source, overrides, kind, words):
    with pytest.raises(kind, match=words) as raised:
        tunekit.start(source, overrides)
    command = [sys.executable, "-m", "tunekit", "train", source, *overrides]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert str(raised.value).strip() == said.stderr.strip()
    assert not Path("runs").exists()


def test_a_hub_that_cannot_be_reached_is_told_in_the_same_words_with_detach(workspace):
    command = [sys.executable, "-m", "tunekit", "train", "mine.yaml", "model.path=Qwen/Qwen3-0.6B"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    plain, detached = (
        subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=offline)
        for options in ([], ["--detach"])
    )
    assert (plain.returncode, detached.returncode) == (2, 2)
    assert "the Hub cannot be reached" in detached.stderr and detached.stderr == plain.stderr


def test_a_detached_run_is_stopped_in_its_first_moment_and_at_any_other(workspace):
    run = tunekit.start("mine.yaml", ["train.max_steps=100000"])
    assert "interrupted" in tunekit.stop(run)
    assert run.state == "interrupted"


def test_a_run_that_was_stopped_goes_on_detached(workspace, tmp_path, monkeypatch):
    run = tunekit.start("mine.yaml", ["train.max_steps=100000"])
    until(lambda: any(event["event"] == "log" for event in run.events()))
    tunekit.stop(run)
    step = run.status()["step"]
    assert run.state == "interrupted" and 0 < step < 100_000
    hold = Hold(tmp_path / "hold", "/stacks/rank-0.txt")
    with monkeypatch.context() as environment:
        environment.setenv("PYTHONPATH", hold.environment()["PYTHONPATH"])
        again = tunekit.start_resume(run, [f"train.max_steps={step + 5}"])
    assert again.path.resolve() == run.path.resolve() and again.state not in FINAL
    hold.go_on()
    assert ended(run) == "finished" and run.status()["step"] == step + 5
    with pytest.raises(RunError, match="finished"):
        tunekit.start_resume(run)


def test_the_command_line_comes_back_and_says_how_to_watch_and_stop(workspace):
    command = [sys.executable, "-m", "tunekit", "train", "mine.yaml", "--detach"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    run = Run(said.split()[0])
    assert f"tunekit stop {run.path}" in said
    assert ended(run) == "finished"


def test_a_detached_sweep_is_there_at_once_and_ends_by_itself(workspace):
    folder = tunekit.start_sweep("mine.yaml", ["train.learning_rate=1e-4,1e-3", "train.max_steps=1"])
    sweep = tunekit.find_sweep(str(folder))
    assert sweep.path.parent == Path("sweeps") and sweep.spec.num_runs == 2
    until(lambda: {outcome.state for outcome in sweep.outcomes()} == {"finished"})
    rates = {outcome.run.recipe.train.learning_rate for outcome in sweep.outcomes()}
    assert rates == {1e-4, 1e-3} and all(outcome.run.tags == [sweep.tag] for outcome in sweep.outcomes())
    assert "finished" in until(lambda: (folder / CONSOLE).read_text(encoding="utf-8"))
    with pytest.raises(RecipeError, match=r"adapter\.rank"):
        tunekit.start_sweep({"model": "pico", "data": {"train": "rows.jsonl"}}, ["adapter.rank=4,-1"])
