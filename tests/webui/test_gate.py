"""Who gets an answer: the addresses, the password, pages of other sites, and what lies outside the workspace."""

import json
import os
import subprocess
import sys
from functools import partial
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.responses import PlainTextResponse

from tests.waiting import LIMIT_SECONDS
from tests.webui.conftest import fill
from webui.app import FONTS, _mount, build_pages
from webui.gate import IDLE_SECONDS, MAX_TRIES, Gate
from webui.pages import PAGES
from webui.site import LANGUAGES, Site, prefix
from webui.words import Words

PASSWORD = "a boat at sea"
OUTSIDE = "nobody is to read this"

get, post = partial(httpx.get, timeout=LIMIT_SECONDS), partial(httpx.post, timeout=LIMIT_SECONDS)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    (folder / "secret.txt").write_text(OUTSIDE, encoding="utf-8")
    workspace = fill(folder / "workspace")
    (workspace / "link.txt").symlink_to(folder / "secret.txt")
    (workspace / "runs").mkdir()
    (workspace / "runs" / "linked").symlink_to(folder)
    return workspace


@pytest.fixture(scope="module")
def open_server(serve, root):
    return serve(root).url.rstrip("/")


@pytest.fixture(scope="module")
def locked_server(serve, root):
    return serve(root, TUNEKIT_UI_PASSWORD=PASSWORD).url.rstrip("/")


@pytest.fixture(scope="module")
def wall_screen(serve, root):
    return serve(root, "--read-only").url.rstrip("/")


def start(url):
    """The queue's entry for the first function that the pages offer, as their own script would ask."""
    functions = get(f"{url}/config").json()["dependencies"]
    number = next(function["id"] for function in functions if function["backend_fn"])
    return f"{url}/gradio_api/queue/join?", {"data": [], "fn_index": number, "session_hash": "test", "event_data": None}


@pytest.mark.slow
@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::"])
def test_an_address_that_others_reach_needs_a_password(host, tmp_path):
    command = [sys.executable, "-m", "tunekit", "ui", "--host", host, "--no-open", "--root", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key != "TUNEKIT_UI_PASSWORD"}
    answer = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
    )
    assert answer.returncode == 2
    assert "without a password" in answer.stderr and "TUNEKIT_UI_PASSWORD" in answer.stderr
    assert "Traceback" not in answer.stderr and not answer.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read"), (b"", "is empty"), (b"\xff", "cannot")])
def test_a_file_without_a_password_is_refused_and_not_taken_for_none(tmp_path, content, words):
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    command = [
        sys.executable,
        "-m",
        "tunekit",
        "ui",
        "--password-file",
        str(file),
        "--no-open",
        "--root",
        str(tmp_path),
    ]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    assert answer.returncode == 2 and words in answer.stderr and "Traceback" not in answer.stderr


@pytest.mark.slow
def test_who_does_not_know_the_password_gets_nothing_but_the_question(locked_server):
    for path in ("/config", "/gradio_api/info", "/runs/", "/theme.css", f"/gradio_api/file={quote('/etc/passwd')}"):
        answer = get(locked_server + path)
        assert (answer.status_code, answer.text) == (401, "log in first"), path
    assert post(f"{locked_server}/gradio_api/queue/join", json={}).status_code == 401
    assert post(f"{locked_server}/gradio_api/upload", files={"files": b"x"}).status_code == 401
    page = get(f"{locked_server}/runs?run=a", headers={"Accept": "text/html"})
    assert page.status_code == 303 and page.headers["location"] == "/login?next=%2Fruns%3Frun%3Da"
    assert get(f"{locked_server}/zh/runs", headers={"Accept": "text/html"}).headers["location"].startswith("/zh/")


