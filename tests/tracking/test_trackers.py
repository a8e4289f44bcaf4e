"""Runs that are reported to trackers: what these show, read with their own means, and what becomes of a run without."""

import html
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from transformers import TrainerCallback

from tests.processes import in_processes, own_port
from tests.runs.test_metrics import GRPO
from tests.tiny import save_chats, save_tiny_model
from tests.training.folders import made_run
from tests.training.watching import own_signals
from tests.waiting import LIMIT_SECONDS
from tunekit.api import verbs
from tunekit.cli.app import main
from tunekit.errors import DependencyError, RunError
from tunekit.reporting.report import report
from tunekit.runs.events import EventLog
from tunekit.runs.run import Run
from tunekit.tracking.tracker import Pump
from tunekit.tracking.trackers import WAIT_SECONDS, check_trackers, environment_of, folder_of, kept_of

ALL = ["tensorboard", "wandb", "mlflow", "trackio"]
SHORT, LONG = 4, 6


class Server:
    """MLflow's own server on a port of its own, which can be started again with what it knew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = own_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        store = f"sqlite:///{self.folder / 'server.db'}"
        words = ["--backend-store-uri", store, "--port", str(self.port), "--workers", "1", "--host", "127.0.0.1"]
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *words],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                cwd=self.folder,
            )
            for line in self.process.stderr:
                log.write(line)
                if "Uvicorn running" in line:
                    break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        assert urllib.request.urlopen(f"{self.uri}/health").read() == b"OK"

    def stop(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()


class AllThere:
    """Holds a training up at its last step until all trackers know of it, however long their libraries take to load."""

    def __init__(self, trackers, last: int) -> None:
        self.missing, self.last = set(trackers), last
        self.are_there = threading.Event()

    def __call__(self, event) -> None:
        if event["event"] == "tracker":
            self.missing.discard(event["name"])
            if not self.missing:
                self.are_there.set()
        elif event["event"] == "log" and event["step"] == self.last:
            assert self.are_there.wait(LIMIT_SECONDS)


class Holding(AllThere):
    """Takes the server away when the trackers are there, and lets the training go on when that was noticed."""

    def __init__(self, trackers, server: Server) -> None:
        super().__init__(trackers, last=2)
        self.server = server
        self.is_noticed = threading.Event()

    def __call__(self, event) -> None:
        super().__call__(event)
        if event["event"] == "warning" and "MLflow" in event["message"]:
            self.is_noticed.set()
        elif event["event"] == "log" and event["step"] == 2:
            self.server.stop()
        elif event["event"] == "log" and event["step"] == 3:
            assert self.is_noticed.wait(LIMIT_SECONDS)


def recipe_for(folder: Path, name: str, report_to, **parallel):
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": "full",
        "train": {"max_steps": SHORT, "global_batch_size": 4, "learning_rate": 1e-3, "eval_steps": 2, "save_steps": 2},
        "parallel": parallel,
        "output": {"sample_prompts": [], "dir": str(folder / name), "report_to": report_to},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trackers")
    save_tiny_model(folder / "model", hidden=32, layers=1)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


@pytest.fixture(scope="module")
def server(folder):
    server = Server(folder)
    try:
        server.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", server.uri)
            patch.setenv("WANDB_MODE", "offline")
            # Answers and last figures may take their time.
            patch.setattr("tunekit.tracking.trackers.REACH_SECONDS", LIMIT_SECONDS)
            patch.setattr("tunekit.tracking.trackers.WAIT_SECONDS", dict.fromkeys(WAIT_SECONDS, LIMIT_SECONDS))
            yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def plain(folder):
    return verbs.train(recipe_for(folder, "plain", []))


@pytest.fixture(scope="module")
def shown(folder, server):
    """A run that four trackers are told of; the server of one goes away in its midst, and is back when it goes on."""
    run = verbs.train(recipe_for(folder, "shown", ALL), on_event=Holding(ALL, server))
    cut_off = run.events()
    server.start()
    verbs.resume(run, [f"train.max_steps={LONG}"], on_event=AllThere(ALL, LONG))
    return run, cut_off


def told(events, kind, name):
    return {event["step"]: event[name] for event in events if event["event"] == kind}


def wandb_records(folder: Path):
    """The records of offline files of Weights & Biases: protobuf messages, framed as LevelDB's logs are."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, place, message = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            _, length, kind = struct.unpack("<IHB", content[place : place + 7])
            left = 32768 - place % 32768
            if left < 7 or kind == 0:
                place += left
                continue
            message += content[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(message)
                message = b""


def of_wandb(folder: Path, name: str) -> dict[int, float]:
    found = {}
    for record in wandb_records(folder):
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        if name in values:
            found[values["train/global_step"]] = values[name]
    return found


def of_trackio(folder: Path, name: str) -> dict[int, float]:
    with closing(sqlite3.connect(folder / "trackio" / "tunekit.db")) as store:
        rows = [json.loads(row) for (row,) in store.execute("select metrics from metrics where run_name = 'shown'")]
    return {row["train/global_step"]: row[name] for row in rows if name in row}


def of_tensorboard(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {point.step: point.value for point in reader.Scalars(name)}


def of_mlflow(server: Server, name: str) -> dict[int, float]:
    return {
        point.step: point.value for point in client_of(server).get_metric_history(only_run(server).info.run_id, name)
    }


def client_of(server: Server):
    from mlflow import MlflowClient

    return MlflowClient(server.uri)


def only_run(server: Server, name: str = "shown"):
    client = client_of(server)
    experiment = client.get_experiment_by_name("tunekit")
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("log", "loss"), ("log", "learning_rate"), ("eval", "eval_loss")])
def test_every_tracker_shows_what_the_run_has_logged_the_steps_without_a_server_too(shown, server, kind, name):
    run, _ = shown
    expected = told(run.events(), kind, name)
    assert max(expected) == LONG
    assert len(expected) == (LONG if kind == "log" else 1 + LONG // 2)
    prefixed = f"train/{name}" if kind == "log" else name.replace("_", "/", 1)
    trackers = run.path / "trackers"
    assert of_mlflow(server, name) == expected
    assert of_wandb(trackers, prefixed) == expected
    assert of_trackio(trackers, prefixed) == expected
    singles = {step: float(np.float32(value)) for step, value in expected.items()}
    assert of_tensorboard(trackers / "tensorboard", prefixed) == singles


@pytest.mark.slow
def test_trackers_change_no_loss(shown, plain):
    _, cut_off = shown
    assert told(cut_off, "log", "loss") == told(plain.events(), "log", "loss")
    assert told(cut_off, "eval", "eval_loss") == told(plain.events(), "eval", "eval_loss")


@pytest.mark.slow
def test_a_server_that_goes_away_is_named_and_the_run_trains_on(shown):
    run, cut_off = shown
    assert cut_off[-1]["event"] == "warning"
    assert cut_off[-1]["message"].startswith("MLflow: ")
    assert "its last metrics are missing" in cut_off[-1]["message"]
    assert (run.path / "model" / "model.safetensors").is_file()
    assert [event for event in cut_off if event["event"] == "phase"][-1]["phase"] == "finished"
    # The others were not held up by it.
    assert max(of_wandb(run.path / "trackers", "train/loss")) == LONG


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_same_one_there_with_the_recipe_as_its_configuration(shown, server):
    run, _ = shown
    mlflow_run = only_run(server)
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.data.params["train.learning_rate"] == "0.001"
    assert mlflow_run.data.params["method.type"] == "sft"
    begun = [record.run for record in wandb_records(run.path / "trackers") if record.WhichOneof("record_type") == "run"]
    assert len(begun) == 2
    assert {(one.run_id, one.project, one.display_name) for one in begun} == {
        (kept_of(run, "wandb").names["WANDB_RUN_ID"], "tunekit", "shown")
    }
    (place,) = {event["message"] for event in run.events() if event["event"] == "tracker" and event["name"] == "mlflow"}
    assert place == f"{server.uri}/#/experiments/{mlflow_run.info.experiment_id}/runs/{mlflow_run.info.run_id}"


@pytest.mark.slow
def test_the_report_of_a_run_says_where_it_is_shown_and_what_failed(shown):
    run, cut_off = shown
    text = html.unescape(report(run).partition("<h2>Trackers</h2>")[2].partition("<h2>Environment</h2>")[0])
    # Where it went on; Weights & Biases has a file of each part.
    places = {event["name"]: event["message"] for event in run.events() if event["event"] == "tracker"}
    assert len(places) == 4 and all(words in text for words in places.values())
    failure = cut_off[-1]["message"].removeprefix("MLflow: ")
    assert text.count("its last metrics are missing") == 1 and failure in text
    assert text.count("all metrics were uploaded later") == 1
    assert text.index("<dt>MLflow") < text.index(failure) < text.index("<dt>trackio")


@pytest.mark.slow
def test_one_of_several_processes_reports(folder):
    run = verbs.make_run(recipe_for(folder, "double", ["tensorboard"], num_processes=2))
    in_processes(2, work_in_place, str(run.path))
    assert run.state == "finished"
    (_,) = (run.path / "trackers" / "tensorboard").iterdir()
    losses = told(run.events(), "log", "loss")
    assert len(losses) == SHORT
    assert of_tensorboard(run.path / "trackers" / "tensorboard", "train/loss") == pytest.approx(losses, rel=1e-6)


def work_in_place(path: str) -> None:
    from tunekit.runs.small_files import place_of
    from tunekit.training.worker import work

    work(Run(path), AllThere(["tensorboard"], SHORT), place_of())


@pytest.mark.slow
def test_a_run_whose_process_is_killed_has_failed_in_its_trackers_too(server, tmp_path):
    run = made_run(tmp_path / "killed", phase="training", step=1)
    log = EventLog(run.path / "events.jsonl")
    log.write("log", step=1, epoch=0.5, grad_norm=float("nan"), **GRPO)
    (run.path / "trackers").mkdir()
    words = [sys.executable, "-m", "tunekit.tracking.process", str(run.path), "mlflow", "wandb"]
    said = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert {json.loads(line)["name"] for line in said.stdout.splitlines()} == {"mlflow", "wandb"}
    found = only_run(server, "killed")
    assert found.info.status == "FAILED"
    assert found.data.metrics["rewards/mine/mean"] == GRPO["rewards/mine/mean"]
    assert np.isnan(found.data.metrics["grad_norm"])
    (code,) = (r.exit.exit_code for r in wandb_records(run.path / "trackers") if r.WhichOneof("record_type") == "exit")
    assert code == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("tracker", "variables", "words"),
    [
        ("wandb", {}, "wandb is not logged in to http://127.0.0.1:9; run `wandb login`, set WANDB_API_KEY, or log"),
        (
            "wandb",
            {"WANDB_API_KEY": 10 * "0123"},
            "wandb cannot be reached at http://127.0.0.1:9: [Errno",
        ),
        ("wandb", {"WANDB_MODE": "of"}, "wandb's settings: mode: Input should be 'online', 'offline'"),
        (
            "mlflow",
            {"MLFLOW_TRACKING_URI": "http://me:swordfish99@127.0.0.1:9"},
            "reached at http://127.0.0.1:9/health:",
        ),
        (
            "trackio",
            {"TRACKIO_SERVER_URL": "http://127.0.0.1:9/?write_token=swordfish99"},
            "reached at http://127.0.0.1:9/:",
        ),
        ("trackio", {"TRACKIO_SPACE_ID": "me/figures"}, "trackio's space me/figures cannot be reached: HF_"),
        ("tensorbord", {}, "must be one of tensorboard, wandb, mlflow, trackio, got 'tensorbord'"),
    ],
)
def test_a_tracker_that_cannot_be_reported_to_is_refused_before_the_run(
    folder, tmp_path, monkeypatch, capsys, tracker, variables, words
):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    # Whoever runs this may have a login.
    here = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    for name, value in {**here, **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe = folder / "refused.yaml"
    recipe.write_text(json.dumps(recipe_for(folder, "refused", tracker)))
    monkeypatch.setattr(sys, "argv", ["tunekit", "train", str(recipe)])
    for stream in ("stdout", "stderr"):  # which `main` wraps
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    with own_signals(), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert "output.report_to" in said
    assert said.count("\n") <= 1
    assert "swordfish99" not in said
    assert not (folder / "refused").exists()


def test_a_tracker_whose_library_is_missing_comes_with_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(
        DependencyError, match=r"output\.report_to: trackio is not installed; pip install 'tunekit\[tracking\]'"
    ):
        check_trackers(["tensorboard", "trackio"], {})


def test_a_tracker_that_keeps_its_files_here_needs_no_server():
    check_trackers(["tensorboard", "mlflow", "trackio"], {"MLFLOW_TRACKING_URI": "sqlite:///mine.db"})
    with pytest.raises(RunError, match="trackio cannot be reached"):
        check_trackers(["trackio"], {"TRACKIO_SERVER_URL": "http://127.0.0.1:9"})


def test_the_trackers_own_variables_say_where_a_run_is_shown(tmp_path):
    run = made_run(tmp_path / "mine")
    given = {"WANDB_PROJECT": "ours", "TENSORBOARD_LOGGING_DIR": "/boards", "MLFLOW_TRACKING_URI": "http://host:5000"}
    assert environment_of(run, "tensorboard", given) == {"TENSORBOARD_LOGGING_DIR": "/boards/mine"}
    assert environment_of(run, "wandb", given)["WANDB_PROJECT"] == "ours"
    assert environment_of(run, "mlflow", given)["MLFLOW_TRACKING_URI"] == "http://host:5000"
    assert environment_of(run, "mlflow", given)["MLFLOW_EXPERIMENT_NAME"] == "tunekit"
    assert environment_of(run, "mlflow", {})["MLFLOW_TRACKING_URI"] == f"sqlite:///{run.path}/trackers/mlflow.db"
    assert environment_of(run, "trackio", {})["TRACKIO_DIR"] == str(run.path / "trackers" / "trackio")


class Failing(TrainerCallback):
    """A tracker that keeps the steps which it was handed, and fails once at one of them."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.fails_at = fails_at

    def on_log(self, args, state, control, logs=None, **others):
        if state.global_step == self.fails_at:
            raise ConnectionError("gone")
        self.steps.append(state.global_step)


def handed_on(run, callback: Failing) -> list[int]:
    """The steps that a process of a run hands on before it ends."""
    pump = Pump(run, "trackio", lambda event, **fields: None)
    pump._callback = callback
    pump.end("finished")
    pump.run()
    return callback.steps


def test_each_figure_is_handed_on_once_by_whichever_process(tmp_path):
    run = made_run(tmp_path / "run")
    folder_of(run).mkdir()
    log = EventLog(run.path / "events.jsonl")
    for step in (1, 2):
        log.write("log", step=step, loss=1 / step)
        log.write("checkpoint", step=step)
    assert handed_on(run, Failing()) == [1, 2]
    log.write("eval", step=3, eval_loss=0.5)
    log.write("log", step=4, loss=0.25)
    assert handed_on(run, Failing(fails_at=4)) == [3]
    log.write("log", step=5, loss="nan")
    assert handed_on(run, Failing()) == [4, 5]
    assert handed_on(run, Failing()) == []
