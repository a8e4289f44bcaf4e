"""What the server has read of runs' events: each file once, whoever asks and however long it is."""

import json
import shutil
import threading
from pathlib import Path

import pytest

import tunekit
from tests.webui.test_runs_page import looked, site_of
from tunekit import frontend
from webui import history, run_view
from webui.history import history_of

NUM_STEPS = 12_000


@pytest.fixture
def long_run(trained_run: tunekit.Run) -> tunekit.Run:
    """A trained run that has said so much that it is read elsewhere."""
    logs = [event for event in trained_run.events() if event["event"] == "log"]
    with (trained_run.path / "events.jsonl").open("a", encoding="utf-8") as stream:
        for step in range(9, NUM_STEPS + 1):
            stream.write(json.dumps({**logs[-1], "step": step, "loss": 3 / step}) + "\n")
    assert (trained_run.path / "events.jsonl").stat().st_size > 4 * history.PIECE_BYTES
    return trained_run


def points_of(reader: frontend.EventReader) -> dict[str, list[tuple[float, ...]]]:
    return {name: list(series) for name, series in reader.series.items()}


def read_whole(run: tunekit.Run) -> frontend.EventReader:
    """The shared reader when nothing is left to read."""
    while True:
        with history_of(run, patient=True) as reader:
            if not reader.is_behind:
                return reader


@pytest.mark.slow
def test_a_long_history_is_read_elsewhere_to_the_same_curves(long_run):
    alone = frontend.EventReader(long_run.path / "events.jsonl")
    alone.read()
    reader = read_whole(long_run)
    assert points_of(reader) == points_of(alone) and reader.answers == alone.answers
    assert reader.read_bytes == (long_run.path / "events.jsonl").stat().st_size
    with (long_run.path / "events.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"event": "log", "time": 1.0, "step": NUM_STEPS + 1, "loss": 9.0}) + "\n")
    with history_of(long_run) as later:
        assert later is reader and later.series["loss"].last.value == 9.0


@pytest.mark.slow
def test_many_that_ask_at_once_share_one_reader(long_run):
    seen = []

    def ask():
        seen.append(read_whole(long_run))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8 and len({id(reader) for reader in seen}) == 1


@pytest.mark.slow
def test_until_all_is_read_a_page_says_how_far_it_is(long_run):
    site, no_curves, first = site_of(long_run), 3, 4
    answer = looked(site, long_run.name)
    while "runs-reading" in str(answer[no_curves]):
        assert "Reading events" in answer[no_curves].value and "step 8" in answer[1]
        answer = looked(site, long_run.name, answer[0])
    charts = [plot for plot in answer[first : first + run_view.NUM_CHARTS] if plot.value is not None]
    (loss,) = [chart.value["plot"] for chart in charts if '"title":{"text":"Loss"' in chart.value["plot"]]
    assert f'"x":{NUM_STEPS}' in loss and answer[no_curves].visible is False


@pytest.mark.slow
def test_a_history_that_is_taken_away_meanwhile_is_empty(long_run):
    with history_of(long_run) as reader:
        assert reader.is_behind
        shutil.rmtree(long_run.path / "checkpoints")
        (long_run.path / "events.jsonl").unlink()
    assert read_whole(long_run).series == {}


@pytest.mark.slow
def test_checkpoints_have_the_losses_of_their_steps_after_many_more(trained_run, tmp_path: Path):
    before = {one.step: (one.loss, one.eval_loss) for one in tunekit.checkpoints(trained_run)}
    losses = {event["step"]: event["loss"] for event in trained_run.events() if event["event"] == "log"}
    with (trained_run.path / "events.jsonl").open("a", encoding="utf-8") as stream:
        for step in range(9, NUM_STEPS + 1):
            stream.write(json.dumps({"event": "log", "time": 1.0, "step": step, "loss": float(step % 7)}) + "\n")
    read_whole(trained_run)
    after = {one.step: (one.loss, one.eval_loss) for one in history.checkpoints_of(trained_run)}
    assert after == before and {step: loss for step, (loss, _) in after.items()} == {4: losses[4], 8: losses[8]}
