"""What can be done with a run from its page: the panel's functions, and once the real thing in a real browser."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from urllib.parse import parse_qs, urlparse

import gradio as gr
import pytest

import tunekit
from tests.training.folders import made_run
from tests.waiting import LIMIT_SECONDS
from tunekit import frontend
from webui import situation
from webui.controls import _Shown, _write, line_of, look, tags_in
from webui.diagnosis import card
from webui.resume_form import Effects, ResumeForm, choices_of, effects_of, lines_of
from webui.site import Site
from webui.situation import situation_of
from webui.words import Words

EN, ZH = Words("en"), Words("zh")


@pytest.fixture
def site(workspace):
    return Site(workspace)


def failed_run(workspace, problem="step 3: the loss is nan, for <b>rows.jsonl:7</b>", **words):
    """A run that says that it failed in step 3."""
    run = made_run(workspace / "runs" / "bad", phase="failed", step=2, exit_reason=problem)
    (run.path / "errors").mkdir()
    told = {"rank": 0, "time": 1.0, "kind": "NonFiniteError", "problem": problem, "hint": None, "traceback": None}
    (run.path / "errors" / "rank-0.json").write_text(json.dumps({**told, **words}))
    return run


def test_a_run_that_trained_to_its_end_can_be_continued_and_not_stopped(site, trained_run):
    found = situation_of(trained_run)
    assert (found.state, found.is_over, found.can_go_on, found.diagnosis) == ("finished", True, True, None)
    # What is over has no button to stop it, and nothing to say about one.
    assert line_of(EN, found) == "<div role='status'></div>"


def test_checkpoints_are_offered_with_step_loss_and_size_and_damaged_ones_are_not(site, trained_run):
    offered = choices_of(EN, situation_of(trained_run))
    assert [name for _, name in offered] == ["", "checkpoint-8", "checkpoint-4"]
    losses = {event["step"]: event["loss"] for event in trained_run.events() if event["event"] == "log"}
    assert offered[1][0].startswith(f"step 8 · loss {losses[8]:.4f} · eval ") and "MiB" in offered[1][0]
    (trained_run.path / "checkpoints" / "checkpoint-8" / "optimizer.pt").unlink()
    situation.forget(trained_run)
    shutil.copytree(trained_run.path, site.root / "runs" / "copy")
    offered = choices_of(EN, situation_of(site.run("copy")))
    assert [name for _, name in offered] == ["", "checkpoint-4"]


def test_what_becomes_of_each_edit_stands_in_a_table_before_anything_is_done(site, trained_run):
    before = (trained_run.path / "recipe.yaml").read_text()
    edits = "train.max_steps=12\n\n adapter.rank=4 \ntrain.learning_rate=1e-5"
    assert lines_of(edits) == ["train.max_steps=12", "adapter.rank=4", "train.learning_rate=1e-5"]
    table = effects_of(site, EN, trained_run.name, "", edits, weights_only=False).html
    rows = {row.split("</code>")[0].split("<code>")[1]: unescape(row) for row in table.split("<tr>")[2:]}
    assert "✓ applied" in rows["train.max_steps"]
    assert "✗ refused" in rows["adapter.rank"] and "another adapter" in rows["adapter.rank"]
    assert "△ requires “Weights only”" in rows["train.learning_rate"]
    alone = effects_of(site, EN, trained_run.name, "", "train.learning_rate=1e-5", weights_only=True)
    assert "✓ applied" in alone.html and alone.is_possible
    assert effects_of(site, EN, trained_run.name, "", "", weights_only=False) == Effects(
        "<p>No edits: the run resumes unchanged.</p>", is_possible=True
    )
    assert (trained_run.path / "recipe.yaml").read_text() == before


@pytest.mark.parametrize(
    ("edit", "why_not"),
    [
        ("train.learning_rate=1e-5", "train.learning_rate: tick “Weights only”, or remove the edit"),
        ("adapter.rank=4", "adapter.rank: remove the edit"),
    ],
)
def test_edits_that_cannot_be_resumed_with_say_so_with_the_remedy(site, trained_run, edit, why_not):
    shown = effects_of(site, EN, trained_run.name, "", f"train.max_steps=12\n{edit}", weights_only=False)
    assert not shown.is_possible and shown.html.endswith(f"<p class='controls-why-not'>{why_not}</p>")


@pytest.mark.parametrize("edits", ["train.max_stepz=3", "<script>alert(1)</script>=3", "nothing"])
def test_edits_that_are_none_are_told_in_words(site, trained_run, edits):
    told = effects_of(site, EN, trained_run.name, "", edits, weights_only=False)
    assert "role='alert'" in told.html and "<script>" not in told.html and not told.is_possible
    assert effects_of(site, EN, "no/such", "", "", weights_only=False).html.startswith("<div class='told'")


def test_a_failure_is_told_with_a_link_to_a_new_run_that_has_the_change(site, workspace):
    run = failed_run(workspace, hint="lower it", changes=["train.learning_rate=1e-05", "train.seed=3"])
    found = situation_of(run).diagnosis
    shown = card(site, EN, run.name, found)
    assert EN("controls.cause_non_finite") in shown and "&lt;b&gt;rows.jsonl:7&lt;/b&gt;" in shown
    link = urlparse(unescape(shown.split("href='")[1].split("'")[0]))
    assert link.path == "/new"
    assert parse_qs(link.query) == {"from": ["run:bad"], "set": ["train.learning_rate=1e-05", "train.seed=3"]}
    assert ZH("controls.cause_non_finite") in card(site, ZH, run.name, found)
    assert "href" not in card(Site(site.root, read_only=True), EN, run.name, found)


def test_each_cause_has_a_title_in_each_language(site, workspace):
    run = failed_run(workspace)
    found = situation_of(run).diagnosis
    for cause in ("memory", "rows", "package", "model", "disk", "hung", "lost", "killed", "defect", "other"):
        told = frontend.Diagnosis(**{**vars(found), "cause": cause})
        assert EN(f"controls.cause_{cause}") in unescape(card(site, EN, run.name, told))
        assert ZH(f"controls.cause_{cause}") in unescape(card(site, ZH, run.name, told))


def test_a_run_in_line_says_its_place_and_who_has_the_devices(site, workspace):
    run = made_run(workspace / "runs" / "waits", phase="queued", place_in_line=2)
    event = {"event": "queue", "time": 1.0, "place": 2, "behind": ["first", "second"], "devices": ["cpu"]}
    (run.path / "events.jsonl").write_text(json.dumps(event) + "\n")
    found = situation_of(run)
    assert (found.place, found.behind, found.is_over) == (2, ("first", "second"), False)
    assert "Number 2 in the queue; waiting for first, second" in line_of(EN, found)


def test_a_run_that_ended_is_looked_at_again_when_it_goes_on(site, workspace):
    run = failed_run(workspace)
    assert situation_of(run).diagnosis is not None
    shutil.rmtree(run.path / "errors")
    run.update_status(phase="finished")
    situation.forget(run)
    assert situation_of(run).diagnosis is None


@pytest.mark.parametrize("edit", ["parallel.nvme_path=/var/tmp", "data.train=../chats.jsonl", "model.path=~/model"])
def test_a_run_is_resumed_with_edits_that_stay_in_the_workspace_alone(site, workspace, monkeypatch, edit):
    made_run(workspace / "runs" / "mine", phase="interrupted")
    started = []
    monkeypatch.setattr(frontend, "effects_of", lambda *values, **options: [])
    monkeypatch.setattr(tunekit, "start_resume", lambda run, edits, **options: started.append(edits))
    with gr.Blocks():
        form = ResumeForm(site, EN, gr.Textbox())
    told, *_ = form._start("mine", "", edit, False, False)
    assert not started and edit.partition("=")[0] in unescape(told.value) and "workspace" in told.value
    form._start("mine", "", "train.max_steps=9", False, False)
    assert started == [["train.max_steps=9"]]


def test_tags_of_all_runs_are_offered(site, workspace):
    first, second = made_run(workspace / "runs" / "a"), made_run(workspace / "runs" / "b")
    tunekit.set_tags(first, ["good", "lora"])
    tunekit.set_tags(second, ["bad", "good"])
    assert tags_in(site) == ["bad", "good", "lora"]


def test_tags_and_notes_that_were_typed_are_not_taken_from_the_disk_by_an_answer_that_comes_late(site, workspace):
    run = made_run(workspace / "runs" / "a")
    with gr.Blocks():
        shown = _Shown(gr.Textbox(), gr.HTML(), gr.HTML())
    late, *_ = look(site, EN, run.name, "", shown)
    _write(site, "tags", run.name, ["good"], "")
    _write(site, "note", run.name, "keep it", "")
    # The answer shows none, which the page tells as a change.
    _write(site, "tags", run.name, [], late)
    _write(site, "note", run.name, "", late)
    assert (run.tags, run.note) == (["good"], "keep it")
    newest, *_ = look(site, EN, run.name, late, shown)
    _write(site, "tags", run.name, ["good"], newest)
    _write(site, "note", run.name, "keep it", newest)
    assert (run.tags, run.note) == (["good"], "keep it")
    _write(site, "tags", run.name, [], newest)
    _write(site, "note", run.name, "", newest)
    assert (run.tags, run.note) == ([], "")


LONG = """\
model: pico
data:
  train: chats.jsonl
  max_length: 64
