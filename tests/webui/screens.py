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

from tests.webui.conftest import TIMEOUT_MS, fill, serving

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
TOO_LARGE = "set=model.path=Qwen/Qwen3-32B&set=adapter.type=full&set=data.max_length=4096"


@dataclass(frozen=True)
class View:
    """A view: where it is, what has to be there, and what is done before the picture."""

    name: str
    address: str
    waits_for: str
    act: Callable[[Any], None] = lambda page: None
    is_saved: bool = False
    is_chinese: bool = False


def _tab(number: int, waits_for: str) -> Callable[[Any], None]:
    def open_tab(page: Any) -> None:
        page.locator("#runs-tabs button[role=tab]").nth(number).click()
        page.locator(waits_for).first.wait_for()

    return open_tab


def _measure(page: Any) -> None:
    page.locator("#data-measure").click()
    page.locator("#data-chart .marks").first.wait_for()


def _chat(page: Any) -> None:
    page.locator("#chat-load").click()
    page.locator("#chat-send:not([disabled])").wait_for()
    page.locator("#chat-prompt textarea").fill("What is 3 and 3?")
    page.locator("#chat-send").click()
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
    View("data-grpo", "data?from=run:grpo", "#data-rows :visible"),
    View("runs", "runs", "#runs-list a", is_chinese=True),
    View("run", "runs?run=longer", CHART, is_saved=True, is_chinese=True),
    View("run-dpo", "runs?run=dpo", CHART),
    View("run-grpo", "runs?run=grpo", CHART),
    View("run-broken", "runs?run=broken", "#controls-diagnosis :visible", is_chinese=True),
    View("run-samples", "runs?run=grpo", CHART, _tab(1, "#runs-completions :visible")),
    View("run-log", "runs?run=sft", CHART, _tab(2, "[role=tabpanel]:visible")),
    View("run-recipe", "runs?run=sft", CHART, _tab(3, "#runs-plan :visible")),
    View("run-checkpoints", "runs?run=sft", CHART, _tab(4, "#runs-checkpoints :visible")),
    View("run-result", "runs?run=sft", CHART, _tab(5, "#runs-result :visible")),
    View("run-export", "runs?run=sft", CHART, _tab(6, "#export-start")),
    View("compare", "compare?run=sft&run=longer", "#compare-plot .marks", is_saved=True),
    View("chat", "chat?run=sft", "#chat-load:not([disabled])", _chat, is_chinese=True),
]


def prepare(folder: Path) -> Path:
    """A workspace with a run of each kind."""
    workspace = folder / "workspace"
    if not (workspace / "chats.jsonl").exists():
        fill(workspace)
        (workspace / "table.csv").write_text("ask,reply\nWhere?,There.\nWhen?,Now.\n", encoding="utf-8")
        good = (workspace / "chats.jsonl").read_text(encoding="utf-8").splitlines()[:3]
        (workspace / "bad.jsonl").write_text("\n".join([*good, "{", json.dumps({"messages": 3})]), encoding="utf-8")
        (workspace / "grpo.yaml").write_text(GRPO, encoding="utf-8")
    runs = {name: ["trained.yaml", *changes] for name, changes in RECIPES.items()} | {"grpo": ["grpo.yaml"]}
    for name, words in runs.items():
        if not (workspace / "runs" / name).exists():
            command = [sys.executable, "-m", "tunekit", "train", *words, f"output.dir=runs/{name}"]
            subprocess.run(command, cwd=workspace, check=name != "broken", capture_output=True)
    return workspace


def take(root: str, view: View, browser: Any, file: Path, *, size: str, theme: str, language: str) -> None:
    """A picture of a view: the whole page, as far as it goes."""
    width, height = SIZES[size]
    prefix = "" if language == "en" else f"{language}/"
    with contextlib.closing(browser.new_context(viewport={"width": width, "height": height})) as context:
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(f"{root}{prefix}{view.address}{'&' if '?' in view.address else '?'}__theme={theme}")
        page.locator(view.waits_for).first.wait_for()
        view.act(page)
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
        workspace = prepare(folder)
        server = stack.enter_context(serving(workspace))
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        for view in VIEWS:
            if asked.save and view.is_saved:
                SAVED.mkdir(exist_ok=True)
                file = SAVED / f"{view.name}.png"
                take(server.url, view, browser, file, size="wide", theme="light", language="en")
            elif not asked.save and (not asked.names or view.name.startswith(tuple(asked.names))):
                languages = ("en", "zh") if view.is_chinese else ("en",)
                for size, theme, language in ((s, t, one) for s in SIZES for t in THEMES for one in languages):
                    if language == "zh" and (size, theme) != ("wide", "light"):
                        continue
                    file = folder / f"{view.name}-{size}-{theme}-{language}.png"
                    try:
                        take(server.url, view, browser, file, size=size, theme=theme, language=language)
                    except Exception as error:  # noqa: BLE001 - a view that does not come is told of; the others are taken
                        print(f"{file}: {str(error).splitlines()[0]}", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
