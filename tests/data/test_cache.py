"""The cache of prepared rows: found again when nothing changed, made anew when anything did, whole or not there."""

import json
import multiprocessing
import os

import pytest

from tests.tiny import make_tokenizer, save_chats
from tunekit.data import cache
from tunekit.data.load import load_rows
from tunekit.data.pack import pack
from tunekit.data.tokenize import tokenize
from tunekit.recipe.schema import DataSource

SETTINGS = {"max_length": 64, "loss_on": "assistant", "packing": False}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(20)))


def rows(path="rows.jsonl"):
    return load_rows(DataSource(path=path), key="data.train", format="auto", default_split="train")


def prepare(found=None, tokenizer=None, **changes):
    """The entry, and whether it had to be made."""
    found, tokenizer, settings = found or rows(), tokenizer or make_tokenizer(), SETTINGS | changes
    made = []

    def make():
        made.append(True)
        return tokenize(found, tokenizer, max_length=settings["max_length"], loss_on=settings["loss_on"])

    return cache.cached(cache.key_of(found, tokenizer, **settings), found.source, make), bool(made)


def test_the_same_rows_are_prepared_once():
    first, made_first = prepare()
    again, made_again = prepare()
    assert (made_first, made_again) == (True, False)
    assert again == first
    assert again.report.num_rows == 20
    expected = tokenize(rows(), make_tokenizer(), max_length=64, loss_on="assistant").dataset
    assert again.dataset().to_dict() == expected.to_dict()


def test_one_edited_row_is_seen_though_size_and_date_stay_the_same(tmp_path):
    prepare()
    file = tmp_path / "rows.jsonl"
    before = file.stat()
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("double 7", "double 8"), encoding="utf-8")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    entry, made = prepare()
    assert made
    texts = [make_tokenizer().decode(row["input_ids"]) for row in entry.dataset()]
    assert sum("double 8<" in text for text in texts) == 2


@pytest.mark.parametrize("change", [{"max_length": 63}, {"loss_on": "all"}, {"packing": True}])
def test_another_setting_is_another_entry(change):
    prepare()
    assert prepare(**change)[1]


def test_another_chat_template_is_another_entry():
    prepare()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("'\n'", "'\n\n'", 1)
    assert prepare(tokenizer=tokenizer)[1]


def test_another_special_token_is_another_entry():
    prepare()
    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    assert prepare(tokenizer=tokenizer)[1]


def test_another_code_of_the_data_path_is_another_entry(tmp_path, monkeypatch):
    prepare()
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    assert prepare()[1]


@pytest.mark.parametrize("damage", ["truncate", "remove", "no-account"])
def test_a_damaged_entry_is_made_again(damage):
    entry, _ = prepare()
    (data,) = (entry.path / "rows").glob("*.arrow")
    if damage == "truncate":
        data.write_bytes(data.read_bytes()[:-10])
    elif damage == "remove":
        data.unlink()
    else:
        (entry.path / cache.ACCOUNT).unlink()
    again, made = prepare()
    assert made
    assert len(again.dataset()) == 20


def test_a_writer_that_fails_leaves_nothing_behind():
    def fail():
        raise RuntimeError("the tokenizer broke")

    with pytest.raises(RuntimeError):
        cache.cached("0" * 40, "rows.jsonl", fail)
    assert cache.list_entries() == []
    assert not list(cache.cache_root().glob("*")) if cache.cache_root().exists() else True


def write_at_once(barrier, queue):
    barrier.wait()
    entry, _ = prepare()
    queue.put((str(entry.path), len(entry.dataset())))


def test_writers_at_once_end_with_one_whole_entry():
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.Queue()
    writers = [context.Process(target=write_at_once, args=(barrier, queue)) for _ in range(4)]
    for writer in writers:
        writer.start()
    found = {queue.get(timeout=60) for _ in writers}
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(found) == 1
    assert found.pop()[1] == 20
    assert [path.name[0] for path in cache.cache_root().iterdir()] != ["."]
    assert len(list(cache.cache_root().iterdir())) == 1


def test_a_whole_entry_that_appears_meanwhile_is_kept():
    found, tokenizer = rows(), make_tokenizer()
    key = cache.key_of(found, tokenizer, **SETTINGS)
    inodes = []

    def make():
        made = tokenize(found, tokenizer, max_length=64, loss_on="assistant")
        if not inodes:
            inodes.append(None)
            inodes.append((cache.cached(key, found.source, make).path / cache.ACCOUNT).stat().st_ino)
        return made

    entry = cache.cached(key, found.source, make)
    assert (entry.path / cache.ACCOUNT).stat().st_ino == inodes[1]
    assert len(list(cache.cache_root().iterdir())) == 1


def test_a_run_keeps_its_rows_when_the_cache_is_cleared(tmp_path):
    from datasets import load_from_disk

    entry, _ = prepare()
    entry.link_into(tmp_path / "run" / "train")
    (data,) = (tmp_path / "run" / "train").glob("*.arrow")
    assert data.stat().st_nlink == 2
    assert cache.clear() >= entry.size_bytes
    assert cache.list_entries() == []
    assert len(load_from_disk(str(tmp_path / "run" / "train"))) == 20


def test_entries_are_listed_with_what_is_in_them(tmp_path):
    save_chats(tmp_path / "more.jsonl", ((f"triple {n}", f"{3 * n}") for n in range(400)))
    prepare()
    prepare(rows("more.jsonl"))
    entries = cache.list_entries()
    assert [(entry.source, entry.num_sequences) for entry in entries] == [("more.jsonl", 400), ("rows.jsonl", 20)]
    for entry in entries:
        account = json.loads((entry.path / cache.ACCOUNT).read_text(encoding="utf-8"))
        assert entry.size_bytes == sum(account["files"].values())


def test_packed_rows_are_counted_as_packed():
    found, tokenizer = rows(), make_tokenizer()

    def make():
        from dataclasses import replace

        made = tokenize(found, tokenizer, max_length=128, loss_on="assistant")
        return replace(made, dataset=pack(made.dataset, 128))

    entry = cache.cached(cache.key_of(found, tokenizer, **SETTINGS | {"packing": True}), found.source, make)
    assert entry.num_sequences < entry.report.num_sequences == 20
