"""Real servers on this machine, for tests of what is read from other ones."""

import base64
import hashlib
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

USER, PASSWORD = "lovelace", "s3cr3t/@"


@dataclass
class Web:
    """What a web server holds and how it behaves; a test changes it while it runs.

    Attributes:
        files: Bodies by path.
        status: Answers other than 200, by path.
        headers: Further headers, by path.
        silent: Paths of which no version is said.
        private: Paths for which user and password are asked.
        short: Paths whose bodies end after so many bytes.
        has_ranges: Whether parts of files are sent.
        requests: What was asked: path, and `Range` or an empty string.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    short: dict[str, int] = field(default_factory=dict)
    has_ranges: bool = True
    requests: list[tuple[str, str]] = field(default_factory=list)
    address: str = ""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server that runs in a thread."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def part_of(body: bytes, wanted: str) -> tuple[bytes, str]:
    """The part that a `Range` asks for, and what `Content-Range` says of it."""
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    end = min(int(last or len(body)), len(body) - 1)
    return body[int(first) : end + 1], f"bytes {first}-{end}/{len(body)}"


REVISIONS = {"main": "a" * 40, "v1": "b" * 40}
"""Revisions of the hub server's dataset `org/chats`."""


def hub_rows(word: str, num_rows: int) -> bytes:
    """JSON lines with numbered texts."""
    return b"".join(b'{"text": "%s %d"}\n' % (word.encode(), i) for i in range(num_rows))


HUB_CARD = b"""---
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train.jsonl}
  - {split: test, path: en/test.jsonl}
- config_name: de
  data_files: de/train.jsonl
---
"""
HUB_FILES = {
    REVISIONS["main"]: {
        "README.md": HUB_CARD,
        "en/train.jsonl": hub_rows("new", 100),
        "en/test.jsonl": hub_rows("test", 10),
        "de/train.jsonl": hub_rows("neu", 7),
    },
    REVISIONS["v1"]: {
        "README.md": HUB_CARD,
        "en/train.jsonl": hub_rows("old", 50),
        "en/test.jsonl": hub_rows("test", 10),
        "de/train.jsonl": hub_rows("alt", 7),
    },
}
"""What the dataset holds, by commit and path."""


class Hub(BaseHTTPRequestHandler):
    """The hub, as far as `datasets` and the filesystem `hf://` ask it about the dataset `org/chats`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match parts:
            case ["api", "datasets", "org", "chats"]:
                self.tell_of("main")
            case ["api", "datasets", "org", "chats", "revision", revision]:
                self.tell_of(revision)
            case ["api", "datasets", "org", "chats", "tree", revision, *folder]:
                files = HUB_FILES[REVISIONS.get(revision, revision)]
                under = "/".join(folder)
                inside = [self.entry(files, path) for path in files if path.rpartition("/")[0] == under]
                folders = sorted({path.partition("/")[0] for path in files if "/" in path}) if not folder else []
                self.answer_json([*inside, *({"type": "directory", "path": name, "oid": "0"} for name in folders)])
            case ["api", "datasets", "org", "chats", "paths-info", revision]:
                files = HUB_FILES[REVISIONS.get(revision, revision)]
                self.answer_json(
                    [self.entry(files, path) for path in parse_qs(sent.decode())["paths"] if path in files]
                )
            case ["datasets", "org", "chats", "resolve", revision, *path]:
                self.send_file(REVISIONS.get(revision, revision), "/".join(path))
            case _:
                self.answer(404, {"X-Error-Code": "RepoNotFound"})

    do_POST = do_HEAD = do_GET

    def tell_of(self, revision: str) -> None:
        commit = REVISIONS.get(revision, revision)
        if commit not in HUB_FILES:
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": path} for path in HUB_FILES[commit]]
        self.answer_json({"id": "org/chats", "sha": commit, "siblings": siblings, "private": False, "tags": []})

    def entry(self, files: dict[str, bytes], path: str) -> dict[str, object]:
        digest = hashlib.sha1(files[path]).hexdigest()
        return {"type": "file", "path": path, "size": len(files[path]), "oid": digest}

    def send_file(self, commit: str, path: str) -> None:
        body = HUB_FILES[commit].get(path)
        if body is None:
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit}
        if wanted := self.headers.get("Range"):
            part, headers["Content-Range"] = part_of(body, wanted)
            self.answer(206, headers, part)
            return
        self.answer(200, headers, body)

    def answer_json(self, value: object) -> None:
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def web_server() -> Iterator[Web]:
    """A server of files that behaves as the test wants."""
    web = Web()
    allowed = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, _ = self.path.partition("?")
            wanted = self.headers.get("Range", "")
            web.requests.append((self.path, wanted))
            body = web.files.get(path, b"")
            status = web.status.get(path, 200 if path in web.files else 404)
            if path in web.private and self.headers.get("Authorization") != allowed:
                status = 401
            headers = {"Content-Length": str(len(body)), **web.headers.get(path, {})}
            if path not in web.silent:
                headers["ETag"] = f'"{zlib.crc32(body):08x}"'
            if wanted and web.has_ranges and status == 200:
                status, body, headers["Content-Range"] = 206, *part_of(body, wanted)
                headers["Content-Length"] = str(len(body))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # the reader may have had enough
                self.wfile.write(body[: web.short.get(path)])

        def log_message(self, *args: Any) -> None:
            pass

    with serving(Handler) as address:
        web.address = address
        yield web
