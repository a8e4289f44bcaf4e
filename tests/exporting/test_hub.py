"""Exports sent to a hub: a server here keeps repositories as the hub does, and huggingface_hub talks to it."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import pytest
from huggingface_hub import constants, metadata_load

import tunekit
from tests.data.servers import serving
from tests.tiny import save_chats, save_tiny_model

WRITES, READS = "hf_" + "w" * 20, "hf_" + "r" * 20


CARD = {
    "license": "other",
    "license_name": "tiny-1",
    "license_link": "https://example.org/tiny",
    "library_name": "peft",
    "pipeline_tag": "text-generation",
    "base_model": None,  # a folder of this machine is no model of the hub
}
"""What the hub reads of the card of a run."""


@dataclass
class Repo:
    """A repository: its newest commit, its files, and whether its owners alone see it."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b""})
    commit: str = "1" * 40


@dataclass
class Hub:
    """What a hub holds, and what it was asked to change."""

    repos: dict[str, Repo] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            path = self.path.partition("?")[0]
            if token not in (WRITES, READS):
                self.answer(401, {"error": "Invalid username or password."})
            elif path == "/api/whoami-v2":
                role = "write" if token == WRITES else "read"
                access = {"accessToken": {"displayName": "here", "role": role}}
                self.answer(200, {"type": "user", "name": "ada", "orgs": [{"name": "engines"}], "auth": access})
            elif path == "/api/repos/create":
                wanted = json.loads(sent)
                name = f"{wanted['organization']}/{wanted['name']}"
                hub.changes.append(f"create {name}")
                hub.repos[name] = Repo(private=wanted.get("private", False) or wanted.get("visibility") == "private")
                self.answer(200, {"url": f"{hub.address}/{name}", "id": name})
            elif path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif (at := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/main)?(?:/.*)?", path)) is not None:
                self.of_repo(at[1], at[2] or "info", sent)
            else:
                self.answer(404, {"error": f"no {path}"})

        do_POST = do_HEAD = do_GET

        def of_repo(self, name: str, what: str, sent: bytes) -> None:
            repo = hub.repos.get(name)
            if repo is None:
                self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
                return
            match what:
                case "preupload":
                    files = json.loads(sent)["files"]
                    modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]
                    self.answer(200, {"files": modes})
                case "tree":
                    self.answer(200, [{"type": "file", "path": path, "size": 1, "oid": "0"} for path in repo.files])
                case "commit":
                    self.commit(name, repo, [json.loads(line) for line in sent.splitlines()])
                case _:
                    siblings = [{"rfilename": path} for path in repo.files]
                    told = {"id": name, "sha": repo.commit, "private": repo.private, "siblings": siblings, "tags": []}
                    self.answer(200, told)

        def commit(self, name: str, repo: Repo, lines: list[dict]) -> None:
            header, *changes = lines
            if header["value"].get("parentCommit") not in (None, repo.commit):
                self.answer(412, {"error": "A commit has happened since."})
                return
            for change in changes:
                path = change["value"]["path"]
                if change["key"] == "deletedFile":
                    del repo.files[path]
                else:
                    repo.files[path] = base64.b64decode(change["value"]["content"])
            repo.commit = hashlib.sha1(repo.commit.encode()).hexdigest()
            hub.changes.append(f"commit {name}: {header['value']['summary']}")
            url = f"{hub.address}/{name}/commit/{repo.commit}"
            self.answer(200, {"commitUrl": url, "commitOid": repo.commit, "hookOutput": ""})

        def answer(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            for key, text in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(key, text)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with serving(Handler) as address:
        hub.address = address
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", WRITES)
        yield hub


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tunekit.Run:
    folder = tmp_path_factory.mktemp("workspace")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(8)))
    save_tiny_model(folder / "model")
    card = "---\nlicense: other\nlicense_name: tiny-1\nlicense_link: https://example.org/tiny\n---\n# tiny\n"
    (folder / "model" / "README.md").write_text(card)
    return tunekit.train(
        {
            "model": str(folder / "model"),
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
            "adapter": "lora",
            "train": {"max_steps": 2, "global_batch_size": 4},
            "output": {"dir": str(folder / "runs" / "small"), "sample_prompts": ["double 3"]},
        }
    )