adapter: lora
train:
  max_steps: 100000
  global_batch_size: 2
  save_steps: 2
output:
  name: long
  sample_prompts: []
"""


@pytest.mark.slow
def test_a_live_run_is_stopped_continued_from_a_chosen_checkpoint_tagged_and_deleted(
    workspace, tmp_path, serve, open_page
):
    from playwright.sync_api import expect

    (workspace / "long.yaml").write_text(LONG)
    command = [sys.executable, "-m", "tunekit", "train", "long.yaml"]
    process = subprocess.Popen(command, cwd=workspace, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        # What other tests train is not in the line that it waits in.
        page = open_page(f"{serve(workspace, XDG_STATE_HOME=str(tmp_path / 'state')).url}runs")
        page.locator("#runs-list a[id^=run-long]").click()
        head, line, stop = page.locator("#runs-head"), page.locator("#controls-line"), page.locator("#controls-stop")
        expect(head).to_contain_text(re.compile(r"step ([4-9]|\d\d+) of"))
        expect(page.locator("#controls-go-on")).to_be_hidden()
        stop.click()
        expect(line).to_contain_text("was interrupted: stopped by `tunekit stop` at step ")
        expect(stop).to_be_hidden()
        assert process.wait(timeout=LIMIT_SECONDS) == 0
    finally:
        process.kill()
    (run,) = tunekit.list_runs(workspace / "runs")
    assert run.state == "interrupted"
    earlier = [one for one in tunekit.checkpoints(run) if one.fault is None][1]

    page.locator("#controls-manage > button").click()
    page.get_by_label("Checkpoint").first.click()
    page.get_by_role("option", name=f"step {earlier.step} ").click()
    page.get_by_label("Edits").fill(f"train.max_steps={earlier.step + 3}\ntrain.learning_rate=1")
    expect(page.locator("#controls-effects")).to_contain_text("requires “Weights only”")
    told = "train.learning_rate: tick “Weights only”, or remove the edit"
    expect(page.locator("#controls-effects")).to_contain_text(told)
    expect(page.locator("#controls-go-on")).to_be_disabled()
    page.locator("#controls-weights-only input").check()
    expect(page.locator("#controls-go-on")).to_be_enabled()
    page.locator("#controls-weights-only input").uncheck()
    expect(page.locator("#controls-go-on")).to_be_disabled()
    page.get_by_label("Edits").fill(f"train.max_steps={earlier.step + 3}")
    expect(page.locator("#controls-effects tr")).to_have_count(2)
    page.locator("#controls-go-on").click()
    expect(page.locator("#controls-problem")).to_contain_text("Resumed.")
    expect(page.locator("#controls-effects tr")).to_have_count(0)
    expect(head).to_contain_text(f"step {earlier.step + 3} of {earlier.step + 3}")
    expect(head.locator(".runs-state")).to_contain_text("finished")
    assert run.state == "finished"
    resumed = next(event for event in reversed(run.events()) if event["event"] == "resume")
    assert (resumed["step"], run.status()["step"]) == (earlier.step, earlier.step + 3)

    # Its weights alone, in line, with what only they allow; and at once to an end, though only when that is meant.
    page.get_by_label("Edits").fill("train.max_steps=90000\ntrain.learning_rate=1e-4")
    page.locator("#controls-weights-only input").check()
    page.locator("#controls-queue input").check()
    expect(page.locator("#controls-effects")).not_to_contain_text("requires “Weights only”")
    page.locator("#controls-go-on").click()
    expect(head).to_contain_text(re.compile(r"step [1-9]\d* of 90,?000"))
    page.locator("#controls-stop-now").click()
    page.locator("#controls-stop-now-not").click()
    expect(page.locator("#controls-stop-now-sure")).to_be_hidden()
    page.locator("#controls-stop-now").click()
    page.locator("#controls-stop-now-sure").click()
    expect(line).to_contain_text("interrupted")
    assert run.state == "interrupted" and run.recipe.train.learning_rate == 1e-4

    page.locator("#controls-clone").click()
    page.wait_for_url("**/new?from=run*")
    expect(page.locator("#form-yaml .cm-content")).to_contain_text("max_steps: 90000")
    page.go_back()

    page.locator("#controls-manage > button").click()
    page.locator("#controls-tags input").fill("good")
    page.locator("#controls-tags input").press("Enter")
    note = "best rank so far;\nsee its answers"
    page.locator("#controls-note textarea").fill(note)
    page.locator("#controls-note textarea").blur()
    expect(head.locator(".runs-note-text")).to_have_text(note)
    other = open_page(page.url)
    other.locator("#controls-manage > button").click()
    expect(other.locator("#controls-tags")).to_contain_text("good")
    expect(other.locator("#controls-note textarea")).to_have_value(note)
    assert (run.tags, run.note) == (["good"], note)

    sure = page.locator("#controls-delete-sure")
    expect(sure).to_be_disabled()
    page.locator("#controls-delete-name textarea, #controls-delete-name input").fill(run.name)
    expect(sure).to_be_enabled()
    sure.click()
    page.wait_for_url("**/runs")
    expect(page.locator("#runs-list")).to_contain_text("No runs in this folder")
    assert not run.path.exists()


@pytest.mark.slow
def test_a_wall_screen_has_no_button(trained_run, workspace, serve, open_page):
    from playwright.sync_api import expect

    page = open_page(f"{serve(workspace, '--read-only').url}runs?run={trained_run.name}")
    expect(page.locator("#controls-line")).to_contain_text("This server is read-only.")
    assert page.locator("[id^=controls-] button").count() == 0


def test_a_checkpoint_that_is_no_longer_offered_is_no_error_of_the_page(site):
    """A look at a run that was just resumed names the one that was chosen before."""
    with gr.Blocks():
        form = ResumeForm(site, EN, gr.Textbox())
    assert form.checkpoint.preprocess("checkpoint-20") == "checkpoint-20"


def test_a_name_of_a_checkpoint_that_is_none_of_the_runs_is_refused(site, workspace):
    run = made_run(workspace / "runs" / "mine", phase="interrupted")
    for name in ("checkpoint-999", "../../other/checkpoints/checkpoint-1"):
        shown = unescape(effects_of(site, EN, run.name, name, "train.max_steps=9", weights_only=False).html)
        assert f"mine has no checkpoint {name}" in shown
