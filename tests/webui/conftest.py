"""What tests of the web UI share: a workspace, the real server over it, a real browser, and a run that was trained."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tunekit
from tests.commands import run_command
from tests.waiting import LIMIT_SECONDS

TRAINED_RECIPE = """\
model: pico
data:
  train: chats.jsonl
  eval_size: 0.25
  max_length: 128
adapter: lora
train:
  max_steps: 8
  global_batch_size: 2
  save_steps: 4
  eval_steps: 4
output:
  name: trained
"""


def fill(folder: Path) -> Path:
    """Make a folder a workspace with a few rows of each kind, and a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} and {a}?"},
                {"role": "assistant", "content": f"It is {2 * a}, I think."},
            ]
        }
        for a in range(1, 17)
    ]
    pairs = [
        {"prompt": f"Say {word}.", "chosen": f"{word}!", "rejected": "No."} for word in ("sea", "boat", "net", "sail")
    ]
    sums = [{"prompt": [{"role": "user", "content": f"What is {a} + {a}?"}], "answer": str(2 * a)} for a in range(1, 9)]
    for name, rows in (("chats.jsonl", chats), ("pairs.jsonl", pairs), ("sums.jsonl", sums)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "trained.yaml").write_text(TRAINED_RECIPE, encoding="utf-8")
    return folder


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace of the test's own."""
    return fill(tmp_path / "workspace")


def train(folder: Path, *arguments: str) -> tunekit.Run:
    """Train in a workspace by the command, and return the newest run."""
    done = run_command("train", *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return tunekit.Run(max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime))


@pytest.fixture(scope="session")
def trained_workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with one trained run in it. Copy what you change: `trained_run` is a copy in `workspace`."""
    folder = fill(tmp_path_factory.mktemp("trained") / "workspace")
    train(folder, "trained.yaml")
    return folder


@pytest.fixture
def trained_run(workspace: Path, trained_workspace: Path) -> tunekit.Run:
    """A trained run of eight steps with two checkpoints and evaluations, in the test's own workspace."""
    (original,) = (trained_workspace / "runs").iterdir()
    shutil.copytree(original, workspace / "runs" / original.name)
    return tunekit.Run(workspace / "runs" / original.name)


@dataclass
class Server:
    """A server that runs: its address, and its process."""

    url: str
    process: subprocess.Popen[str]

    def stop(self) -> int:
        """End it as a terminal does, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode


@contextlib.contextmanager
def serving(root: Path, *options: str, **environment: str) -> Iterator[Server]:
    """The real server over a folder, on a free port."""
    command = [sys.executable, "-m", "tunekit", "ui", "--root", str(root), "--port", "0", "--no-open", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"http://\S+/", line)
        assert found is not None, f"the server did not say where it is: {line!r}"
        yield Server(found[0], process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Server]]:
    """Start servers: `serve(root, "--read-only", TUNEKIT_UI_PASSWORD="...")`; they end with the module."""
    with contextlib.ExitStack() as servers:
        yield lambda root, *options, **environment: servers.enter_context(serving(root, *options, **environment))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, without a window."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs a browser: install chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=1000 * LIMIT_SECONDS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page of a server in a browser of its own: `open_page(url, width=390)`; the test ends its errors."""
    contexts = []

    def opened(url: str, *, width: int = 1280, height: int = 900, waits_for: str = "#shell-header") -> Any:
        context = browser.new_context(viewport={"width": width, "height": height})
        context.set_default_timeout(1000 * LIMIT_SECONDS)
        contexts.append(context)
        page = context.new_page()
        page.goto(url)
        page.locator(waits_for).wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()


def slow_down(page: Any) -> None:
    """Have each answer of the server take a second more."""
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    slow = {"offline": False, "latency": 1000, "downloadThroughput": -1, "uploadThroughput": -1}
    network.send("Network.emulateNetworkConditions", slow)
