"""The run folder: what is in it, what it says while and after, and that no run collides with another."""

import json
import math
import os
import resource
import signal
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

import tunekit
from tests.tiny import save_chats, save_tiny_model
from tests.training.folders import made_run
from tunekit.cli.app import app
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError, DependencyError, RunError
from tunekit.recipe.load import load_recipe
from tunekit.recipe.sections.data import DataSection, DataSource
from tunekit.runs.events import EventLog, read_events
from tunekit.runs.prepared_data import absolute, record
from tunekit.runs.run import Run, find_run, list_runs
from tunekit.runs.small_files import identity_of


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with a model and rows, as a user's would be."""
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(24)))
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


def recipe(**train):
    return {
        "model": "model",
        "data": {"train": "rows.jsonl", "eval": "rows.jsonl", "max_length": 64},
        "train": {"max_steps": 3, "global_batch_size": 4, "learning_rate": 1e-3, **train},
    }


@pytest.fixture(scope="module")
def finished(workspace):
    events = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace)
        # Tokens of the same rows may be kept from another test: then nobody is told how far they are.
        patch.setenv("XDG_CACHE_HOME", str(workspace / "cache"))
        run = tunekit.train(recipe(), on_event=events.append)
    return Run(workspace / run.path), events


def test_a_finished_run_has_everything_in_its_folder(finished):
    run, _ = finished
    names = {path.name for path in run.path.iterdir()}
    assert names == {
        "recipe.yaml", "plan.yaml", "status.json", "events.jsonl", "log.txt", "data", "checkpoints",
        "fingerprints.json", "made_with.json", "model", "ranks",
    }  # fmt: skip
    model = {path.name for path in run.model_path.iterdir()}
    assert {"adapter_model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"} <= model
    assert not list(run.model_path.glob("*.bin"))


def test_status_says_how_it_ended(finished):
    run, _ = finished
    status = run.status()
    assert (status["phase"], status["step"], status["num_steps"]) == ("finished", 3, 3)
    assert status["pid"] == os.getpid()
    assert status["identity"] == identity_of(os.getpid())
    assert status["exit_reason"] == "trained to the end"
    assert run.state == "finished"


def test_the_kept_recipe_is_complete_and_works_from_anywhere(finished, workspace, tmp_path, monkeypatch):
    run, _ = finished
    kept = yaml.safe_load((run.path / "recipe.yaml").read_text(encoding="utf-8"))
    assert kept["train"]["lr_scheduler_type"] == "cosine"
    assert kept["model"]["path"] == str(workspace / "model")
    assert kept["data"]["train"]["path"] == str(workspace / "rows.jsonl")
    assert run.plan.data.format == "messages"
    assert kept["output"]["sample_prompts"] == ["double 0", "double 1", "double 2"]
    monkeypatch.chdir(tmp_path)
    assert tunekit.plan(run.path / "recipe.yaml").num_trainable_params == run.plan.num_trainable_params


def test_the_kept_recipe_names_every_source_from_the_root(here):
    kept = load_recipe(
        {
            "model": "model",
            "data": {
                "train": [{"path": "rows.jsonl", "weight": 2}, {"path": "row*.jsonl", "weight": 1}],
                "eval": ["rows.jsonl", "example:pirate_eval.jsonl", "org/name"],
            },
            "output": {"sample_prompts": []},
        }
    )
    section = record(kept, load_data(DataSection(train="rows.jsonl"))).data
    assert section.train == [
        DataSource(path=str(here / "rows.jsonl"), weight=2),
        DataSource(path=str(here / "row*.jsonl"), weight=1),
    ]
    assert section.eval == [
        DataSource(path=str(here / "rows.jsonl")),
        DataSource(path="example:pirate_eval.jsonl"),
        DataSource(path="org/name"),
    ]


def test_events_tell_the_whole_story_in_order(finished):
    run, heard = finished
    written = run.events()
    phases = [event["phase"] for event in written if event["event"] == "phase"]
    assert phases == ["loading", "training", "saving", "finished"]
    assert [event["step"] for event in written if event["event"] == "log"] == [1, 2, 3]
    evaluated = [event["step"] for event in written if event["event"] == "eval"]
    assert evaluated == [0, 1, 2, 3]
    # How far the rows are, and that all can see the run, is told to who listens; it is nothing of the run's.
    told = [event["event"] for event in heard]
    assert [kind for kind in told if kind != "rows"] == ["plan", "begun", *(event["event"] for event in written)]
    assert set(told[: told.index("plan")]) == {"rows"}
    assert {event["when"] for event in written if event["event"] == "sample"} == {"before", "after"}
    assert all(event["time"] > 1.6e9 for event in written)


def test_metrics_are_a_frame_by_step(finished):
    run, _ = finished
    metrics = run.metrics()
    assert metrics.index.name == "step"
    assert metrics.index.tolist() == [0, 1, 2, 3]
    assert metrics.loc[1:, "loss"].notna().all()
    assert metrics["eval_loss"].notna().all()
    assert run.result()["eval_loss"] == metrics.loc[3, "eval_loss"]


