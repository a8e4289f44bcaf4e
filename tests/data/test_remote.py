"""Files on other machines, from real servers on this one: fetched once, whole or not at all, and never with a password
in what is said of them."""

import gzip
import os
import re
import sys
import time
import traceback
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from tests.data.servers import PASSWORD, USER, web_server
from tests.processes import own_port
from tunekit.data.sources.load import load_data
from tunekit.data.sources.remote import _nearness, clear_downloads, downloads_root, list_downloads
from tunekit.data.sources.rows import clear_folder, is_url, shown, without_user
from tunekit.errors import DataError, DependencyError
from tunekit.recipe.sections.data import DataSection, DataSource
from tunekit.runs.prepared_data import record

ROWS = b'{"text":"a"}\n{"text":"b"}\n'
KNOWN = "supported: .jsonl, .json, .csv, .tsv, .parquet, .arrow, .feather, .txt; text formats also as .gz or .zst"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def web():
    with web_server() as web:
        web.files["/rows.jsonl"] = ROWS
        yield web


def load(path, **section):
    return load_data(DataSection(train=path, **section))


def texts(path):
    return [row["text"] for row in load(path).train[0].rows]


def refusal(path, error=DataError, **section) -> str:
    with pytest.raises(error) as caught:
        load(path, **section)
    return str(caught.value)


def test_a_file_is_fetched_once_and_its_rows_are_named_by_the_url(web):
    data = load(f"{web.address}/rows.jsonl")
    assert [row["text"] for row in data.train[0].rows] == ["a", "b"]
    assert data.train[0].place(1) == f"{web.address}/rows.jsonl:2"
    assert data.notes == [f"{web.address}/rows.jsonl: 2 rows of text (recognized from the column text)"]
    assert len(web.requests) == 2  # what it is, and its body
    assert texts(f"{web.address}/rows.jsonl") == ["a", "b"]
    assert len(web.requests) == 3  # it is the same
    (copy,) = list_downloads()
    assert copy.suffix == ".jsonl"
    assert copy.read_bytes() == ROWS


def test_a_file_that_changed_is_fetched_again(web):
    assert texts(f"{web.address}/rows.jsonl") == ["a", "b"]
    web.files["/rows.jsonl"] = b'{"text":"a"}\n{"text":"c"}\n'
    assert texts(f"{web.address}/rows.jsonl") == ["a", "c"]
    assert len(list_downloads()) == 2


def test_a_file_of_which_the_server_says_no_version_is_fetched_each_time(web):
    web.silent.add("/rows.jsonl")
    assert texts(f"{web.address}/rows.jsonl") == ["a", "b"]
    web.files["/rows.jsonl"] = b'{"text":"a"}\n{"text":"c"}\n'
    assert texts(f"{web.address}/rows.jsonl") == ["a", "c"]
    assert len(list_downloads()) == 1


@pytest.mark.parametrize("encoding", [{}, {"Content-Encoding": "gzip"}])
def test_a_compressed_file_is_fetched_as_it_is(web, encoding):
    web.files["/rows.jsonl.gz"] = gzip.compress(ROWS)
    web.headers["/rows.jsonl.gz"] = encoding
    assert texts(f"{web.address}/rows.jsonl.gz") == ["a", "b"]
    (copy,) = list_downloads()
    assert copy.name.endswith(".jsonl.gz")


def test_an_answer_that_is_compressed_on_the_way_is_unpacked(web):
    web.files["/rows.jsonl"] = gzip.compress(ROWS)
    web.headers["/rows.jsonl"] = {"Content-Encoding": "gzip"}
    assert texts(f"{web.address}/rows.jsonl") == ["a", "b"]


def test_a_query_is_asked_but_neither_shown_nor_taken_for_the_suffix(web):
    data = load(f"{web.address}/rows.jsonl?download=true&key=hidden")
    assert web.requests[0][0] == "/rows.jsonl?download=true&key=hidden"
    assert data.train[0].source == f"{web.address}/rows.jsonl"
    assert "hidden" not in "".join(data.notes)


def test_a_redirection_is_followed(web):
    web.status["/old.jsonl"] = 302
    web.headers["/old.jsonl"] = {"Location": "/rows.jsonl"}
    assert texts(f"{web.address}/old.jsonl") == ["a", "b"]


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("http://169.254.169.254/latest/meta-data", "169.254.169.254"),
        ("http://[fe80::1]/rows.jsonl", "fe80::1"),
        ("//169.254.1.2:80/rows.jsonl", "169.254.1.2"),
    ],
)
def test_a_redirection_to_where_its_server_cannot_reach_itself_is_not_followed(target, host, web):
    web.status["/old.jsonl"] = 302
    web.headers["/old.jsonl"] = {"Location": target}
    assert refusal(f"{web.address}/old.jsonl") == (
        f"data.train.path: '{web.address}/old.jsonl' redirects to {host}, which its server cannot reach itself; "
        "set the URL that it leads to, if that is what you want"
    )