@pytest.mark.slow
def test_the_password_opens_the_pages_and_a_wrong_one_does_not(locked_server):
    with httpx.Client(base_url=locked_server, timeout=LIMIT_SECONDS) as client:
        wrong = client.post("/login?next=%2Fruns", data={"password": PASSWORD + "s"})
        assert wrong.status_code == 401 and "Wrong password" in wrong.text
        assert client.get("/config").status_code == 401
        right = client.post("/login?next=%2Fruns", data={"password": PASSWORD})
        assert right.status_code == 303 and right.headers["location"] == "/runs"
        cookie = right.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and PASSWORD not in cookie
        assert client.get("/config").status_code == 200
        name = f"tunekit-{httpx.URL(locked_server).port}"  # a server on another port has another one
        token = client.cookies[name]
    assert get(f"{locked_server}/config", cookies={name: token}).status_code == 200
    assert get(f"{locked_server}/config", cookies={name: "forged"}).status_code == 401


def test_a_visitor_is_logged_in_to_two_servers_of_a_machine_at_once():
    gate = partial(Gate, PlainTextResponse("page"), read_only=False)
    cookies = CookieJar()
    visits = [
        TestClient(
            gate(password=PASSWORD), base_url=f"http://127.0.0.1:{port}", cookies=cookies, follow_redirects=False
        )
        for port in (7860, 7861)
    ]
    for visit in visits:
        assert visit.get("/").status_code == 401
        assert visit.post("/login", data={"password": PASSWORD}).status_code == 303
    assert [visit.get("/").text for visit in visits] == ["page", "page"]


def visitor(app, **options):
    return TestClient(app, base_url="http://127.0.0.1:7860", follow_redirects=False, **options)


def test_a_log_out_ends_the_session_of_this_browser_for_whoever_has_its_cookie_and_no_other():
    gate = Gate(PlainTextResponse("page"), password=PASSWORD, read_only=False)
    first, second = visitor(gate), visitor(gate)
    for visit in (first, second):
        visit.post("/login", data={"password": PASSWORD})
    stolen = dict(first.cookies)
    assert stolen["tunekit-7860"] != second.cookies["tunekit-7860"]
    assert first.get("/logout").status_code == 405, "no link leads out"
    foreign = {"Origin": "https://elsewhere.example"}
    assert first.post("/logout", headers=foreign).status_code == 403
    assert first.get("/").text == "page"
    answer = first.post("/zh/logout")
    assert (answer.status_code, answer.headers["location"]) == (303, "/zh/login")
    assert visitor(gate, cookies=stolen).get("/").status_code == 401 == first.get("/").status_code
    assert second.get("/").text == "page"
    # One that the server does not know any more is led to the question, too.
    assert first.post("/logout").headers["location"] == "/login"