def test_the_loss_of_evaluation_equals_a_plain_forward_pass(finished, workspace):
    """Evaluation before the first step is the untrained model's mean over the answers' tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.tiny import make_tokenizer

    run, _ = finished
    tokenizer, model = make_tokenizer(), AutoModelForCausalLM.from_pretrained(workspace / "model").eval()
    losses = []
    for n in range(24):
        prompt = tokenizer.encode(f"<|im_start|>user\ndouble {n}<|im_end|>\n<|im_start|>assistant\n")
        answer = tokenizer.encode(f"{2 * n}<|im_end|>")
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        losses += [-row[token].item() for row, token in zip(chosen, answer, strict=True)]
    assert run.metrics().loc[0, "eval_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_a_run_reads_well_in_a_notebook_and_a_terminal(finished):
    run, _ = finished
    assert str(run).endswith(f"finished, step 3 of 3, in {run.path}")
    page = run._repr_html_()
    assert "double 0" in page and "finished" in page
    figure = run.plot()
    axes = figure.axes[0]
    assert [line.get_label() for line in axes.lines] == ["training", "evaluation"]
    assert len(axes.lines[0].get_xdata()) == 3


def test_the_card_names_base_data_recipe_and_results(finished, workspace):
    run, _ = finished
    card = (run.model_path / "README.md").read_text(encoding="utf-8")
    assert str(workspace / "model") in card
    assert str(workspace / "rows.jsonl") in card
    assert f"{run.result()['first_eval_loss']:.4f} → {run.result()['eval_loss']:.4f}" in card
    assert "max_steps: 3" in card


def test_two_runs_of_one_recipe_do_not_collide(here, monkeypatch):
    first = Run.create(tunekit_plan())
    second = Run.create(tunekit_plan())
    assert first.path != second.path
    assert find_run(first.name).path == first.path
    assert {run.name for run in list_runs()} >= {first.name, second.name}


def tunekit_plan():
    return tunekit.plan(load_recipe(recipe(), ["output.name=twin"]))


def test_a_folder_in_use_is_refused(here):
    with pytest.raises(RunError) as caught:
        Run.create(tunekit.plan(load_recipe(recipe(), ["output.dir=model"])))
    assert str(caught.value) == "output.dir: model exists and is not empty; set a new folder, or unset it"


def test_an_unknown_run_is_said_to_be_so(here):
    with pytest.raises(RunError, match="no run 'nothing' in runs"):
        find_run("nothing")
    with pytest.raises(RunError, match="is not a run folder"):
        Run("model")


def test_a_name_that_no_run_has_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs" / "pico-sft-20260101-120000")
    made_run(tmp_path / "runs" / "mine")
    for said, meant in (("sft", "pico-sft"), ("picosft", "pico-sft"), ("miin", "mine"), ("Pico_SFT", "pico-sft")):
        with pytest.raises(RunError, match=f"no run '{said}' in runs; did you mean '{meant}'?"):
            find_run(said)
    with pytest.raises(RunError, match="no run 'zzz' in runs; `tunekit runs` lists them"):
        find_run("zzz")


def test_a_picture_that_cannot_be_written_is_told_in_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs" / "good")
    told = CliRunner().invoke(app, ["runs", "show", "good", "--plot", "no/loss.png"])
    assert isinstance(told.exception, tunekit.TunekitError)
    assert str(told.exception).startswith(
        "cannot write 'no/loss.png': No such file or directory; pass a file in an existing folder"
    )


def test_one_damaged_file_keeps_nobody_from_the_other_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs" / "good")
    made_run(tmp_path / "runs" / "bad")
    (tmp_path / "runs" / "good" / "events.jsonl").write_text(
        '{"event": "log", "time": 1, "step": 1, "loss": 2.5}\n{"ev\n'
    )
    (tmp_path / "runs" / "bad" / "status.json").write_text('{"phase"')
    assert [run.name for run in list_runs()] == ["good"] and find_run("goo").name == "good"
    listed = CliRunner().invoke(app, ["runs"]).output
    assert "note: runs/bad/status.json is damaged" in listed and "loss 2.5000" in listed
    with pytest.raises(RunError, match=r"runs/bad/status\.json is damaged: .*; restore it from a copy"):
        find_run("bad").status()


@pytest.mark.slow
def test_rows_left_out_are_written_down_and_rows_held_out_are_evaluated(here, tmp_path):
    lines = (here / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    lines[4] = '{"messages": []}'
    (tmp_path / "mended.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = [f"data.train={tmp_path / 'mend*.jsonl'}", "data.eval=null", "data.eval_size=0.3", "data.max_bad_rows=1"]
    run = tunekit.train(recipe(), [*data, "output.name=mended"])
    (skipped,) = [json.loads(line) for line in (run.path / "data" / "skipped.jsonl").read_text().splitlines()]
    assert skipped["place"].endswith("mended.jsonl:5")
    facts = run.plan.data
    assert facts.num_train + facts.num_eval == 23
    assert facts.num_eval >= 2
    assert run.metrics()["eval_loss"].notna().all()
    assert run.recipe.data.train.path == str(tmp_path / "mend*.jsonl")


def test_a_loss_that_is_not_a_number_ends_the_run_and_the_status_says_so(here, tmp_path):
    with pytest.raises(RunError, match=r"step \d: the loss is "):
        tunekit.train({**recipe(learning_rate=1e30, max_steps=50), "adapter": "full"}, [f"output.dir={tmp_path / 'r'}"])
    run = Run(tmp_path / "r")
    assert run.state == "failed"
    assert "lower train.learning_rate" in run.status()["exit_reason"]
    assert run.events()[-1] | {"time": 0} == {"event": "phase", "phase": "failed", "time": 0}


def test_rows_without_a_trained_token_end_before_a_run_begins(here):
    runs = len(list_runs())
    with pytest.raises(DataError, match="trainable"):
        tunekit.train(recipe(), ["data.max_length=8"])
    assert len(list_runs()) == runs


@pytest.mark.slow
def test_a_run_that_ends_while_it_is_looked_at_has_not_died(tmp_path, monkeypatch):
    """Its status is read, then it says that it has finished and is gone, then its process is looked for."""
    run, read = made_run(tmp_path / "run"), Run.status
    program = "import sys; from tunekit.runs.run import Run; run = Run(sys.argv[1]); run.begin(); print('begun')\n"
    program += "input(); run.update_status(phase='finished')"
    command = [sys.executable, "-u", "-c", program, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        assert run.state == "starting"

        def read_before_it_ends(self):
            status = read(self)
            if process.poll() is None:
                process.communicate("\n")
            return status

        monkeypatch.setattr(Run, "status", read_before_it_ends)
        assert run.state == "finished"


@pytest.mark.slow
def test_a_killed_run_is_seen_to_have_died(here):
    code = (
        "import os, signal, sys, tunekit\n"
        "def listen(event):\n"
        "    if event['event'] == 'log': os.kill(os.getpid(), signal.SIGKILL)\n"
        f"tunekit.train({recipe()!r}, ['output.name=killed'], on_event=listen)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == -9, answer.stderr
    run = find_run("killed")
    assert run.state == "died"
    assert run.status()["phase"] == "training"


def test_an_interrupted_run_says_so(here):
    def interrupt(event):
        if event["event"] == "log":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tunekit.train(recipe(), ["output.name=interrupted"], on_event=interrupt)
    run = find_run("interrupted")
    assert (run.state, run.status()["exit_reason"]) == ("interrupted", "stopped by the user at step 1, no checkpoint")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_place_where_python_drops_it_still_ends_the_run(here):
    class Interrupting:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def interrupt(event):
        if event["event"] == "log" and event["step"] == 1:
            Interrupting()

    # A shell starts what runs in the background with the signal ignored, and the tests may run there.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            tunekit.train(recipe(max_steps=20), ["output.name=dropped"], on_event=interrupt)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    run = find_run("dropped")
    assert (run.state, run.status()["step"]) == ("interrupted", 2)


def test_a_half_written_event_is_left_for_the_next_read(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("log", step=1, loss=math.nan)
    with log.path.open("a") as stream:
        stream.write('{"event": "lo')
    events, offset = read_events(log.path)
    assert [(event["step"], event["loss"]) for event in events] == [(1, "nan")]
    with log.path.open("a") as stream:
        stream.write('g", "time": 0, "step": 2}\n')
    more, end = read_events(log.path, offset)
    assert [event["step"] for event in more] == [2]
    assert read_events(log.path, end) == ([], end)


def test_nothing_is_left_of_an_event_that_found_no_room(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("log", step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 20, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            log.write("log", step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write("log", step=3)
    assert [event["step"] for event in read_events(log.path)[0]] == [1, 3]


def test_a_damaged_event_is_named_by_its_line(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("log", step=1)
    offset = read_events(log.path)[1]
    with log.path.open("ab") as stream:
        stream.write(b'{"event": "log", "time": 0, "step": 2}\n\0\0\0\n{"event": "log", "time": 0, "step": 3}\n')
    for start in (0, offset):
        with pytest.raises(RunError, match=r"events\.jsonl:3: damaged line: .*; delete it, or restore the file"):
            read_events(log.path, start)


def test_plots_without_matplotlib_name_the_remedy(finished, monkeypatch):
    run, _ = finished
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DependencyError) as caught:
        run.plot()
    assert str(caught.value) == "plotting needs matplotlib; install it with: pip install 'tunekit[notebook]'"


def test_a_recipe_with_absolute_paths_keeps_the_name_of_a_template_beside_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("chatml", "own.jinja"):
        (tmp_path / name).write_text("text", encoding="utf-8")
    for given, kept in (("chatml", "chatml"), ("./chatml", str(tmp_path / "chatml")), ("own.jinja", "/own.jinja")):
        recipe = load_recipe({"model": {"path": "pico", "chat_template": given}, "data": {"train": "rows.jsonl"}})
        assert str(absolute(recipe).model.chat_template).endswith(kept)
