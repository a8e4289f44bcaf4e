"""Real servers on this machine, for tests of what is read from other ones."""

import base64
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER, PASSWORD = "ada", "s3cr3t/@"


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
                headers["ETag"] = f'"{hashlib.md5(body).hexdigest()}"'
            if wanted and web.has_ranges and status == 200:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                status = 206
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                headers["Content-Length"] = str(len(body) - start)
                body = body[start:]
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
