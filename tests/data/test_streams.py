"""Files on other machines, read as they come: little memory, and rows before the last byte is there."""

import gzip
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler

import pytest

from tests.data.servers import serving, web_server
from tests.waiting import LIMIT_SECONDS
from tunekit.data.sources.files import OPENERS
from tunekit.data.sources.load import find_files
from tunekit.data.sources.remote import list_downloads
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSource

ROWS = b'{"text":"a"}\n\n{"text":"b"}\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def web():
    with web_server() as web:
        web.files["/rows.jsonl"] = ROWS
        yield web


def stream(path, columns=("text",)):
    """The records of a source's first file, read as they come."""
    files = find_files(DataSource(path=path), key="data.train", streaming=True)
    return OPENERS[files.kind](files.found[0]).read(columns)


def parquet(num_rows: int) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    noise = [f"{i * i % 7919:05}" * 99 for i in range(num_rows)]
    table = pa.table({"text": [f"{i:06}" for i in range(num_rows)], "noise": noise})
    file = pa.BufferOutputStream()
    pq.write_table(table, file, row_group_size=10_000, compression="none", use_dictionary=False)
    return file.getvalue().to_pybytes()


def zstd(text: bytes) -> bytes:
    import pyarrow as pa

    return pa.compress(text, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("name", "body", "numbers"),
    [
        ("/rows.jsonl", ROWS, [1, 3]),
        ("/rows.jsonl.gz", gzip.compress(ROWS, mtime=0), [1, 3]),
        ("/rows.jsonl.zst", zstd(ROWS), [1, 3]),
        ("/rows.csv", b"text\na\nb\n", [2, 3]),
        ("/rows.tsv.gz", gzip.compress(b"id\ttext\n1\ta\n2\tb\n", mtime=0), [2, 3]),
        ("/rows.txt", b"a\n\n\nb\n", [1, 4]),
    ],
)
def test_text_is_read_as_it_comes_and_leaves_no_copy(web, name, body, numbers):
    web.files[name] = body
    records = list(stream(web.address + name))
    assert [record.value["text"] for record in records] == ["a", "b"]
    assert [record.number for record in records] == numbers
    assert list_downloads() == []


def test_of_a_parquet_file_only_the_wanted_parts_are_asked_for(web):
    web.files["/rows.parquet"] = parquet(20_000)
    records = stream(f"{web.address}/rows.parquet")
    assert next(records).value == {"text": "000000"}
    assert [record.value["text"] for record in records] == [f"{i:06}" for i in range(1, 20_000)]
    assert len(web.files["/rows.parquet"]) > 10e6
    assert all(int(last) - int(first) < 2**20 for first, last in (ask[6:].split("-") for _, ask in web.requests if ask))
    assert sum(1 for _, ask in web.requests if ask) < 7
    assert list_downloads() == []


def test_a_server_that_sends_no_parts_cannot_stream_parquet(web):
    web.files["/rows.parquet"] = parquet(20_000)
    web.has_ranges = False
    with pytest.raises(DataError) as caught:
        stream(f"{web.address}/rows.parquet")
    assert str(caught.value) == (
        f"{web.address}/rows.parquet: cannot read the file (the server does not support range requests)"
    )


@pytest.mark.parametrize("kind", [".json", ".json.gz", ".arrow", ".feather"])
def test_a_file_that_is_read_whole_is_not_streamed(web, kind):
    web.files[f"/rows{kind}"] = b"[]"
    with pytest.raises(DataError) as caught:
        stream(f"{web.address}/rows{kind}")
    assert str(caught.value) == (
        f"data.train.path: '{web.address}/rows{kind}': {kind.removesuffix('.gz')} files cannot be streamed; "
        "convert it to .jsonl or .parquet, or unset data.streaming"
    )


def test_local_files_are_streamed_by_the_same_call(tmp_path):
    (tmp_path / "rows.json").write_text('[{"text":"a"}]')
    assert [record.value for record in stream("rows.json")] == [{"text": "a"}]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_stream_that_breaks_off_is_told_with_its_file(web, compress):
    name = "/rows.jsonl" if compress is bytes else "/rows.jsonl.gz"
    web.files[name] = compress(b"".join(b'{"text":"%064x"}\n' % (i**9) for i in range(9999)))
    web.short[name] = len(web.files[name]) // 2
    with pytest.raises(DataError) as caught:
        list(stream(web.address + name))
    said = f"{web.address}{name}: cannot read the whole file (peer closed connection"
    assert str(caught.value).startswith(said)


def test_a_file_that_changes_between_two_readings_is_not_mixed(web):
    files = find_files(DataSource(path=f"{web.address}/rows.jsonl"), key="data.train", streaming=True)
    web.files["/rows.jsonl"] = ROWS.replace(b"a", b"c")
    with pytest.raises(DataError) as caught:
        list(OPENERS[files.kind](files.found[0]).read(("text",)))
    assert str(caught.value) == (
        f"{web.address}/rows.jsonl: cannot read the whole file (the file changed during reading)"
    )


def test_rows_are_there_before_the_rest_of_the_file():
    """The server sends a first part, and the rest only when rows of the first part were read."""
    was_read = threading.Event()
    first = b"".join(b'{"text":"%07d"}\n' % i for i in range(200_000))

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(first) + len(ROWS)))
            self.end_headers()
            self.wfile.write(first)
            if was_read.wait(LIMIT_SECONDS):
                self.wfile.write(ROWS)

        def log_message(self, *args):
            pass

    with serving(Slow) as address:
        files = find_files(DataSource(path=f"{address}/rows.jsonl"), key="data.train", streaming=True)
        records = OPENERS[files.kind](files.found[0]).read(("text",))
        assert next(records).value == {"text": "0000000"}
        was_read.set()
        assert sum(1 for _ in records) == 200_000 - 1 + 2


COUNT = """
import sys
from tests.data.memory import STATUS, peak_mib
from tunekit.data.sources.files import OPENERS
from tunekit.data.sources.load import find_files
from tunekit.recipe.sections.data import DataSource
files = find_files(DataSource(path=sys.argv[1]), key="data.train", streaming=True)
table = OPENERS[files.kind](files.found[0])
next(table.read(("text",)))
before = peak_mib() if STATUS.exists() else 0
num_chars = [len(record.value["text"]) for record in table.read(("text",))]
print(len(num_chars), sum(num_chars), peak_mib() - before if STATUS.exists() else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".parquet"])
def test_a_hundred_megabytes_are_read_in_little_memory(web, kind):
    line = b'{"text":"%06d' + b"x" * 1990 + b'"}\n'
    if kind == ".parquet":
        web.files["/rows.parquet"] = parquet(200_000)
        num_rows, num_chars = 200_000, 200_000 * 6
    else:
        num_rows, num_chars = 50_000, 50_000 * 1996
        whole = b"".join(line % i for i in range(num_rows))
        web.files[f"/rows{kind}"] = whole if kind == ".jsonl" else gzip.compress(whole, 1)
    command = [sys.executable, "-c", COUNT, f"{web.address}/rows{kind}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, chars, grown_mib = map(int, done.stdout.split())
    assert (rows, chars) == (num_rows, num_chars)
    assert grown_mib < 30