@pytest.mark.parametrize(
    ("far", "near"),
    [
        ("8.8.8.8", "127.0.0.1"),
        ("8.8.8.8", "10.0.0.1"),
        ("8.8.8.8", "0.0.0.0"),
        ("2606:4700::1", "::1"),
        ("8.8.8.8", "::ffff:127.0.0.1"),
        ("8.8.8.8", "localhost"),
        ("192.168.1.1", "127.0.0.2"),
        ("127.0.0.1", "169.254.169.254"),
        ("10.0.0.1", "fe80::1%lo"),
    ],
)
def test_addresses_are_nearer_the_fewer_can_reach_them(far, near):
    assert max(_nearness(far)) < min(_nearness(near))


def test_user_and_password_open_the_file_and_are_never_told(web, tmp_path):
    web.private.add("/rows.jsonl")
    private = web.address.replace("://", f"://{USER}:{PASSWORD.replace('/', '%2F').replace('@', '%40')}@")
    data = load(f"{private}/rows.jsonl")
    assert [row["text"] for row in data.train[0].rows] == ["a", "b"]
    told = [data.train[0].place(0), data.train[0].source, *data.notes, *map(str, list_downloads())]
    web.files["/rows.jsonl"] += b"broken\n"
    told.append(refusal(f"{private}/rows.jsonl"))
    told.append(refusal(f"{private}/none.jsonl"))
    told.append(refusal(f"{private}/rows.xlsx"))
    told.append(refusal(DataSource(path=f"{private}/rows.jsonl", split="train")))
    told.append(refusal(f"{private.replace('http', 's4')}/rows.jsonl"))
    assert not [words for words in told if USER in words or "s3cr3t" in words]
    assert refusal(f"{web.address}/rows.jsonl") == (
        f"data.train.path: access to '{web.address}/rows.jsonl' denied (HTTP 401); put a user and a password from "
        "the environment into the URL: https://${NAME}:${PASSWORD}@HOST/..."
    )


def test_a_url_that_is_not_valid_is_not_shown_as_a_password_may_be_what_is_wrong():
    message = "data.train.path: invalid URL; in a user name or password, write : / @ as %3A %2F %40"
    url = "https://ada:s3cr3t/7@host/rows.jsonl"
    assert refusal(url) == message
    with pytest.raises(DataError) as refused:
        load(url)
    assert "s3cr3t" not in "".join(traceback.format_exception(refused.value))


def test_a_run_writes_a_url_down_as_it_is_but_for_its_secrets(monkeypatch):
    monkeypatch.setenv("PASSWORD_OF_ADA", "s3cr3t")
    monkeypatch.setenv("TUNEKIT_TRUSTED_HOSTS", "host")
    recipe = tunekit_recipe("https://ada:${PASSWORD_OF_ADA}@host/a.jsonl?v=2&token=${PASSWORD_OF_ADA}")
    assert record(*recipe).data.train.path == "https://host/a.jsonl?v=2&token=[redacted]"
    assert record(*tunekit_recipe("s3://bucket/*.jsonl")).data.train.path == "s3://bucket/*.jsonl"


def tunekit_recipe(path):
    from tunekit.data.sources.load import LoadedData
    from tunekit.data.sources.rows import Rows, RowStore
    from tunekit.recipe.load import load_recipe

    rows = Rows(format="text", rows=RowStore([{"text": "a"}]), source="a", numbers=[1])
    return load_recipe({"model": "pico", "data": {"train": path}}), LoadedData(train=(rows,), eval=(), notes=[])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "/none.jsonl",
            "data.train.path: 'WEB/none.jsonl' not found (HTTP 404); check the URL",
        ),
        (
            "/forbidden.jsonl",
            "data.train.path: access to 'WEB/forbidden.jsonl' denied (HTTP 403); put a user and a password from "
            "the environment into the URL: https://${NAME}:${PASSWORD}@HOST/...",
        ),
        ("/broken.jsonl", "data.train.path: HTTP 500 for 'WEB/broken.jsonl'; retry later"),
        (
            "/page.jsonl",
            "data.train.path: 'WEB/page.jsonl' is a web page, not a file of rows; use the URL of the file: on "
            "GitHub its raw URL, on the Hub with resolve instead of blob",
        ),
        ("/empty.jsonl", "data.train.path: 'WEB/empty.jsonl' is empty"),
        ("/rows.xlsx", "data.train.path: 'WEB/rows.xlsx': unsupported suffix '.xlsx'; " + KNOWN),
        (
            "/chats/",
            "data.train.path: 'WEB/chats/': the URL has no file suffix; " + KNOWN + "; for a folder "
            "that can be listed, use a pattern: 'WEB/chats/*.jsonl'",
        ),
        (
            "/*.jsonl",
            "data.train.path: 'WEB/*.jsonl': patterns are unsupported with http://, which cannot list files; use "
            "the URL of one file; write a * in its name as %2A",
        ),
    ],
)
def test_a_file_that_cannot_be_had_is_one_clear_line(web, path, message):
    web.status |= {"/forbidden.jsonl": 403, "/broken.jsonl": 500}
    web.files |= {"/page.jsonl": b"<html>", "/empty.jsonl": b""}
    web.headers["/page.jsonl"] = {"Content-Type": "text/html; charset=utf-8"}
    assert refusal(web.address + path) == message.replace("WEB", web.address)
    assert list_downloads() == []


