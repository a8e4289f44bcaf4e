"""What a user is told when the hub says no: a small server on this machine answers as the hub does."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from tunekit.data.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.schema import DataSection, DataSource

ANSWERS = {
    "/api/datasets/org/none": (404, "RepoNotFound"),
    "/api/datasets/org/hidden": (401, "RepoNotFound"),
    "/api/datasets/org/gated": (403, "GatedRepo"),
    "/api/datasets/org/chats/revision/v9": (404, "RevisionNotFound"),
    "/api/datasets/org/broken": (500, ""),
}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, code = ANSWERS[self.path]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield address
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"path": "org/none"},
            "data.train.path: no file and no hub dataset 'org/none'; "
            "check the name; a private dataset needs `hf auth login`",
        ),
        (
            {"path": "org/hidden"},
            "data.train.path: no file and no hub dataset 'org/hidden'; "
            "check the name; a private dataset needs `hf auth login`",
        ),
        (
            {"path": "org/gated"},
            "data.train.path: access to the hub dataset 'org/gated' is restricted; "
            "ask for it at HUB/datasets/org/gated and log in with `hf auth login`",
        ),
        (
            {"path": "org/chats", "revision": "v9"},
            "data.train.revision: the hub dataset 'org/chats' has no revision 'v9'",
        ),
        ({"path": "org/broken"}, "data.train.path: the hub answers 500 for the dataset 'org/broken'"),
    ],
)
def test_a_refusal_of_the_hub_is_one_clear_line(hub, source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_data(DataSection(train=DataSource(**source)))
    assert str(caught.value) == message.replace("HUB", hub)
