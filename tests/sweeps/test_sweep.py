"""Sweeps of real runs on pico: each is a process of its own, and they are stopped, gone on with and shown as one."""

import json
import os
import re
import shutil
import signal
import threading

import pytest
from typer.testing import CliRunner

import tunekit
from tests.tiny import save_chats
from tests.training.watching import Hold, own_signals
from tests.waiting import LIMIT_SECONDS, until
from tunekit.cli.app import app
from tunekit.errors import RunError, Stopped, TunekitError
from tunekit.launching.stop import stop_run
from tunekit.runs.small_files import requested
from tunekit.sweeps import begin
from tunekit.sweeps.folder import known_sweep
from tunekit.sweeps.page import page

RECIPE = """\
model: pico
data: {train: rows.jsonl, eval: few.jsonl, max_length: 64}
adapter: {type: lora, rank: 4}
train: {max_steps: 12, global_batch_size: 4, eval_steps: 6, save_steps: 6, seed: 3}
output: {sample_prompts: []}
"""


def command(*arguments):
    """A command in this process: its exit code, what it printed, and the error that the program would print."""
    with own_signals():
        done = CliRunner().invoke(app, [str(one) for one in arguments])
    return done.exit_code, done.stdout, str(done.exception) if isinstance(done.exception, TunekitError) else ""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with rows and a recipe, which is the working directory of all tests here."""
    folder = tmp_path_factory.mktemp("sweeps")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    save_chats(folder / "few.jsonl", ((f"double {n}", f"{2 * n}") for n in range(30, 34)))
    (folder / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # Its runs wait in a line, in which those of other tests are not.
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        # However long the last checkpoint of a run takes, it is waited for.
        patch.setattr("tunekit.launching.stop.LEAST_SECONDS", LIMIT_SECONDS)
        yield folder
        for made in tunekit.list_sweeps():
            tunekit.stop_sweep(made, now=True)


@pytest.fixture(scope="module")
def stopped(workspace, tmp_path_factory):
    """A grid of 2 x 2 that Ctrl-C ends while its second run trains, which does not come to its end before.

    One learning rate fails, and how many checkpoints are kept changes nothing in what is learned.
    """
    hold = Hold(tmp_path_factory.mktemp("hold"), "-02/checkpoints/.saving-6")

    def interrupt():
        (made,) = until(tunekit.list_sweeps)
        second = made.trials()[1]
        until(lambda: (run := made.run_of(second)) and any(event["event"] == "log" for event in run.events()))
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: requested(made.run_of(second).path))
        hold.go_on()

    values = {"train.save_total_limit": [2, 3], "train.learning_rate": [1e30, 3e-3]}
    # What a shell starts in the background ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    told = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", hold.environment()["PYTHONPATH"])
            with pytest.raises(Stopped, match="stopped by the user") as raised:
                tunekit.sweep("mine.yaml", values, ["train.max_grad_norm=1e30"], on_event=told.append)
    finally:
        signal.signal(signal.SIGINT, before)
    return tunekit.list_sweeps()[0], told, raised.value


@pytest.fixture(scope="module")
def resumed(stopped):
    """The same, gone on with to its end by the command line: what that printed."""
    made, _, _ = stopped
    return made, made.outcomes(), command("resume", made.path)


@pytest.mark.slow
def test_every_combination_is_planned_before_the_first_run_begins(stopped):
    _, told, _ = stopped
    assert [event["event"] for event in told][:2] == ["sweep", "begins"]
    plans = told[0]["plans"]
    assert [dict(variant.changes) for variant in plans] == [
        {"train.save_total_limit": num, "train.learning_rate": rate} for num in (2, 3) for rate in (1e30, 3e-3)
    ]
    assert all(isinstance(variant.plan, tunekit.Plan) for variant in plans)


@pytest.mark.slow
def test_ctrl_c_ends_the_run_that_trains_with_a_checkpoint_and_says_how_to_go_on(stopped, resumed):
    made, _, raised = stopped
    assert raised.exit_code == 130 and raised.hint == f"resume with: tunekit resume {made.path}"
    _, before, _ = resumed
    assert [one.state for one in before] == ["failed", "interrupted", "waiting", "waiting"]
    assert 0 < before[1].step < 12


@pytest.mark.slow
def test_a_run_that_was_stopped_comes_to_the_losses_of_one_that_was_not(resumed):
    made, _, _ = resumed
    failed, stopped, _, whole = (one.run for one in made.outcomes())
    assert any(event["event"] == "resume" for event in stopped.events())
    assert not any(event["event"] == "resume" for event in whole.events())
    for name in ("loss", "eval_loss"):
        assert stopped.metrics()[name].dropna().tolist() == whole.metrics()[name].dropna().tolist()
    # What failed stays as it is: it would fail again.
    assert [event.get("phase") for event in failed.events()].count("loading") == 1


@pytest.mark.slow
def test_a_run_that_fails_is_told_with_its_reason_and_the_others_go_on(resumed):
    made, _, (exit_code, _, error) = resumed
    states = [one.state for one in made.outcomes()]
    assert states == ["failed", "finished", "failed", "finished"]
    assert "not finite" in made.outcomes()[0].why or "nan" in made.outcomes()[0].why
    assert "2 of 4 runs did not finish: 1 failed, 3 failed" in error and exit_code == 1


@pytest.mark.slow
def test_the_table_marks_the_best_of_those_that_finished(resumed):
    made, _, (_, printed, _) = resumed
    outcomes = made.outcomes()
    best = min((one for one in outcomes if one.state == "finished"), key=lambda one: one.run.result()["eval_loss"])
    assert made.best().trial == best.trial
    (line,) = [line for line in printed.splitlines() if "← best" in line]
    assert line.split()[:3] == [str(best.trial.number), str(best.trial.changes["train.save_total_limit"]), "0.003"]
    assert f"{best.run.result()['eval_loss']:.4f}" in line and "12/12" in line
    assert f"best run: {best.run.path}" in printed
    shown = command("sweep", "show", made.name)
    assert shown[0] == 0 and line in shown[1]


@pytest.mark.slow
def test_runs_of_a_sweep_lie_among_the_others_and_have_its_tag(resumed):
    made, _, _ = resumed
    mine = [run for run in tunekit.list_runs() if f"sweep:{made.name}" in run.tags]
    assert sorted(run.name for run in mine) == [f"{made.name}-{number:02d}" for number in (1, 2, 3, 4)]


@pytest.mark.slow
def test_json_has_what_the_table_has(resumed):
    made, _, _ = resumed
    exit_code, printed, _ = command("sweep", "show", made.path, "--json")
    words = json.loads(printed)
    assert exit_code == 0 and words["best"] == made.best().trial.number
    assert words["measure"] == {"name": "eval_loss", "greater_is_better": False}
    assert [run["state"] for run in words["runs"]] == ["failed", "finished", "failed", "finished"]
    assert made.to_frame()["value"].tolist()[1] == words["runs"][1]["value"]


@pytest.mark.slow
def test_the_pictures_show_every_run_that_has_a_measure(resumed, tmp_path):
    made, _, _ = resumed
    assert command("sweep", "show", made.path, "--plot", tmp_path / "s.png")[1].strip() == str(tmp_path / "s.png")
    for picture in (tmp_path / "s.png", made.path / "sweep.png"):
        assert picture.read_bytes()[:4] == b"\x89PNG"
    page = (made.path / "sweep.html").read_text(encoding="utf-8")
    assert page.count("<polyline") == sum(one.value is not None for one in made.outcomes())
    assert "<script" not in page and "2: save_total_limit=2" in page and "· best" in page
    assert command("sweep", "show", made.path, "--plot", tmp_path / "no" / "s.png")[2].startswith("cannot write")


@pytest.mark.slow
def test_what_is_swept_is_nothing_that_all_runs_have_in_common(stopped, tmp_path):
    # A copy: its page is asked for before any of its runs has begun.
    made, _, _ = stopped
    other = tunekit.Sweep(shutil.copytree(made.path, tmp_path / "sweeps" / "other"))
    text = (other.path / "sweep.yaml").read_text(encoding="utf-8")
    axes = "axes:\n  adapter.type: [lora, full]\n  train.learning_rate: log:0.0001..0.01\nsearch:"
    (other.path / "sweep.yaml").write_text(re.sub("axes:.*?search:", axes, text, flags=re.DOTALL), encoding="utf-8")
    (other.path / "trials.json").write_text("[]", encoding="utf-8")
    common = page(other).partition("Common to all runs")[2]
    assert "max_steps: 12" in common and "rows.jsonl" in common
    assert not any(words in common for words in ("adapter", "rank", "lora", "learning_rate"))


@pytest.mark.slow
def test_stopping_a_sweep_that_is_over_changes_nothing(resumed):
    made, _, _ = resumed
    before = made.trials()
    assert command("stop", made.path)[1].strip() == f"{made.name}: 2 failed, 2 finished"
    assert made.trials() == before


@pytest.mark.slow
def test_a_sweep_is_conducted_by_one_process(resumed):
    made, _, _ = resumed
    assert not made.is_conducted()
    with made.conductor(), pytest.raises(RunError, match="another process is running"):
        tunekit.resume_sweep(made)


@pytest.mark.slow
def test_optuna_chooses_three_and_a_run_that_somebody_ends_is_left_for_later(workspace, tmp_path, monkeypatch):
    told = []
    # The second never comes to its end by itself.
    monkeypatch.setenv("PYTHONPATH", Hold(tmp_path / "hold", "-02/stacks/rank-0.txt").environment()["PYTHONPATH"])

    def end_the_second(event):
        told.append(event)
        if event["event"] == "begins" and event["outcome"].trial.number == 2:
            threading.Thread(target=ends, daemon=True).start()

    def ends():
        made = next(one for one in tunekit.list_sweeps() if one.spec.search == "optuna")
        run = until(lambda: made.run_of(made.trials()[1]))
        stop_run(run, now=True, tell=lambda words: None)

    values = {"train.learning_rate": "1e-5..1e-2", "adapter.rank": [2, 4]}
    made = tunekit.sweep("mine.yaml", values, ["train.max_steps=1"], optuna=3, seed=1, on_event=end_the_second)
    outcomes = made.outcomes()
    assert [one.state for one in outcomes] == ["finished", "interrupted", "finished"]
    assert len({json.dumps(one.trial.changes) for one in outcomes}) == 3
    assert all(1e-5 <= one.trial.changes["train.learning_rate"] <= 1e-2 for one in outcomes)

    import optuna

    study = optuna.load_study(study_name=made.name, storage=f"sqlite:///{made.path / 'study.db'}")
    values = {trial.user_attrs["number"]: trial.value for trial in study.trials}
    assert values == {1: outcomes[0].value, 3: outcomes[2].value}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["adapter.rnak=4,8"], "command line: adapter.rnak: unknown key; did you mean 'rank'?"),
        (["adapter.rank=4,-8"], "with adapter.rank=-8: command line: adapter.rank: must be greater than 0, got -8"),
        (["adapter.rank="], "adapter.rank=: no value after '='"),
        (["train.max_steps=3"], "no key has several values"),
        (["adapter.rank=4,8", "--by", "nonsense"], "--by nonsense: sft runs log no such metric"),
        (
            ["adapter.rank=4,8", "--by", "eval_loss", "data.eval=null"],
            "--by eval_loss: no evaluation data",
        ),
        (["adapter.rank=4,8", "output.dir=here"], "output.dir: unsupported in a sweep"),
        (["adapter.rank=4,8", "--random", "2", "--optuna", "2"], "--random and --optuna are mutually exclusive"),
        (["adapter.rank=4,8", "--random", "3"], "3 runs exceed the 2 combinations"),
        (["model.path=pico,nothing-here"], "with model.path=nothing-here: model.path: 'nothing-here' is not"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(workspace, words, said):
    before = sorted(workspace.rglob("*"))
    exit_code, _, error = command("sweep", "mine.yaml", *words)
    assert exit_code == 1 and error.startswith(said), error  # The program makes 2 of it, as of every such error.
    assert sorted(workspace.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "num_runs"),
    [(["adapter.rank=16,32"], 2), (["adapter.rank=16,32", "train.learning_rate=1e-5..1e-3", "--optuna", "3"], 3)],
)
def test_runs_that_would_fill_the_disk_together_are_refused_before_the_first(workspace, words, num_runs, monkeypatch):
    run_bytes = tunekit.plan("mine.yaml", ["adapter.rank=32"]).saving.run_bytes
    monkeypatch.setattr(begin, "free_bytes", lambda place: run_bytes)
    monkeypatch.setattr(begin, "conduct", lambda *values: None)
    before = sorted(workspace.rglob("*"))
    exit_code, _, error = command("sweep", "mine.yaml", *words)
    assert exit_code == 1 and error.startswith(f"{num_runs} runs need up to "), error
    assert sorted(workspace.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep"], "no recipe"),
        (["sweep", "show", "nowhere"], "no sweep 'nowhere' in sweeps"),
        (["sweep", "show", "."], ". is not a sweep folder"),
        (["sweep", "--resume", "nowhere"], "no sweep 'nowhere' in sweeps"),
        (["sweep", "mine.yaml", "--resume", "nowhere"], "--resume and a recipe exclude each other"),
    ],
)
def test_what_is_no_sweep_is_refused_in_a_line(workspace, words, said):
    _, _, error = command(*words)
    assert error.startswith(said) and "\n" not in error


@pytest.mark.slow
def test_a_damaged_sweep_is_named(resumed, tmp_path):
    made, _, _ = resumed
    folder = tmp_path / "sweeps" / "broken"
    folder.mkdir(parents=True)
    (folder / "sweep.yaml").write_text("axes: [", encoding="utf-8")
    (folder / "trials.json").write_text("[{", encoding="utf-8")
    broken = known_sweep(str(folder))
    with pytest.raises(RunError, match=r"trials\.json is damaged"):
        broken.trials()
    with pytest.raises(RunError, match=r"sweep\.yaml is damaged"):
        _ = broken.spec
    assert command("sweep", "show", folder)[2].startswith(f"{folder}")
    assert made.spec.parallel == 1