def test_a_body_that_ends_too_soon_leaves_nothing(web):
    web.short["/rows.jsonl"] = 10
    assert refusal(f"{web.address}/rows.jsonl") == (
        f"data.train.path: cannot download '{web.address}/rows.jsonl' to {downloads_root()}: peer closed "
        "connection without sending complete message body (received 10 bytes, expected 26)"
    )
    assert list(downloads_root().iterdir()) == []
    web.short.clear()
    assert texts(f"{web.address}/rows.jsonl") == ["a", "b"]


def test_what_was_half_written_is_no_copy_and_goes_with_the_copies(web):
    texts(f"{web.address}/rows.jsonl")
    (downloads_root() / "0123.part").write_bytes(b"x" * 100)
    assert len(list_downloads()) == 1
    assert clear_downloads() == 100 + len(ROWS)
    assert list_downloads() == [] and clear_downloads() == 0


def test_a_folder_that_vanishes_while_it_is_cleared_is_no_error(tmp_path, monkeypatch):
    draft = tmp_path / "cache" / ".draft"
    draft.mkdir(parents=True)
    (tmp_path / "cache" / "rows").write_bytes(b"x" * 10)
    scandir = os.scandir

    def scan_after_removal(path):
        if not isinstance(path, int) and Path(path) == draft and draft.exists():
            draft.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan_after_removal)
    assert clear_folder(tmp_path / "cache") == 10
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_server_that_is_not_there_is_told_at_once(host):
    host = f"{host}:{own_port()}"
    message = refusal(f"http://{host}/rows.jsonl")
    assert re.fullmatch(
        rf"data\.train\.path: 'http://{host}/rows\.jsonl' is unreachable \(\[Errno -?\d+\] .+\); check the URL and "
        "the network",
        message,
    )


def test_without_a_network_an_earlier_copy_is_named_but_not_taken_unasked():
    with web_server() as web:
        web.files["/rows.jsonl"] = ROWS
        address = web.address
        texts(f"{address}/rows.jsonl")
    (copy,) = list_downloads()
    message = refusal(f"{address}/rows.jsonl")
    today = time.strftime("%Y-%m-%d", time.localtime(copy.stat().st_mtime))
    assert message.endswith(f"; check the URL and the network; to use the copy of {today}, set data.train={copy}")
    assert texts(str(copy)) == ["a", "b"]


# Filesystems of fsspec


class Bucket(DirFileSystem):
    """A store that lists its files, as s3 does; what it holds lies in a folder of this machine."""

    protocol = "bucket"
    cachable = False
    folder = ""
    refused: OSError | None = None

    def __init__(self, **options):
        super().__init__(path=self.folder, fs=LocalFileSystem())

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("bucket://").rstrip("/")

    def info(self, path, **options):
        if self.refused:
            raise self.refused
        return super().info(path, **options)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    folder = tmp_path / "bucket"
    (folder / "chats").mkdir(parents=True)
    for name, text in (("b", "3"), ("a", "1")):
        (folder / "chats" / f"{name}.jsonl").write_text(f'{{"text":"{text}"}}\n')
    monkeypatch.setattr(Bucket, "folder", str(folder))
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    return folder


