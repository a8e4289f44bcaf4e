"""How charts are looked at: what a browser keeps of it, and what it is taken for when it comes back."""

import shutil

import pytest
from playwright.sync_api import expect

from webui.charts import kinds_of
from webui.looks import FIRST, looks_in, shown_charts, with_charts


@pytest.mark.parametrize("kept", [None, [], "x", {"smoothing": 7, "by": "moon", "clip": "yes"}])
def test_what_a_browser_kept_and_is_no_setting_is_left_out(kept):
    assert looks_in(kept) == FIRST


SFT, DPO = kinds_of(["loss", "grad_norm", "step_seconds"]), kinds_of(["loss", "rewards/margins", "logps/chosen"])


def test_charts_are_the_default_ones_until_they_are_chosen():
    assert shown_charts(None, SFT) == ["loss", "grad_norm"]
    assert shown_charts({"charts": 7, "hidden": [None]}, SFT) == ["loss", "grad_norm"]
    # One is hidden, one added, and the order changed.
    settings = with_charts({"clip": True}, ["step_seconds", "loss"], SFT)
    assert shown_charts(settings, SFT) == ["step_seconds", "loss"] and settings["clip"]


def test_a_choice_of_charts_of_one_run_leaves_those_of_others():
    settings = with_charts({}, ["step_seconds", "loss"], SFT)
    assert shown_charts(settings, DPO) == ["loss", "margins"]
    settings = with_charts(settings, ["logps/chosen", "margins"], DPO)
    assert shown_charts(settings, DPO) == ["logps/chosen", "margins"]
    assert shown_charts(settings, SFT) == ["step_seconds"], "the loss is hidden, and so is the norm"


@pytest.mark.slow
def test_settings_of_charts_and_runs_beside_outlive_a_reload(trained_run, workspace, serve, open_page):
    shutil.copytree(trained_run.path, workspace / "runs" / "other")
    root = serve(workspace).url
    page = open_page(f"{root}runs?run={trained_run.name}")
    page.locator("#runs-charts .marks").first.wait_for()
    page.locator("#runs-look > button").click()
    page.get_by_role("checkbox", name="Log scale").check()
    page.get_by_label("time", exact=True).check()
    page.locator("#runs-overlay input").click()
    page.get_by_role("option", name="other").click()
    page.wait_for_function("location.search.includes('with=other')")
    steps = page.locator("#runs-charts svg.marks").first.locator(".role-axis-label").first
    before = steps.text_content()
    page.locator("#runs-charts svg.marks").first.hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -600)
    page.keyboard.up("Control")
    expect(steps).not_to_have_text(before)
    page.locator("#runs-shown input").fill("step_sec")
    page.get_by_role("option", name="step_seconds").click()
    page.keyboard.press("Escape")
    page.locator("#runs-charts").get_by_text("step_seconds").first.wait_for()
    page.reload()
    page.locator("#runs-charts").get_by_text("other").first.wait_for()
    page.locator("#runs-look > button").click()
    expect(page.get_by_role("checkbox", name="Log scale")).to_be_checked()
    expect(page.get_by_label("time", exact=True)).to_be_checked()
    expect(page.locator("#runs-overlay")).to_contain_text("other")
    expect(page.locator("#runs-charts")).to_contain_text("step_seconds")
    expect(page.locator("#runs-shown")).to_contain_text("step_seconds")
    page.goto(f"{root}compare?run={trained_run.name}&run=other")
    page.locator("#compare-charts .marks").first.wait_for()
    expect(page.get_by_role("checkbox", name="Log scale")).to_be_checked()
    page.locator("#compare-charts").get_by_text("step_seconds").first.wait_for()


@pytest.mark.slow
def test_two_chosen_runs_can_be_compared_and_the_table_is_sorted(trained_run, workspace, serve, open_page):
    shutil.copytree(trained_run.path, workspace / "runs" / "zz-other")
    page = open_page(f"{serve(workspace).url}runs")
    page.locator("#runs-list a").first.wait_for()
    expect(page.locator("#runs-why")).to_be_visible()
    for name in (trained_run.name, "zz-other"):
        page.locator(f"#pick-{name}").check()
    expect(page.locator("#runs-why")).to_be_hidden()
    expect(page.get_by_role("button", name="Compare selected runs")).to_be_enabled()
    page.locator("#runs-sort input").click()
    page.get_by_role("option", name="Name").click()
    expect(page.locator("#runs-list tbody a").first).to_have_text(min(trained_run.name, "zz-other"))
    # Another order keeps what was chosen.
    expect(page.locator("#runs-list input:checked")).to_have_count(2)
