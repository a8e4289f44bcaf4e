"""The report of a run: one page that holds all of it, loads nothing and runs nothing."""

import base64
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from PIL import Image

import tunekit
from tests.tiny import save_chats
from tunekit.estimates.throughput.step import Range
from tunekit.reporting.page import Line, draw, thinned
from tunekit.runs.thumbnails import thumbnail_file

SCRIPT = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "line", "polyline", "circle", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, "every tag that is opened is closed"

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    save_chats(folder / "eval.jsonl", ((f"double {n}", f"{2 * n}") for n in range(20, 24)))
    return tunekit.train(
        {
            "model": "pico",
            "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 64},
            "train": {"max_steps": 4, "global_batch_size": 4, "logging_steps": 1},
            "output": {"dir": str(folder / "runs" / "one"), "sample_prompts": [f"Say {SCRIPT}"]},
        }
    )


def test_pictures_of_samples_stand_in_the_page_as_small_copies_of_the_run_folder(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "two")
    digest, secret = "ab" * 32, tmp_path / "secret.jpg"
    file = thumbnail_file(tmp_path / "two", digest)
    file.parent.mkdir()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    Image.new("RGB", (8, 8)).save(secret, "JPEG")
    asked = {"event": "sample", "time": 1.0, "when": "before", "prompt": "[image boat.png] What?", "answer": "A boat."}
    with (tmp_path / "two" / "events.jsonl").open("a") as events:
        events.write(json.dumps({**asked, "pictures": [digest, str(secret), "../../secret", "cd" * 32]}) + "\n")
    page = Page(tunekit.report(tmp_path / "two"))
    (image,) = (attributes for tag, attributes in page.tags if tag == "img")
    assert image == {"src": "data:image/jpeg;base64," + base64.b64encode(file.read_bytes()).decode(), "alt": ""}
    assert "[image boat.png] What?" in page.text and "A boat." in page.text
    assert "img-src data:" in tunekit.report(tmp_path / "two")


def test_a_report_tells_what_was_trained_and_what_came_of_it(run):
    page = Page(tunekit.report(run))
    assert not page.open
    result = run.result()
    for words in (
        "one",
        "finished",
        "pico, 2,755,008 parameters",
        "rows.jsonl: 16 sequences",
        f"{result['first_eval_loss']:.4f} → {result['eval_loss']:.4f}",
        f"{result['tokens_per_second']:,.0f}",
        "Learning rate",
        "torch 2.",
        "max_steps: 4",
    ):
        assert words in page.text, words


@pytest.mark.parametrize(("low", "high", "words"), [(1e-3, 1e9, "as planned"), (1e-3, 1e-2, "from the upper bound")])
def test_what_was_predicted_stands_beside_what_was_measured(low, high, words, run, tmp_path):
    folder, plan = shutil.copytree(run.path, tmp_path / "copy"), run.plan
    ranges = {"tokens_per_second": Range(low=low, high=high), "seconds": Range(low=60, high=600)}
    predicted = plan.model_copy(update={"speed": plan.speed.model_copy(update=ranges)})
    (folder / "plan.yaml").write_text(predicted.to_yaml(), encoding="utf-8")
    text = Page(tunekit.report(folder)).text
    assert words in text and "60 s to 10 min" in text


def test_the_curves_have_every_logged_step(run):
    page = Page(tunekit.report(run))
    lines = [attributes["points"].split() for tag, attributes in page.tags if tag == "polyline"]
    assert [len(points) for points in lines[:2]] == [4, len([e for e in run.events() if e["event"] == "eval"])]
    heights = [float(point.partition(",")[2]) for point in lines[0]]
    losses = run.metrics()["loss"].dropna().tolist()
    assert sorted(range(4), key=lambda n: heights[n]) == sorted(range(4), key=lambda n: -losses[n])


def test_a_report_loads_nothing_and_runs_nothing(run):
    page = Page(tunekit.report(run))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"src", "href", "xlink:href", "style", "action"} and not [n for n in names if n.startswith("on")]
    text = tunekit.report(run)
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text


def test_what_a_run_says_is_text_and_no_page(run, tmp_path):
    folder = shutil.copytree(run.path, tmp_path / "a<b>&\"'")
    with (folder / "events.jsonl").open("a") as events:
        for event in (
            {"event": "warning", "time": 1.0, "message": SCRIPT},
            {"event": "sample", "time": 1.0, "when": "after", "prompt": "p", "answer": f"</td>{SCRIPT}"},
            {"event": "log", "time": 1.0, "step": 5, "loss": "nan", "grad_norm": "inf", "learning_rate": 0.0},
        ):
            events.write(json.dumps(event) + "\n")
    text = tunekit.report(folder)
    assert "<script" not in text and Page(text).open == []
    assert Page(text).text.count(SCRIPT) >= 4, "the prompt, its recipe, the warning and the answer show it as it is"
    assert "nan" not in " ".join(a["points"] for t, a in Page(text).tags if t == "polyline")


def test_a_report_tells_no_secret(run, tmp_path, monkeypatch):
    folder = shutil.copytree(run.path, tmp_path / "copy")
    secret = "hf_" + "q" * 30
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "warning", "time": 1.0, "message": f"no access with {secret}"}) + "\n")
    assert secret not in tunekit.report(folder)


@pytest.mark.parametrize("phase", ["failed", "interrupted", "starting"])
def test_a_run_that_has_not_finished_has_a_report_too(phase, run, tmp_path):
    folder = shutil.copytree(run.path, tmp_path / "copy")
    status = {**run.status(), "phase": phase, "exit_reason": "the <disk> is full", "step": 2}
    (folder / "status.json").write_text(json.dumps(status))
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["event"] not in ("result", "sample")]
    (folder / "events.jsonl").write_text("".join(kept if phase != "starting" else kept[:1]))
    text = Page(tunekit.report(folder)).text
    assert "step 2 of 4" in text and "the <disk> is full" in text
    assert "Nothing logged yet" in text if phase == "starting" else "Training loss" in text


def test_a_long_curve_is_thinned_and_loses_no_spike():
    points = [(float(step), 1.0) for step in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    kept = thinned(points, 500)
    assert len(kept) <= 1000 and (54_321.0, 9.0) in kept and kept == sorted(kept)


@pytest.mark.parametrize("points", [[(1.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, -1e-9), (5.0, 1e9)]])
def test_any_curve_can_be_drawn(points):
    svg = draw([Line("a", points)], title="a < b")
    assert "a &lt; b" in svg and "nan" not in svg and "inf" not in svg
    inside = [tuple(map(float, point.split(","))) for point in re.search(r'points="([^"]*)"', svg)[1].split()]
    assert all(0 <= x <= 640 and 0 <= y <= 240 for x, y in inside)


def test_no_points_are_no_picture():
    assert draw([Line("a", [])], title="a") == ""


def test_of_no_run_there_is_no_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tunekit.TunekitError, match="no run 'nothing'"):
        tunekit.report("nothing")