def test_a_session_ends_after_a_day_without_a_request(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("webui.gate.time.monotonic", lambda: clock[0])
    visit = visitor(Gate(PlainTextResponse("page"), password=PASSWORD, read_only=False))
    visit.post("/login", data={"password": PASSWORD})
    for _ in range(3):
        clock[0] += 0.9 * IDLE_SECONDS
        assert visit.get("/").text == "page"
    clock[0] += IDLE_SECONDS
    assert [visit.get("/").status_code for _ in range(2)] == [401, 401]


def test_guesses_from_an_address_lock_out_no_browser_that_has_logged_in_from_there():
    gate = Gate(PlainTextResponse("page"), password=PASSWORD, read_only=False)
    known, new = visitor(gate), visitor(gate)
    known.post("/login", data={"password": PASSWORD})
    codes = [new.post("/login", data={"password": str(n)}).status_code for n in range(MAX_TRIES + 1)]
    assert codes == [401] * MAX_TRIES + [429]
    assert known.get("/").text == "page"
    known.post("/logout")
    # It is counted for itself, and a cookie that somebody makes up is not.
    assert known.post("/login", data={"password": PASSWORD}).status_code == 303
    codes = [known.post("/login", data={"password": str(n)}).status_code for n in range(MAX_TRIES + 1)]
    assert codes == [401] * MAX_TRIES + [429]
    forged = visitor(gate, cookies={"tunekit-browser-7860": "me.0123"})
    assert forged.post("/login", data={"password": PASSWORD}).status_code == 429


@pytest.mark.slow
@pytest.mark.parametrize("onward", ["//elsewhere.example", "https://elsewhere.example", "/\\elsewhere.example", "/\tx"])
def test_a_login_leads_to_no_other_site(locked_server, onward):
    answer = post(f"{locked_server}/login?next={quote(onward, safe='')}", data={"password": PASSWORD})
    assert answer.headers["location"] == "/"


@pytest.mark.slow
def test_passwords_cannot_be_tried_for_long(serve, root):
    url = serve(root, TUNEKIT_UI_PASSWORD=PASSWORD).url
    codes = [post(f"{url}login", data={"password": str(n)}).status_code for n in range(MAX_TRIES + 2)]
    assert codes == [401] * MAX_TRIES + [429] * 2
    assert post(f"{url}login", data={"password": PASSWORD}).status_code == 429
    # A proxy on this machine says whom it asks for.
    proxied = post(f"{url}login", data={"password": PASSWORD}, headers={"X-Forwarded-For": "192.0.2.7"})
    assert proxied.status_code == 303


@pytest.mark.slow
def test_a_visitor_logs_out_in_the_page(serve, root, open_page):
    page = open_page(f"{serve(root, TUNEKIT_UI_PASSWORD=PASSWORD).url}login?next=/data", waits_for="#password")
    page.locator("#password").fill(PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**/data")
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
    page.goto(page.url.replace("login", "runs"))
    page.locator("#password").wait_for()


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    ],
)
def test_a_page_of_another_site_can_start_nothing(open_server, headers):
    where, what = start(open_server)
    assert post(where, json=what, headers=headers).status_code == 403
    assert post(f"{open_server}/gradio_api/upload", files={"files": b"x"}, headers=headers).status_code == 403
    own = {"Origin": open_server, "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
    assert post(where, json=what, headers=own).status_code == 200


@pytest.mark.slow
def test_a_page_of_another_site_reads_nothing_but_may_link_here(open_server):
    foreign = {"Sec-Fetch-Site": "cross-site"}
    assert get(f"{open_server}/config", headers={**foreign, "Sec-Fetch-Mode": "no-cors"}).status_code == 403
    followed = get(f"{open_server}/runs", headers={**foreign, "Sec-Fetch-Mode": "navigate"})
    assert followed.status_code == 200
    assert "access-control-allow-origin" not in followed.headers
    assert followed.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'self' http://localhost:*" in followed.headers["content-security-policy"]


@pytest.mark.slow
@pytest.mark.parametrize("host", ["elsewhere.example", "127.0.0.1.elsewhere.example:80", "192.168.0.2", ""])
def test_a_name_that_was_pointed_to_this_machine_is_not_answered_to(open_server, host):
    assert get(f"{open_server}/config", headers={"Host": host}).status_code in (400, 421)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["/gradio_api/file=", "/zh/gradio_api/file=", "/file=", "/gradio_api/file/"])
def test_no_way_of_asking_for_a_file_leads_to_one(open_server, root, way):
    secret, own = root.parent / "secret.txt", root / "chats.jsonl"
    names = [str(secret), str(root / "link.txt"), f"{root}/../secret.txt", "../secret.txt", "link.txt", "chats.jsonl"]
    names += [str(own), "/etc/passwd", "..%2Fsecret.txt", f"{root}/runs/linked/secret.txt", "/proc/self/environ"]
    for name in names:
        for path in (name, quote(name, safe=""), quote(quote(name, safe=""), safe="")):
            answer = get(open_server + way + path, follow_redirects=True)
            assert OUTSIDE not in answer.text and "messages" not in answer.text and "root:" not in answer.text
            assert answer.status_code != 200 or "text/html" in answer.headers["content-type"], path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../secret.txt", "/etc/passwd", "..\\secret", "a/../../b", "x\0y", "." * 300])
def test_what_is_sent_here_is_kept_in_a_folder_of_the_servers_own(open_server, root, name):
    before = sorted(path for path in root.parent.rglob("*") if not path.is_symlink())
    answer = post(f"{open_server}/gradio_api/upload", files={"files": (name, b"rows")})
    assert sorted(path for path in root.parent.rglob("*") if not path.is_symlink()) == before
    if answer.status_code == 200:
        (kept,) = answer.json()
        assert Path(kept).resolve() == Path(kept) and "tunekit-ui-" in kept


