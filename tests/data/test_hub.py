"""What a user is told when the hub says no: a small server on this machine answers as the hub does."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from huggingface_hub import constants

from tests.data import servers
from tests.data.servers import serving
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection, DataSource

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
    with serving(Hub) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield address


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"path": "org/none"},
            "data.train.path: no file and no Hub dataset 'org/none'; check the name; for a private dataset log in "
            "with `hf auth login`",
        ),
        (
            {"path": "org/hidden"},
            "data.train.path: no file and no Hub dataset 'org/hidden'; check the name; for a private dataset log "
            "in with `hf auth login`",
        ),
        (
            {"path": "org/gated"},
            "data.train.path: the Hub dataset 'org/gated' is gated; request access at HUB/datasets/org/gated, then "
            "log in with `hf auth login`",
        ),
        (
            {"path": "org/chats", "revision": "v9"},
            "data.train.revision: the Hub dataset 'org/chats' has no revision 'v9'",
        ),
        ({"path": "org/broken"}, "data.train.path: the Hub returned HTTP 500 for the dataset 'org/broken'"),
    ],
)
def test_a_refusal_of_the_hub_is_one_clear_line(hub, source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_data(DataSection(train=DataSource(**source)))
    assert str(caught.value) == message.replace("HUB", hub)


LOAD = """
import json, sys
from tunekit.data.sources import hub
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection, DataSource
answers = []
for source in json.load(sys.stdin):
    streaming = source.pop("streaming", False)
    try:
        if streaming:
            opened = hub.open_hub(DataSource(**source), key="data.train", default_split="train", streaming=True)
            records = list(opened.read(opened.columns))
            answers.append([len(records), records[-1].number, records[-1].value["text"]])
        else:
            eval = {"eval": source} if source.pop("eval", False) else {}
            data = load_data(DataSection(train=source, **eval))
            (rows,) = data.eval or data.train
            answers.append([len(rows), rows.place(len(rows) - 1), rows.rows[-1]["text"]])
    except DataError as error:
        answers.append(str(error))
print("\\n" + json.dumps(answers))
"""
CHATS = {"path": "org/chats", "name": "en"}
CANNOT = "data.train: cannot load the Hub dataset 'org/chats': "
ASKED = [
    (CHATS, [100, "org/chats row 100", "new 99"]),
    ({**CHATS, "split": "train[:5%]"}, [5, "org/chats row 5", "new 4"]),
    ({**CHATS, "split": "train[95:]+test"}, [15, "org/chats row 15", "test 9"]),
    ({**CHATS, "revision": "v1"}, [50, "org/chats row 50", "old 49"]),
    ({**CHATS, "name": "de"}, [7, "org/chats row 7", "neu 6"]),
    ({**CHATS, "eval": True}, [10, "org/chats row 10", "test 9"]),
    (
        {"path": "org/chats"},
        CANNOT + "Config name is missing. Please pick one among the available configs: ['en', 'de'] Example of usage: "
        "`load_dataset('org/chats', 'en')`",
    ),
    ({**CHATS, "split": "dev"}, CANNOT + "Unknown split \"dev\". Should be one of ['train', 'test']."),
    ({**CHATS, "revision": "v9"}, "data.train.revision: the Hub dataset 'org/chats' has no revision 'v9'"),
    ({**CHATS, "streaming": True}, [100, 100, "new 99"]),
    ({**CHATS, "streaming": True, "revision": "v1", "split": "test"}, [10, 10, "test 9"]),
    (
        {**CHATS, "streaming": True, "split": "train[:5%]"},
        "data.train.split: slicing a split ('train[:5%]') is unsupported with streaming; use the whole split "
        "'train', or unset data.streaming",
    ),
    ({"path": "hf://datasets/org/chats/en/test.jsonl"}, [10, "hf://datasets/org/chats/en/test.jsonl:10", "test 9"]),
    (
        {"path": "hf://datasets/org/chats@v1/en/t*n.jsonl"},
        [50, "hf://datasets/org/chats@v1/en/train.jsonl:50", "old 49"],
    ),
    (
        {"path": "hf://datasets/org/chats/en/none.jsonl"},
        "data.train.path: 'hf://datasets/org/chats/en/none.jsonl' not found; check the URL",
    ),
]


@pytest.mark.slow
def test_datasets_and_files_of_the_hub_are_read_as_the_source_says(tmp_path):
    with serving(servers.Hub) as address:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
        sources = json.dumps([source for source, _ in ASKED])
        command = [sys.executable, "-c", LOAD]
        done = subprocess.run(command, env=environment, input=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [answer for _, answer in ASKED]
