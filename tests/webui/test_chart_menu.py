"""Charts in a browser: values at the pointer, and a menu by keyboard with the data table and what is saved."""

import csv
import json
import shutil
import time

import pytest
from PIL import Image
from playwright.sync_api import expect


@pytest.fixture
def page(trained_run, workspace, serve, open_page):
    """The page of a run that was resumed from step 4, with another run in its charts."""
    shutil.copytree(trained_run.path, workspace / "runs" / "other")
    logs = [json.dumps(event) for event in trained_run.events() if event["event"] == "log" and event["step"] > 4]
    resume = {"event": "resume", "time": time.time(), "step": 4, "changes": [], "weights_only": False}
    with (trained_run.path / "events.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("\n".join([json.dumps(resume), *logs]) + "\n")
    page = open_page(f"{serve(workspace).url}runs?run={trained_run.name}&with=other")
    page.locator("#runs-charts").get_by_text("other").first.wait_for()
    return page


def test_a_chart_shows_all_runs_at_the_pointer_and_where_a_run_was_resumed(page, trained_run):
    chart = page.locator("#runs-charts svg.marks").first
    chart.scroll_into_view_if_needed()
    line = chart.locator(".mark-rule.role-mark line").first
    box, at = chart.bounding_box(), line.bounding_box()
    # Between two points of the curves.
    page.mouse.move(at["x"] + 12, box["y"] + box["height"] / 2)
    tooltip = page.locator("#vg-tooltip-element")
    expect(tooltip).to_contain_text(f"{trained_run.name} · training")
    expect(tooltip).to_contain_text("other · evaluation")
    chart.get_by_text("↻").hover()
    expect(tooltip).to_contain_text(f"{trained_run.name}: resumed from step 4")


def test_a_click_in_the_legend_lets_the_other_curves_fade_until_the_next(page):
    chart = page.locator("#runs-charts svg.marks").first
    chart.scroll_into_view_if_needed()
    faded = chart.locator(".mark-line path[opacity='0.1']")
    entry = chart.locator(".role-legend").get_by_text("other", exact=True)
    expect(chart.locator(".mark-line path[opacity='1']")).to_have_count(4)
    entry.click()
    expect(faded).to_have_count(2)
    entry.click()
    expect(faded).to_have_count(0)


def test_a_chart_is_a_table_and_is_saved_by_keyboard(page, trained_run, tmp_path):
    logged = {event["step"]: event["loss"] for event in trained_run.events() if event["event"] == "log"}
    opener = page.locator("#runs-charts .chart-menu summary").first
    expect(opener).to_have_attribute("aria-label", "Loss: data table and export")
    page.get_by_role("button", name="Smoothing, axes").focus()
    page.keyboard.press("Tab")
    expect(opener).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    table = page.get_by_role("dialog", name="Loss")
    heads = ["step", *(f"{run} · {part}" for run in (trained_run.name, "other") for part in ("training", "evaluation"))]
    expect(table.locator("th")).to_have_text(heads)
    rows = [row.split("\t") for row in table.locator("tbody").inner_text().splitlines()]
    assert {int(row[0]): float(row[1]) for row in rows[1:]} == pytest.approx(logged, rel=1e-4)
    page.keyboard.press("Escape")
    expect(table).to_have_count(0)
    expect(opener).to_be_focused()

    def saved(presses):
        page.keyboard.press("Enter")
        for _ in range(presses):
            page.keyboard.press("Tab")
        with page.expect_download() as download:
            page.keyboard.press("Enter")
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        return path

    picture = Image.open(saved(2))
    size = page.locator("#runs-charts svg.marks").first.bounding_box()
    assert picture.size == pytest.approx((2 * size["width"], 2 * size["height"]), abs=2)
    assert len({picture.getpixel((x, y)) for x in range(0, picture.width, 3) for y in range(0, picture.height, 3)}) > 9
    with saved(3).open(encoding="utf-8") as stream:
        points = [row for row in csv.DictReader(stream) if row["curve"] == f"{trained_run.name} · training"]
    assert {int(row["step"]): float(row["Loss"]) for row in points} == pytest.approx(logged, rel=1e-5)