def test_a_pattern_reads_the_files_of_a_store_in_the_order_of_names(bucket):
    rows = load("bucket://chats/*.jsonl").train[0]
    assert [rows.place(i) for i in range(2)] == ["bucket://chats/a.jsonl:1", "bucket://chats/b.jsonl:1"]
    assert [row["text"] for row in rows.rows] == ["1", "3"]
    assert len(list_downloads()) == 2
    (bucket / "chats" / "b.jsonl").write_text('{"text":"33"}\n')
    assert [row["text"] for row in load("bucket://chats/*.jsonl").train[0].rows] == ["1", "33"]
    assert len(list_downloads()) == 3


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket://chats/none.jsonl", "data.train.path: 'bucket://chats/none.jsonl' not found; check the URL"),
        ("bucket://chats/*.tsv", "data.train.path: no file matches 'bucket://chats/*.tsv'"),
        (
            "bucket://chats/*",
            "data.train.path: 'bucket://chats/*' matches files of several formats: a.jsonl, c.csv; select one format "
            "with a pattern: '*.jsonl'",
        ),
        (
            "bucket://folder.jsonl",
            "data.train.path: 'bucket://folder.jsonl' is a folder; match its files with a pattern: "
            "'bucket://folder.jsonl/*.jsonl'",
        ),
        ("bucket://empty.jsonl", "data.train.path: 'bucket://empty.jsonl' is empty"),
        (
            "zip://a.jsonl::bucket://a.zip",
            "data.train.path: 'zip://a.jsonl::bucket://a.zip': files inside archives (::) are unsupported; extract "
            "the archive first",
        ),
        (
            "htps://host/a.jsonl",
            "data.train.path: 'htps://host/a.jsonl': unknown protocol htps://; did you mean https://?",
        ),
        (
            "s4://bucket/a.jsonl",
            "data.train.path: 's4://bucket/a.jsonl': unknown protocol s4://; supported: https, s3, gs, az, hf, "
            "sftp and other protocols of fsspec",
        ),
        (
            "file://a.jsonl",
            "data.train.path: 'file://a.jsonl' is not an absolute file URL; write file:///..., or the path alone",
        ),
    ],
)
def test_what_a_store_does_not_hold_is_one_clear_line(bucket, url, message):
    (bucket / "chats" / "c.csv").write_text("text\na\n")
    (bucket / "folder.jsonl").mkdir()
    (bucket / "empty.jsonl").touch()
    assert refusal(url) == message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("no"), "data.train.path: access to 'bucket://chats/a.jsonl' denied"),
        (
            TimeoutError(),
            "data.train.path: 'bucket://chats/a.jsonl' is unreachable (TimeoutError); check the URL and the network",
        ),
    ],
)
def test_what_a_store_refuses_is_one_clear_line(bucket, monkeypatch, error, message):
    monkeypatch.setattr(Bucket, "refused", error)
    assert refusal("bucket://chats/a.jsonl") == message


def test_a_protocol_whose_package_is_not_there_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    message = refusal("s3://bucket/chats/*.jsonl", DependencyError)
    assert message == "data.train.path: s3:// requires s3fs; pip install s3fs"


def test_a_file_url_is_the_file_itself(tmp_path):
    (tmp_path / "my rows.jsonl").write_bytes(ROWS)
    url = f"file://{tmp_path}/my%20rows.jsonl"
    assert load(url).train[0].place(1) == f"{url}:2"
    assert list_downloads() == []


@pytest.mark.parametrize(
    ("url", "without", "named"),
    [
        ("https://u:p@host:8080/a.jsonl?key=1#x", "https://host:8080/a.jsonl?key=1#x", "https://host:8080/a.jsonl"),
        ("https://host/@user/a.jsonl", "https://host/@user/a.jsonl", "https://host/@user/a.jsonl"),
        ("sftp://u:p@host/a.jsonl", "sftp://host/a.jsonl", "sftp://host/a.jsonl"),
        ("hf://datasets/org/x@main/?.jsonl", "hf://datasets/org/x@main/?.jsonl", "hf://datasets/org/x@main/?.jsonl"),
        ("github://org:repo@main/a.jsonl", "github://org:repo@main/a.jsonl", "github://org:repo@main/a.jsonl"),
        ("org/chats", "org/chats", "org/chats"),
        ("chats/*?.jsonl", "chats/*?.jsonl", "chats/*?.jsonl"),
    ],
)
def test_a_url_is_told_without_what_opens_it(url, without, named):
    assert (without_user(url), shown(url)) == (without, named)
    assert is_url(url) == ("://" in url)


LOOK = """
import resource, sys
from tunekit.data.sources.files import OPENERS
from tunekit.data.sources.load import find_files
from tunekit.recipe.sections.data import DataSource
files = find_files(DataSource(path=sys.argv[1]), key="data.train", streaming=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
num_rows = num_chars = 0
for record in OPENERS[files.kind](files.found[0]).read(("text",)):
    num_rows += 1
    num_chars += len(record.value["text"])
    if len(sys.argv) > 2 and num_rows == int(sys.argv[2]):
        break
print(num_rows, num_chars, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
