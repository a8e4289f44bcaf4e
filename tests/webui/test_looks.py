"""How charts are looked at: what a browser keeps of it, and what it is taken for when it comes back."""

import shutil

import pytest
from playwright.sync_api import expect

from webui.looks import FIRST, looks_in


@pytest.mark.parametrize("kept", [None, [], "x", {"smoothing": 7, "by": "moon", "clip": "yes"}])
def test_what_a_browser_kept_and_is_no_setting_is_left_out(kept):
    assert looks_in(kept) == FIRST


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
    page.reload()
    page.locator("#runs-charts").get_by_text("other").first.wait_for()
    page.locator("#runs-look > button").click()
    expect(page.get_by_role("checkbox", name="Log scale")).to_be_checked()
    expect(page.get_by_label("time", exact=True)).to_be_checked()
    expect(page.locator("#runs-overlay")).to_contain_text("other")
    page.goto(f"{root}compare?run={trained_run.name}&run=other")
    page.locator("#compare-plot .marks").first.wait_for()
    expect(page.get_by_role("checkbox", name="Log scale")).to_be_checked()
