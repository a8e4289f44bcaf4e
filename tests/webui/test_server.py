"""The server as a process: what it loads, what it asks of others, how it begins and ends, and in a notebook."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import tunekit
from tests.waiting import LIMIT_SECONDS
from tests.webui.conftest import fill
from tunekit.errors import RunError


@pytest.fixture(scope="module")
def server(serve, tmp_path_factory):
    return serve(fill(tmp_path_factory.mktemp("server") / "workspace"))


@pytest.mark.slow
def test_a_visit_of_every_page_asks_no_other_machine_and_has_no_errors(server, browser):
    context = browser.new_context()
    context.set_default_timeout(1000 * LIMIT_SECONDS)
    page = context.new_page()
    hosts, faults = set(), []
    page.on("request", lambda request: hosts.add(request.url.split("/")[2] if "://" in request.url else "inline"))
    page.on("pageerror", lambda error: faults.append(str(error)))
    for name in ("new", "data", "runs", "compare", "chat", "zh/runs"):
        page.goto(server.url + name)
        page.locator("#shell-header nav").wait_for()
        page.locator("footer").or_(page.locator("main")).first.wait_for()
    context.close()
    assert hosts - {"inline"} == {server.url.split("/")[2]}
    assert not faults


@pytest.mark.slow
def test_the_other_language_shows_the_same_page_of_the_same_run(server, open_page):
    page = open_page(f"{server.url}runs?run=nothing")
    page.wait_for_function("document.title === 'nothing · Runs · tunekit'")
    assert page.locator("html").get_attribute("lang") == "en"
    page.locator("#shell-language").click()
    page.wait_for_url("**/zh/runs?run=nothing")
    page.wait_for_function("document.title === 'nothing · 运行 · tunekit'")
    assert page.locator("html").get_attribute("lang") == "zh"
    assert page.locator("#shell-language").inner_text() == "English"
    assert page.locator("nav a[aria-current=page]").inner_text() == "运行"


@pytest.mark.slow
def test_two_visitors_do_not_see_each_others_drafts(server, open_page):
    from playwright.sync_api import expect

    one = open_page(f"{server.url}new?from=file:trained.yaml&set=adapter.rank=24")
    ones = one.locator("#form-yaml .cm-content")
    expect(ones).to_contain_text("rank: 24")
    others = open_page(f"{server.url}new").locator("#form-yaml .cm-content")
    expect(others).to_contain_text("model:")
    assert "rank: 24" not in others.inner_text()
    one.reload()
    expect(ones).to_contain_text("rank: 24")


@pytest.mark.slow
def test_the_process_that_serves_loads_no_torch(server):
    urllib.request.urlopen(f"{server.url}runs").read()
    maps = Path(f"/proc/{server.process.pid}/maps").read_text(encoding="utf-8")
    assert "python" in maps
    for library in ("libtorch", "tokenizers", "bitsandbytes", "libcuda"):
        assert library not in maps, library


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_server_ends_when_it_is_asked_and_leaves_nothing_behind(tmp_path, ending):
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "tunekit", "ui", "--root", str(tmp_path), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    url = process.stdout.readline().split()[0]
    urllib.request.urlopen(f"{url}config").read()
    process.send_signal(ending)
    process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0
    assert not list((tmp_path / "temporary").glob("tunekit-ui-*"))


@pytest.mark.slow
def test_a_port_that_is_taken_and_a_folder_that_is_none_are_told_of(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options, words in (
            (["--port", str(taken.getsockname()[1])], "pass another --port"),
            (["--root", str(tmp_path / "nothing")], "is not a folder"),
        ):
            command = [sys.executable, "-m", "tunekit", "ui", "--no-open", "--root", str(tmp_path), *options]
            answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
            assert answer.returncode == 2 and words in answer.stderr and "Traceback" not in answer.stderr


@pytest.mark.slow
def test_the_page_comes_up_as_the_readme_has_it(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)
    (line,) = [line for line in block.splitlines() if not line.startswith("pip install")]
    # The port that it takes by itself may be somebody else's here.
    command = [sys.executable, "-m", *line.split(), "--port", "0"]
    environment = os.environ | {"BROWSER": "true"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert urllib.request.urlopen(f"{url}runs").status == 200
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_SECONDS)


@pytest.mark.slow
def test_a_notebook_shows_the_page_in_a_frame_until_it_is_closed(tmp_path):
    page = tunekit.ui(tmp_path, height=640)
    html = page._repr_html_()
    assert re.search(f'<iframe src="{page.url}"[^>]* height="640"', html)
    assert urllib.request.urlopen(f"{page.url}config").status == 200
    page.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(page.url)


def test_a_page_that_cannot_be_served_is_told_of_in_a_notebook(tmp_path):
    with pytest.raises(RunError, match="is not a folder"):
        tunekit.ui(tmp_path / "nothing")
