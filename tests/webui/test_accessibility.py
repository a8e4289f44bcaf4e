"""Every page by keyboard and by ear: what scrolls is reached, headings skip no level, and fields have names."""

import json
import shutil
import time
from itertools import pairwise

import pytest

from tests.webui.screens import _tab

UNREACHED = """() => {
  const scrolls = (element) => {
    const style = getComputedStyle(element);
    const by = (overflow, size, room) => ["auto", "scroll"].includes(overflow) && size > room + 1;
    return by(style.overflowX, element.scrollWidth, element.clientWidth)
      || by(style.overflowY, element.scrollHeight, element.clientHeight);
  };
  const stops = "a[href], button, input, select, textarea, summary, [tabindex='0'], [contenteditable='true']";
  return [...document.querySelectorAll(".gradio-container *")]
    .filter((element) => element.checkVisibility() && scrolls(element))
    .filter((element) => element.tabIndex < 0 && !element.querySelector(stops)).map((element) => element.outerHTML);
}"""
"""Elements that scroll, and neither are a stop of the Tab key nor have one in them."""

HEADINGS = """() => [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")]
  .filter((heading) => heading.checkVisibility() && heading.innerText.trim())
  .map((heading) => [Number(heading.tagName[1]), heading.innerText])"""

UNNAMED = """() => [...document.querySelectorAll("input:not([type=file]):not([type=hidden]), textarea, select")]
  .filter((field) => field.checkVisibility())
  .filter((field) => !(field.ariaLabel || field.labels?.length || field.placeholder || field.title
    || field.getAttribute("aria-labelledby"))).map((field) => field.outerHTML)"""


def check(page):
    page.wait_for_function(f"({UNREACHED})().length === 0")
    levels = page.evaluate(HEADINGS)
    assert levels[0][0] == 1, levels
    skipped = [(before, after) for before, after in pairwise(levels) if after[0] > before[0] + 1]
    assert not skipped
    assert page.evaluate(UNNAMED) == []


@pytest.fixture(scope="module")
def server(trained_workspace, serve, tmp_path_factory):
    """A server over a run with many warnings and long answers, another one, and one that failed."""
    root = tmp_path_factory.mktemp("pages") / "workspace"
    shutil.copytree(trained_workspace, root)
    (run,) = (root / "runs").iterdir()
    run.rename(root / "runs" / "trained")
    long = {"event": "sample", "time": time.time(), "when": "after", "prompt": "Why?", "answer": "so, " * 4000}
    warnings = [{"event": "warning", "time": time.time(), "message": f"number {n}"} for n in range(30)]
    with (root / "runs" / "trained" / "events.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(event) + "\n" for event in (long, *warnings)))
    shutil.copytree(root / "runs" / "trained", root / "runs" / "other")
    return serve(root)


PAGES = {
    "runs": ("runs", "#runs-list a"),
    "new": ("new?from=file:trained.yaml", ".plan-bar"),
    "data": ("data?path=chats.jsonl", ".data-row"),
    "compare": ("compare?run=trained&run=other", "#compare-charts svg.marks"),
    "chat": ("chat?run=trained", "#chat-send"),
}


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_reached_by_keyboard_and_has_headings_in_order(name, width, server, open_page):
    address, waits_for = PAGES[name]
    page = open_page(server.url + address, width=width)
    page.locator(waits_for).first.wait_for()
    check(page)


@pytest.mark.parametrize("width", [1280, 390])
def test_all_tabs_of_a_run_are_reached_by_keyboard_and_have_headings_in_order(width, server, open_page):
    page = open_page(f"{server.url}runs?run=trained", width=width)
    page.locator("#runs-charts svg.marks").first.wait_for()
    page.locator(".runs-warnings summary").click()
    check(page)
    for place, waits_for in enumerate(("#runs-samples td", ".log-text", "#runs-recipe .cm-line"), start=1):
        _tab(place, waits_for)(page)
        check(page)
