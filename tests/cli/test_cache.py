"""`tunekit data cache`: what is kept is shown, and removed on demand."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.tiny import save_chats, save_tiny_model
from tests.waiting import LIMIT_SECONDS
from tunekit.data.sources.load import load_data
from tunekit.recipe.load import load_recipe
from tunekit.runs.prepared_data import prepare


@pytest.fixture
def caches(tmp_path, monkeypatch) -> Path:
    """A cache with rows of two sources, fetched files, and what two writers left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    save_tiny_model(tmp_path / "model")
    for name, num_rows in (("few.jsonl", 16), ("many.jsonl", 1600)):
        save_chats(tmp_path / name, ((f"double {n}", f"{2 * n}") for n in range(num_rows)))
        recipe = load_recipe({"model": "model", "data": {"train": name, "max_length": 64}})
        prepare(recipe, load_data(recipe.data))
    root = tmp_path / "caches" / "tunekit"
    # They are new however long it takes until they are looked at.
    later = time.time() + LIMIT_SECONDS
    for entry in (root / "data").iterdir():
        os.utime(entry, (later, later))
    (root / "downloads").mkdir()
    for name in ("0a-1b.jsonl", "0a-2c.csv", "3d.part"):
        (root / "downloads" / name).write_bytes(b"x" * 2_000_000)
    (root / "data" / ".draft-1234").mkdir()
    (root / "data" / ".draft-1234" / "rows").write_bytes(b"x" * 1000)
    old = (root / "downloads" / "0a-1b.jsonl").stat().st_mtime - 3 * 86400 - 60
    for file in (root / "downloads").iterdir():
        os.utime(file, (old, old))
    return root


def data(*arguments) -> subprocess.CompletedProcess[str]:
    return run_command("data", *arguments)


def test_what_is_kept_is_shown_the_largest_first_with_its_total(caches):
    answer = data("cache")
    assert answer.returncode == 0, answer.stderr
    header, *lines, fetched, total = [re.split(r"\s{2,}", line.strip()) for line in answer.stdout.splitlines()]
    assert header == ["source", "contents", "sequences", "tokens", "size", "age"]
    assert [line[:3] for line in lines] == [
        ["many.jsonl", "training sequences", "1,600"],
        ["many.jsonl", "tokens of a source", "1,600"],
        ["few.jsonl", "training sequences", "16"],
        ["few.jsonl", "tokens of a source", "16"],
    ]
    assert lines[0][3] == lines[1][3] > lines[2][3]
    assert {line[5] for line in lines} == {"now"}
    assert fetched == ["2 downloaded files", "3.8 MiB", "3 days"]
    assert total[0] == "total"
    assert float(total[1].removesuffix(" MiB")) == pytest.approx(
        3.8 + sum(float(line[4].removesuffix(" MiB")) for line in lines), abs=0.3
    )


def test_all_of_it_is_removed_with_what_was_half_written(caches):
    held = sum(file.stat().st_size for file in caches.rglob("*") if file.is_file())
    assert held > 6_001_000
    assert data("cache", "--clear").stdout == f"{held:,} bytes freed\n"
    assert not [file for file in caches.rglob("*") if file.is_file()]
    assert data("cache").stdout == f"the cache in {caches} is empty\n"
    assert data("cache", "--clear").stdout == "0 bytes freed\n"


def test_a_recipe_called_cache_is_still_looked_at(caches, tmp_path):
    (tmp_path / "cache.yaml").write_text("model: model\ndata: {train: few.jsonl, max_length: 64}\n")
    answer = data("./cache.yaml", "--rows", "1")
    assert answer.returncode == 0, answer.stderr
    assert "few.jsonl" in answer.stdout
    assert "./cache: no such file" in data("./cache").stderr
    assert "--clear" in data("cache", "--help").stdout
    assert "--html" in data("--help").stdout