@pytest.mark.slow
def test_a_wall_screen_takes_nothing(wall_screen):
    assert post(f"{wall_screen}/gradio_api/upload", files={"files": b"x"}).status_code == 403


STARTING = {
    "NewRun.find_models",
    "NewRun.overwrite",
    "NewRun.write",
    "ResumeForm._start",
    "_Deletion._delete",
    "_attach_loading.<locals>.load_chosen",
    "_build_measuring.<locals>.run",
    "_build_rewards.<locals>.run",
    "_attach_start.<locals>.begin",
    "build.<locals>.delete",
    "build.<locals>.export",
    "build.<locals>.upload",
}
"""What starts, changes, deletes or reads much, by the names of its functions."""


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_fonts_of_the_pages_are_there_with_the_letters_of_english_in_each_weight(open_server, language):
    for file in FONTS.values():
        answer = get(f"{open_server}{prefix(language)}/static/fonts/{file}.woff2")
        # A file of a few letters of Cyrillic has 5 kB.
        assert answer.status_code == 200 and len(answer.content) > 30_000, file


def test_a_wall_screen_has_no_function_that_starts_changes_or_deletes(root, monkeypatch):
    monkeypatch.chdir(root)

    def offered(site):
        functions = build_pages(site, Words("en")).fns.values()
        return {getattr(function.fn, "__qualname__", "") for function in functions}

    assert offered(Site(root)) >= STARTING
    assert not offered(Site(root, read_only=True)) & STARTING


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../secret.txt", "link.txt", "chats.jsonl"])
def test_a_page_is_sent_no_file_that_is_here_already_as_if_it_came_from_a_browser(open_server, root, name):
    functions = get(f"{open_server}/config").json()["dependencies"]
    function = next(entry for entry in functions if any(event == "upload" for _, event in entry["targets"]))
    forged = {"path": os.path.normpath(root / name), "orig_name": "x.txt", "meta": {"_type": "gradio.FileData"}}
    data = [[forged], *[None] * (len(function["inputs"]) - 1)]
    what = {"data": data, "fn_index": function["id"], "session_hash": f"forged-{name}", "event_data": None}
    assert post(f"{open_server}/gradio_api/queue/join?", json=what).status_code == 200
    told = get(f"{open_server}/gradio_api/queue/data?session_hash={quote(f'forged-{name}')}").text
    (done,) = [line for line in told.splitlines() if "process_completed" in line]
    assert json.loads(done.removeprefix("data:"))["success"] is False
    assert not (root / "uploads").exists() and OUTSIDE not in told


def test_what_a_request_names_as_uploaded_was_uploaded(root, monkeypatch):
    monkeypatch.setattr("webui.app.PAGES", {"data": PAGES["data"]})
    app = FastAPI()
    _mount(app, Site(root), Words("en"))
    with TestClient(app) as client:
        functions = client.get("/config").json()["dependencies"]
        function = next(entry for entry in functions if any(event == "upload" for _, event in entry["targets"]))
        forged = {"path": str(root / "chats.jsonl"), "meta": {"_type": "gradio.FileData"}}
        data = [[forged], *[None] * (len(function["inputs"]) - 1)]
        what = {"data": data, "fn_index": function["id"], "session_hash": "forged", "event_data": None}
        assert client.post("/gradio_api/queue/join", json=what).status_code == 200
        told = client.get("/gradio_api/queue/data", params={"session_hash": "forged"}).text
    (done,) = [line for line in told.splitlines() if "process_completed" in line]
    assert json.loads(done.removeprefix("data:"))["success"] is False
    assert not (root / "uploads").exists()


@pytest.mark.slow
def test_no_secret_is_told_of(serve, root):
    url = serve(root, TUNEKIT_UI_PASSWORD=PASSWORD, HF_TOKEN="hf_sesame_open_sesame_open_sesame").url
    with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as client:
        client.post("/login", data={"password": PASSWORD})
        text = json.dumps(client.get("/config").json()) + client.get("/runs").text
    assert PASSWORD not in text and "sesame" not in text
