"""One visitor's way through all pages, with nothing made up: rows, a plan, a real run, and what comes out of it."""

import json
from pathlib import Path

import pytest

import tunekit
from tests.processes import own_port

DRAWN = "document.querySelector('#runs-charts svg.marks .mark-line path')?.getAttribute('d')"
"""The curve of the loss, as the browser has drawn it."""


def rows(path: Path) -> Path:
    """A file of conversations, as a visitor has it on a machine of their own."""
    said = [("Where do you live?", "By the sea."), ("What do you do?", "I mend boats."), ("Since when?", "Always.")]
    chats = [
        {"messages": [{"role": "user", "content": question + "?" * n}, {"role": "assistant", "content": answer}]}
        for n in range(6)
        for question, answer in said
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in chats), encoding="utf-8")
    return path


def has_moved(page, before):
    """Wait until the curve is drawn otherwise than before, and return it."""
    page.wait_for_function(f"{DRAWN} && {DRAWN} !== {json.dumps(before)}")
    return page.evaluate(DRAWN)


def start_from_a_file(page, server, workspace, path):
    """Upload a file on the data page, mend a mistake in the form, start the run, and return it when its curve moves."""
    from playwright.sync_api import expect

    # A file is uploaded, and what of it will be learned is seen.
    page.locator("#data-upload input, input[type=file]").first.set_input_files(rows(path))
    row = page.locator(".data-row").first
    expect(row.locator(".data-trained").first).to_be_visible()
    assert "By the sea." in "".join(row.locator(".data-trained").all_text_contents())
    assert "Where do you live?" in "".join(row.locator(".data-read").all_text_contents())
    draft = page.locator("a.data-use").get_attribute("href")

    # A mistake in a field is told there, and no run can be started until it is mended.
    values = ["model=pico", "adapter.type=lora", "data.max_length=64", "train.global_batch_size=2"]
    values += ["train.save_steps=5", "train.num_epochs=null", "train.max_steps=100000", "output.name=sea"]
    page.goto(server.url.rstrip("/") + draft + "".join(f"&set={value}" for value in values))
    steps = page.locator("#form-train-max_steps input")
    expect(steps).to_have_value("100000")
    start = page.locator("#plan-start")
    expect(start).to_be_enabled()
    steps.fill("-5")
    steps.press("Tab")
    expect(page.locator("#form-train-max_steps")).to_contain_text("must be greater than 0, got -5")
    expect(start).to_be_disabled()
    steps.fill("100000")
    steps.press("Tab")
    expect(page.locator(".form-faulty")).to_have_count(0)
    expect(start).to_be_enabled()
    start.click()
    page.wait_for_url("**/runs?run=sea-*")
    run = next(one for one in tunekit.list_runs(workspace / "runs") if one.name.startswith("sea-"))

    # Its curve moves, also after a reload.
    page.locator("#runs-charts svg.marks .mark-line path").first.wait_for()
    before = page.evaluate(DRAWN)
    page.reload()
    page.locator("#runs-charts svg.marks .mark-line path").first.wait_for()
    has_moved(page, before)
    return run


def stop(page, run):
    """Stop a run on its page, and return the step of the checkpoint that it leaves."""
    from playwright.sync_api import expect

    page.locator("#controls-stop").click()
    expect(page.locator("#controls-line")).to_contain_text("was interrupted: stopped by `tunekit stop`")
    step = run.status()["step"]
    assert run.state == "interrupted" and tunekit.checkpoints(run)[0].step == step
    return step


def test_a_visitor_goes_from_a_file_to_a_run_and_stops_it_with_a_checkpoint(workspace, tmp_path, serve, open_page):
    server = serve(workspace)
    page = open_page(f"{server.url}data")
    stop(page, start_from_a_file(page, server, workspace, tmp_path / "sea.jsonl"))


@pytest.mark.slow
def test_a_visitor_goes_all_the_way_from_a_file_to_an_export(workspace, trained_run, tmp_path, serve, open_page):
    from playwright.sync_api import expect

    port = str(own_port())
    server = serve(workspace, "--port", port)
    page = open_page(f"{server.url}data")
    run = start_from_a_file(page, server, workspace, tmp_path / "sea.jsonl")

    # The curve moves on after the server was started anew.
    curve = page.evaluate(DRAWN)
    assert server.stop() == 0
    assert run.state == "training"
    server = serve(workspace, "--port", port)
    page.goto(f"{server.url}runs?run={run.name}")
    page.locator("#runs-charts svg.marks .mark-line path").first.wait_for()
    has_moved(page, curve)

    # It is stopped with a checkpoint, and continued for a few steps.
    step = stop(page, run)
    page.locator("#controls-manage > button").click()
    expect(page.locator("#controls-effects")).to_contain_text("No edits: the run resumes unchanged.")
    page.get_by_label("Edits").fill(f"train.max_steps={step + 4}")
    expect(page.locator("#controls-effects")).to_contain_text("applied")
    page.locator("#controls-go-on").click()
    expect(page.locator("#controls-problem")).to_contain_text("Resumed.")
    expect(page.locator("#runs-head")).to_contain_text(f"step {step + 4} of {step + 4}")
    expect(page.locator("#controls-stop")).to_be_hidden()
    assert run.state == "finished"

    # It is compared with an earlier one.
    page.goto(f"{server.url}compare?run={run.name}&run={trained_run.name}")
    # Both losses, and that of the earlier one's evaluations.
    expect(page.locator("#compare-charts svg.marks").first.locator(".mark-line path")).to_have_count(3)
    expect(page.get_by_text("sea.jsonl").first).to_be_visible()

    # It answers.
    page.goto(f"{server.url}chat?run={run.name}")
    page.locator("#chat-load:enabled").click()
    page.locator(".chat-loaded").wait_for()
    prompt = page.locator("#chat-prompt textarea")
    prompt.fill("Where do you live?")
    prompt.press("Enter")
    page.locator("#chat-send:enabled").wait_for()
    expect(page.locator("#chat-left [data-testid=bot]").first).not_to_be_empty()
    page.locator("#chat-unload").click()

    # It is evaluated on rows of a file, beside the model before.
    page.goto(f"{server.url}runs?run={run.name}")
    page.get_by_role("tab", name="Evaluation").click()
    page.locator("#evaluate-data input").click()
    page.get_by_role("option", name="sea.jsonl").click()
    page.locator("#evaluate-start:enabled").click()
    expect(page.locator("#evaluate-shown .evaluate-scores")).to_contain_text("loss")

    # It is exported, and what was written answers as the run does.
    page.goto(f"{server.url}runs?run={run.name}")
    page.get_by_role("tab", name="Export").click()
    page.locator("#export-start:enabled").click()
    ended = page.locator("#export-shown .export-check, #export-status .told")
    expect(ended.first).to_contain_text("greedy tokens match")
    assert list((run.path / "export").rglob("*.safetensors"))