@pytest.mark.slow
def test_a_checked_export_is_sent_as_one_commit_to_a_repository_made_for_it(hub, run, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "tunekit", "export", str(run.path), str(tmp_path / "out"), "--adapter"]
    command += ["--push", "engines/small", "--private", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pushed"] == f"{hub.address}/engines/small"
    assert hub.changes == ["create engines/small", "commit engines/small: adapter weights of small"]
    repo = hub.repos["engines/small"]
    assert repo.private
    written = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert {name: body for name, body in repo.files.items() if name != ".gitattributes"} == written
    assert "adapter_model.safetensors" in written and WRITES not in done.stdout + done.stderr
    data = metadata_load(tmp_path / "out" / "README.md")
    assert {key: data.get(key) for key in CARD} == CARD
    licence = "| License of the base model | tiny-1 (https://example.org/tiny) |"
    assert licence in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_a_repository_that_holds_something_is_replaced_only_when_that_is_asked_for(hub, run, tmp_path):
    hub.repos["ada/old"] = Repo(files={".gitattributes": b"", "README.md": b"old", "model.bin": b"old"})
    told = []
    with pytest.raises(tunekit.TunekitError, match=r"is not empty: it has README.md and 1 more files; .*--replace"):
        tunekit.export(run, tmp_path / "out", kind="adapter", push="ada/old", on_event=told.append)
    assert told == [] and not (tmp_path / "out").exists(), "nothing is computed for what cannot be sent"
    done = tunekit.export(run, tmp_path / "out", kind="adapter", push="ada/old", replace=True)
    assert set(hub.repos["ada/old"].files) == {".gitattributes", "export.json", *done.files}
    assert hub.repos["ada/old"].files["README.md"].startswith(b"---")


@pytest.mark.slow
def test_what_somebody_else_sends_meanwhile_is_not_overwritten(hub, run, tmp_path):
    hub.repos["ada/empty"] = Repo()

    def meanwhile(event):
        if event["phase"] == "checking":
            hub.repos["ada/empty"] = Repo(files={"theirs": b"theirs"}, commit="2" * 40)

    with pytest.raises(tunekit.TunekitError, match=r"the repository changed during the export; the export is in"):
        tunekit.export(run, tmp_path / "out", kind="adapter", push="ada/empty", on_event=meanwhile)
    assert hub.repos["ada/empty"].files == {"theirs": b"theirs"}
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file(), "what was checked is kept"


@pytest.mark.slow
def test_nothing_is_sent_of_an_export_that_is_wrong(hub, run, tmp_path):
    def damages(event):
        if event["phase"] == "checking":
            (draft,) = tmp_path.glob(".exporting-*")
            (draft / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")

    with pytest.raises(tunekit.TunekitError, match="the chat template of the export renders"):
        tunekit.export(run, tmp_path / "out", kind="adapter", push="ada/small", on_event=damages)
    assert hub.changes == []


@pytest.mark.slow
def test_who_may_not_write_is_told_before_anything_is_computed(hub, run, tmp_path, monkeypatch):
    hub.repos["ada/public"] = Repo()
    cases = [
        (WRITES, "no name/at all", {}, "write it as OWNER/NAME"),
        (WRITES, "small", {}, "no owner; write it as OWNER/small"),
        (WRITES, "grace/small", {}, "logged in as ada, without write access to grace; use ada/small"),
        (WRITES, "ada/public", {"private": True}, "already exists and is public"),
        (READS, "ada/small", {}, "your token is read-only"),
        ("hf_" + "x" * 20, "ada/small", {}, "the Hub rejects the token; run `hf auth login`"),
    ]
    told = []
    for token, repo, options, words in cases:
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(tunekit.TunekitError, match=words):
            tunekit.export(run, tmp_path / "out", push=repo, on_event=told.append, **options)
    monkeypatch.setenv("HF_TOKEN", WRITES)
    with pytest.raises(tunekit.TunekitError, match="need --push"):
        tunekit.export(run, tmp_path / "out", private=True, on_event=told.append)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(tunekit.TunekitError, match="HF_HUB_OFFLINE is set"):
        tunekit.export(run, tmp_path / "out", push="ada/small", on_event=told.append)
    assert told == [] and hub.changes == [] and not list(tmp_path.iterdir())
