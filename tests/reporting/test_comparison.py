"""Runs side by side: what differs, what came of them, and who was better at what."""

import json
import shutil

import pytest
from typer.testing import CliRunner

import tunekit
from tests.tiny import save_chats
from tunekit.cli.app import app


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    save_chats(folder / "eval.jsonl", ((f"double {n}", f"{2 * n}") for n in range(20, 24)))
    return [
        tunekit.train(
            {
                "model": "pico",
                "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 64},
                "train": {"max_steps": 3, "global_batch_size": 4, "logging_steps": 1, "learning_rate": rate},
                "output": {"dir": str(folder / "runs" / name), "sample_prompts": ["double 3"]},
            }
        )
        for name, rate in (("slow", 1e-5), ("fast", 1e-3))
    ]


def figure(comparison, key):
    return next(one for one in comparison.figures if one.key == key)


@pytest.mark.slow
def test_the_only_field_in_which_recipes_differ_is_said(runs):
    assert tunekit.compare(runs).recipe == {"train.learning_rate": ("1.0e-05", "0.001")}


def test_the_better_run_is_marked_where_both_were_held_to_the_same_rows(runs):
    found = tunekit.compare(runs)
    losses = [[event["eval_loss"] for event in run.events() if event["event"] == "eval"] for run in runs]
    assert figure(found, "eval_loss").values == tuple(values[-1] for values in losses)
    assert figure(found, "best_eval_loss").values == tuple(min(values) for values in losses)
    assert losses[1][-1] < losses[0][-1] and figure(found, "eval_loss").best == {1}
    assert not found.notes


def test_losses_on_other_rows_have_no_winner(runs, tmp_path):
    other = shutil.copytree(runs[1].path, tmp_path / "other")
    prints = json.loads((other / "fingerprints.json").read_text())
    for one in prints:
        one["digest"] = "f" * 64 if one["path"] == "data/eval.arrow" else one["digest"]
    (other / "fingerprints.json").write_text(json.dumps(prints))
    found = tunekit.compare([runs[0], other])
    assert not figure(found, "eval_loss").best and figure(found, "loss").best
    assert "not ranked: evaluated on different rows" in found.notes
    assert "Content of data/eval.arrow" in found.surroundings


def test_a_run_that_has_not_finished_is_compared_as_far_as_it_is(runs, tmp_path):
    early = shutil.copytree(runs[1].path, tmp_path / "early")
    (early / "status.json").write_text(json.dumps({**runs[1].status(), "phase": "failed", "step": 2}))
    lines = (early / "events.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["event"] != "result" and json.loads(line).get("step", 0) < 3]
    (early / "events.jsonl").write_text("".join(kept))
    found = tunekit.compare([runs[0], early])
    assert any("early is failed, at step 2 of 3" in note for note in found.notes)
    assert figure(found, "seconds").values[1] is None
    assert [len(line.points) for line in found.overlays[0].lines] == [3, 2]


def test_the_page_has_a_curve_of_each_run_and_loads_nothing(runs):
    page = tunekit.compare(runs).to_html()
    assert page.count("<polyline") >= 8 and "line-1" in page and "default-src 'none'" in page
    assert "<script" not in page and "url(" not in page and "src=" not in page


def test_a_notebook_shows_the_tables_of_the_page(runs):
    found = tunekit.compare(runs)
    cell = found._repr_html_()
    assert "<html" not in cell and cell.count("<table>") >= 2
    assert all(name in cell for name in found.names)


def test_the_command_shows_compares_and_writes(runs, tmp_path):
    named = [str(run.path) for run in runs]
    shown = CliRunner().invoke(app, ["compare", *named])
    assert shown.exit_code == 0, shown.output
    for words in ("slow", "fast", "train.learning_rate", "evaluation loss, last", "Training loss", "*"):
        assert words in shown.output, words
    html, png = tmp_path / "page.html", tmp_path / "curves.png"
    CliRunner().invoke(app, ["compare", *named, "--html", str(html), "--plot", str(png)], catch_exceptions=False)
    assert "2 runs compared" in html.read_text() and png.read_bytes().startswith(b"\x89PNG")
    plain = json.loads(CliRunner().invoke(app, ["compare", *named, "--json"]).output)
    assert plain["recipe"] == {"train.learning_rate": ["1.0e-05", "0.001"]}


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (["one"], "cannot compare 1 run"),
        (["one", "one"], "is listed twice"),
        (["one", "nothing"], "no run 'nothing'"),
        (["one", "no-plan"], "plan.yaml cannot be read"),
        (["one", "torn"], "torn/plan.yaml is damaged"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_line(named, words, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in {"one", "no-plan", "torn"} & set(named):
        shutil.copytree(runs[0].path, tmp_path / "runs" / name)
    if "no-plan" in named:
        (tmp_path / "runs" / "no-plan" / "plan.yaml").unlink()
    if "torn" in named:
        (tmp_path / "runs" / "torn" / "plan.yaml").write_text("strategy: [")
    with pytest.raises(tunekit.TunekitError, match=words):
        tunekit.compare(named)
    assert isinstance(CliRunner().invoke(app, ["compare", *named]).exception, tunekit.TunekitError)


def test_a_file_that_cannot_be_written_is_said_in_a_line(runs, tmp_path):
    named = [str(run.path) for run in runs]
    failed = CliRunner().invoke(app, ["compare", *named, "--html", str(tmp_path / "no" / "page.html")])
    assert "cannot write" in str(failed.exception)
