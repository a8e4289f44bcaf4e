"""Pictures of every view, to be looked at: both widths, light and dark, and some in Chinese.

    python -m tests.webui.screens FOLDER           # all of them
    python -m tests.webui.screens FOLDER run new   # those whose name begins so
    python -m tests.webui.screens --save           # the four of the README

The runs in them are real; they are trained once, in `FOLDER/workspace`.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.waiting import LIMIT_SECONDS
from tests.webui.conftest import fill, serving

SAVED = Path(__file__).with_name("screens")
SIZES = {"wide": (1280, 900), "phone": (390, 844)}
THEMES = ("light", "dark")

RECIPES = {
    "sft": [],
    "longer": ["adapter.rank=16", "train.max_steps=24"],
    "dpo": ["method.type=dpo", "data.train=pairs.jsonl", "train.max_steps=6"],
    "broken": ["train.learning_rate=1e30", "train.max_steps=8"],
}
GRPO = """\
model: pico
data: {train: sums.jsonl, max_length: 64}
method:
  type: grpo
  rewards:
    - numeric_match
    - {type: regex, pattern: '.*\\.', weight: 0.2}
  max_completion_length: 16
train: {max_steps: 6}
output: {name: grpo}
"""
BAD = [{"messages": 3}, {"messages": []}, {"messages": [{"role": "nobody", "content": "?"}]}]
TOO_LARGE = "set=model.path=Qwen/Qwen3-32B&set=adapter.type=full&set=data.max_length=4096"


@dataclass(frozen=True)
class View:
    """A view: where it is, what has to be there, what is done before the picture, and whose server shows it."""

    name: str
    address: str
    waits_for: str
    act: Callable[[Any], None] = lambda page: None
    is_saved: bool = False
    is_chinese: bool = False
    server: str = "usual"


def _tab(number: int, waits_for: str) -> Callable[[Any], None]:
    def open_tab(page: Any) -> None:
        tab = page.locator("#runs-tabs .tab-container:not(.visually-hidden) button[role=tab]").nth(number)
        if not tab.is_visible():
            page.locator("#runs-tabs .overflow-menu > button").click()
            tab = page.locator("#runs-tabs .overflow-dropdown button").nth(number - 8)
        tab.click()
        page.locator(waits_for).first.wait_for()

    return open_tab


def _headed(page: Any) -> None:
    page.locator("#runs-head h1").wait_for()
    page.locator(CHART).first.wait_for()


def _overlay(page: Any) -> None:
    page.locator("#runs-look > button").click()
    page.locator("#runs-overlay input").click()
    page.get_by_role("option", name="sft").click()
    page.keyboard.press("Escape")
    page.locator("#runs-charts .marks").get_by_text("sft").first.wait_for()


def _charts(page: Any) -> None:
    page.locator("#runs-look > button").click()
    page.locator("#runs-shown input").click()
    page.locator("#runs-shown input").fill("logps")
    page.get_by_role("option", name="logps/chosen").click()
    page.keyboard.press("Escape")
    page.get_by_label("tokens", exact=True).check()
    page.locator("#runs-charts").get_by_text("logps/chosen").first.wait_for()


def _manage(page: Any) -> None:
    page.locator("#controls-manage > button").click()
    page.locator("#controls-delete-name").wait_for()


def _choose(page: Any) -> None:
    for name in ("sft", "longer"):
        page.locator(f"#pick-{name}").check()


def _columns(page: Any) -> None:
    page.locator("#runs-columns-fold > button").click()
    page.locator("#runs-columns input").click()
    for key in ("method.type", "train.max_steps"):
        page.locator("#runs-columns input").fill(key)
        page.get_by_role("option", name=key).click()
    page.keyboard.press("Escape")
    page.locator("#runs-parallel .marks").get_by_text("train.max_steps").wait_for()


def _measure(page: Any) -> None:
    page.locator("#data-measure").click()
    page.locator("#data-chart .marks").first.wait_for()


def _wrong_password(page: Any) -> None:
    page.locator("#password").fill("no")
    page.locator("button").click()
    page.get_by_role("alert").wait_for()


def _chat(page: Any) -> None:
    page.locator("#chat-load").click()
    page.locator("#chat-send:not([disabled])").wait_for()
    page.locator("#chat-prompt textarea").fill("What is 3 and 3?")
    page.locator("#chat-send").click()
    page.locator("#chat-right [data-testid=bot]").wait_for()
    page.locator("#chat-send:not([disabled])").wait_for()


CHART = "#runs-charts .marks"
VIEWS = [
    View("new", "new?from=file:trained.yaml", ".plan-bar", is_saved=True, is_chinese=True),
    View("new-wrong", "new?from=file:trained.yaml&set=adapter.rank=-1&set=train.seed=x", "#form-problems li"),
    View("new-grpo", "new?from=run:grpo", ".plan-bar"),
    View("new-too-large", f"new?from=file:trained.yaml&{TOO_LARGE}", ".plan-refused"),
    View(
        "data",
        "data?path=example:pirate.jsonl&max_length=48",
        "#data-rows :visible",
        _measure,
        is_saved=True,
        is_chinese=True,
    ),
    View("data-pairs", "data?path=pairs.jsonl&method=dpo", "#data-rows :visible"),
    View("data-columns", "data?path=table.csv", "#data-columns td"),
    View("data-bad", "data?path=bad.jsonl", "#data-bad li"),
    View("data-broken", "data?path=broken.jsonl", "#data-status .told"),
    View("data-grpo", "data?from=run:grpo", "#data-rows :visible"),
    View("runs", "runs", "#runs-list a", is_chinese=True),
    View("run", "runs?run=longer", CHART, is_saved=True, is_chinese=True),
    View("run-dpo", "runs?run=dpo", CHART),
    View("run-grpo", "runs?run=grpo", CHART),
    View("run-broken", "runs?run=broken", "#controls-diagnosis .controls-card", _headed, is_chinese=True),
    View("run-samples", "runs?run=grpo", CHART, _tab(1, "#runs-completions :visible")),
    View("run-log", "runs?run=sft", CHART, _tab(2, "[role=tabpanel]:visible")),
    View("run-recipe", "runs?run=sft", CHART, _tab(3, "#runs-recipe .cm-line")),
    View("run-checkpoints", "runs?run=sft", CHART, _tab(4, "#runs-checkpoints :visible")),
    View("run-result", "runs?run=sft", CHART, _tab(5, "#runs-result :visible")),
    View("run-evaluate", "runs?run=sft", CHART, _tab(6, "#evaluate-start"), is_chinese=True),
    View("run-export", "runs?run=sft", CHART, _tab(7, "#export-start")),
    View("compare", "compare?run=sft&run=longer", "#compare-charts .marks", is_saved=True),
    View("chat", "chat?run=sft", "#chat-load:not([disabled])", _chat, is_chinese=True),
    View("runs-chosen", "runs", "#runs-list a", _choose),
    View("runs-columns", "runs", "#runs-list a", _columns, is_chinese=True),
    View("run-charts", "runs?run=dpo", CHART, _charts),
    View("run-overlay", "runs?run=longer", CHART, _overlay),
    View("run-manage", "runs?run=sft", CHART, _manage, is_chinese=True),
    View("run-none", "runs?run=no-such", "#runs-head .told"),
    View("compare-few", "compare?run=sft", "#compare-message p"),
    View("report", "report?run=sft", "h1"),
    View("empty-runs", "runs", ".runs-empty", is_chinese=True, server="empty"),
    View("empty-new", "new", ".plan-bar", server="empty"),
    View("empty-data", "data", "#data-status p", server="empty"),
    View("empty-compare", "compare", "#compare-message p", server="empty"),
    View("empty-chat", "chat", "#chat-nothing p", server="empty"),
    View("login", "runs", "#password", is_chinese=True, server="password"),
    View("login-wrong", "runs", "#password", _wrong_password, server="password"),
    View("shown-runs", "runs", "#runs-list a", server="read-only"),
    View("shown-run", "runs?run=sft", CHART, server="read-only"),
    View("shown-new", "new?from=file:trained.yaml", ".plan-bar", server="read-only"),
    View("shown-data", "data?path=chats.jsonl", "#data-rows :visible", server="read-only"),
    View("shown-chat", "chat", "#chat-read-only", server="read-only"),
]


def prepare(folder: Path) -> Path:
    """A workspace with a run of each kind."""
    workspace = folder / "workspace"
    if not (workspace / "chats.jsonl").exists():
        fill(workspace)
        (workspace / "table.csv").write_text("ask,reply\nWhere?,There.\nWhen?,Now.\n", encoding="utf-8")
        good = (workspace / "chats.jsonl").read_text(encoding="utf-8").splitlines()[:3]
        (workspace / "bad.jsonl").write_text("\n".join([*good, *map(json.dumps, BAD)]), encoding="utf-8")
        (workspace / "broken.jsonl").write_text("\n".join([*good, "{"]), encoding="utf-8")
        (workspace / "grpo.yaml").write_text(GRPO, encoding="utf-8")
    runs = {name: ["trained.yaml", *changes] for name, changes in RECIPES.items()} | {"grpo": ["grpo.yaml"]}
    for name, words in runs.items():
        if not (workspace / "runs" / name).exists():
            command = [sys.executable, "-m", "tunekit", "train", *words, f"output.dir=runs/{name}"]
            subprocess.run(command, cwd=workspace, check=name != "broken", capture_output=True)
    return workspace


def server_of(kind: str, folder: Path, stack: contextlib.ExitStack) -> str:
    """The address of a server over the runs or over nothing, which may only show or ask for a password."""
    if kind == "empty":
        (folder / "empty").mkdir(exist_ok=True)
        return stack.enter_context(serving(folder / "empty")).url
    options = ["--read-only"] if kind == "read-only" else []
    secrets = {"TUNEKIT_UI_PASSWORD": "secret"} if kind == "password" else {}
    return stack.enter_context(serving(folder / "workspace", *options, **secrets)).url


def take(root: str, view: View, browser: Any, file: Path, *, size: str, theme: str, language: str) -> None:
    """A picture of a view: the whole page, as far as it goes."""
    width, height = SIZES[size]
    prefix = "" if language == "en" else f"{language}/"
    with contextlib.closing(
        browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    ) as context:
        page = context.new_page()
        page.set_default_timeout(1000 * LIMIT_SECONDS)
        page.goto(f"{root}{prefix}{view.address}{'&' if '?' in view.address else '?'}__theme={theme}")
        page.locator(view.waits_for).first.wait_for()
        view.act(page)
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=file, full_page=not view.is_saved or size == "phone")
    print(file, flush=True)


def main() -> None:
    """Take the pictures that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("names", nargs="*", help="beginnings of names")
    parser.add_argument("--save", action="store_true", help="the four of the README")
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prepare(folder)
        servers: dict[str, str] = {}
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        for view in VIEWS:
            is_asked = view.is_saved if asked.save else not asked.names or view.name.startswith(tuple(asked.names))
            if is_asked and view.server not in servers:
                servers[view.server] = server_of(view.server, folder, stack)
            if asked.save and view.is_saved:
                SAVED.mkdir(exist_ok=True)
                file = SAVED / f"{view.name}.png"
                take(servers[view.server], view, browser, file, size="wide", theme="light", language="en")
            elif is_asked and not asked.save:
                languages = ("en", "zh") if view.is_chinese else ("en",)
                for size, theme, language in ((s, t, one) for s in SIZES for t in THEMES for one in languages):
                    if language == "zh" and (size, theme) != ("wide", "light"):
                        continue
                    file = folder / f"{view.name}-{size}-{theme}-{language}.png"
                    try:
                        take(servers[view.server], view, browser, file, size=size, theme=theme, language=language)
                    except Exception as error:  # noqa: BLE001 - a view that does not come is told of; the others are taken
                        print(f"{file}: {str(error).splitlines()[0]}", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
