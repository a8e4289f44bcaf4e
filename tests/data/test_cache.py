"""The cache of prepared rows: found again when nothing changed, made anew when anything did, whole or not there."""

import json
import multiprocessing
import os
from array import array
from dataclasses import replace

import numpy as np
import pytest

from tests.tiny import make_tokenizer, save_chats
from tests.waiting import LIMIT_SECONDS
from tunekit.data import prepare as preparing
from tunekit.data.packing.sequences import Mixing
from tunekit.data.prepare import prepare_rows, read_dataset, tokens_of
from tunekit.data.sources.load import load_rows
from tunekit.recipe.sections.data import DataSection


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(20)))


def rows(path="rows.jsonl"):
    return load_rows(DataSection(train=path).sources[0], default_split="train")


EVERYTHING = Mixing()


def prepare(found=None, tokenizer=None, *, max_length=64, loss_on="assistant", packing=False, mixing=EVERYTHING):
    """What a trainer reads, and whether anything had to be made for it."""
    before = {path.name for path in preparing.cache_root().iterdir()} if preparing.cache_root().is_dir() else set()
    found = replace(found or rows(), loss_on=loss_on)
    tokens = tokens_of(found, tokenizer or make_tokenizer(), max_length=max_length)
    prepared = prepare_rows([tokens], mixing, max_length=max_length, packing=packing)
    return prepared, {path.name for path in preparing.cache_root().iterdir()} != before


def texts(prepared):
    return [make_tokenizer().decode(row["input_ids"]) for row in prepared.dataset()]


def test_the_same_rows_are_prepared_once():
    first, made_first = prepare()
    again, made_again = prepare()
    assert (made_first, made_again) == (True, False)
    assert again == first
    assert again.reports[0].num_rows == 20
    assert texts(again) == [
        f"<|im_start|>user\ndouble {n}<|im_end|>\n<|im_start|>assistant\n{2 * n}<|im_end|>\n" for n in range(20)
    ]


def test_one_edited_row_is_seen_though_size_and_date_stay_the_same(tmp_path):
    prepare()
    file = tmp_path / "rows.jsonl"
    before = file.stat()
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("double 7", "double 8"), encoding="utf-8")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    prepared, made = prepare()
    assert made
    assert sum("double 8<" in text for text in texts(prepared)) == 2


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
    monkeypatch.setattr(preparing, "__file__", str(tmp_path / "cache.py"))
    assert prepare()[1]


def test_tokens_serve_packed_and_unpacked_sequences_and_another_mixture():
    prepare()
    num_tokens = len([entry for entry in preparing.list_entries() if entry.kind == "tokens"])
    prepare(packing=True)
    prepare(mixing=Mixing(mixing="concatenate"))
    kinds = [entry.kind for entry in preparing.list_entries()]
    assert (kinds.count("tokens"), kinds.count("sequences")) == (num_tokens, 3) == (1, 3)


@pytest.mark.parametrize("kind", ["tokens", "sequences"])
@pytest.mark.parametrize("damage", ["truncate", "remove", "no-account"])
def test_a_damaged_entry_is_made_again(damage, kind):
    prepare()
    (entry,) = (entry for entry in preparing.list_entries() if entry.kind == kind)
    data = entry.path / {"tokens": "ids.bin", "sequences": "rows.arrow"}[kind]
    if damage == "truncate":
        data.write_bytes(data.read_bytes()[:-10])
    elif damage == "remove":
        data.unlink()
    else:
        (entry.path / preparing.ACCOUNT).unlink()
    again, _ = prepare()
    assert data.stat().st_size == entry.account["num_tokens"] * 4 if kind == "tokens" else len(texts(again)) == 20
    assert sorted(preparing.list_entries(), key=str) == sorted([entry, *_others(kind)], key=str)


def _others(kind):
    return [entry for entry in preparing.list_entries() if entry.kind != kind]


def test_a_writer_that_fails_leaves_nothing_behind():
    def fail(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("the tokenizer broke")

    with pytest.raises(RuntimeError):
        preparing.cached("0" * 40, "tokens", "rows.jsonl", fail)
    assert list(preparing.cache_root().iterdir()) == []


def write_at_once(barrier, queue):
    barrier.wait()
    prepared, _ = prepare()
    queue.put((str(prepared.path), len(prepared.dataset())))


@pytest.mark.slow
def test_writers_at_once_end_with_one_whole_entry_of_each_kind():
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.Queue()
    writers = [context.Process(target=write_at_once, args=(barrier, queue)) for _ in range(4)]
    for writer in writers:
        writer.start()
    found = {queue.get(timeout=LIMIT_SECONDS) for _ in writers}
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(found) == 1
    assert found.pop()[1] == 20
    assert len(list(preparing.cache_root().iterdir())) == len(preparing.list_entries()) == 2


def test_a_whole_entry_that_appears_meanwhile_is_kept():
    inodes = []

    def make(folder):
        if not inodes:
            inodes.append(None)
            inodes.append((preparing.cached("0" * 40, "tokens", "a", make).path / preparing.ACCOUNT).stat().st_ino)
        return {"num_tokens": 1}

    entry = preparing.cached("0" * 40, "tokens", "a", make)
    assert (entry.path / preparing.ACCOUNT).stat().st_ino == inodes[1]
    assert len(list(preparing.cache_root().iterdir())) == 1


def test_a_run_keeps_its_rows_when_the_cache_is_cleared(tmp_path):
    prepared, _ = prepare()
    kept = tmp_path / "train.arrow"
    prepared.link_to(kept)
    assert kept.stat().st_nlink == 2
    assert preparing.clear() >= kept.stat().st_size
    assert preparing.list_entries() == []
    assert len(read_dataset(kept)) == 20


def test_entries_are_listed_with_what_is_in_them(tmp_path):
    save_chats(tmp_path / "more.jsonl", ((f"triple {n}", f"{3 * n}") for n in range(400)))
    prepare()
    prepare(rows("more.jsonl"))
    entries = preparing.list_entries()
    assert [(entry.source, entry.kind, entry.account["num_sequences"]) for entry in entries] == [
        ("more.jsonl", "sequences", 400),
        ("more.jsonl", "tokens", 400),
        ("rows.jsonl", "sequences", 20),
        ("rows.jsonl", "tokens", 20),
    ]
    for entry in entries:
        account = json.loads((entry.path / preparing.ACCOUNT).read_text(encoding="utf-8"))
        assert entry.size_bytes == sum(account["files"].values())


def test_packed_rows_are_whole_and_their_lengths_stand_beside_them():
    plain, packed = prepare()[0], prepare(packing=True, max_length=64)[0]
    assert packed.num_sequences < plain.num_sequences == 20
    found = []
    for pack in packed.dataset():
        assert len(pack["input_ids"]) == len(pack["labels"]) == sum(pack["seq_lengths"]) <= 64
        start = 0
        for length in pack["seq_lengths"]:
            found.append((pack["input_ids"][start : start + length], pack["labels"][start : start + length]))
            start += length
    assert sorted(found) == sorted((row["input_ids"], row["labels"]) for row in plain.dataset())


@pytest.mark.parametrize("packing", [False, True])
def test_sources_are_gathered_in_the_order_of_the_mixture_however_small_the_batches(tmp_path, monkeypatch, packing):
    save_chats(tmp_path / "more.jsonl", ((f"triple {n}", f"{3 * n}") for n in range(7)))
    monkeypatch.setattr(preparing, "_BATCH_TOKENS", 90)
    tokens = [tokens_of(rows(name), make_tokenizer(), max_length=64) for name in ("rows.jsonl", "more.jsonl")]
    prepared = prepare_rows(tokens, Mixing(weights=(1, 1)), max_length=64, packing=packing)
    assert [(share.source, share.num_sequences) for share in prepared.shares] == [("rows.jsonl", 7), ("more.jsonl", 7)]
    assert prepared.num_tokens == sum(share.num_tokens for share in prepared.shares)
    whole = "".join(texts(prepared))
    assert [whole.count("double"), whole.count("triple")] == [7, 7]
    assert all(whole.count(f"triple {n}<") == 1 for n in range(7))
    labels = [label for row in prepared.dataset() for label in row["labels"]]
    assert prepared.num_trainable_tokens == sum(label != -100 for label in labels)
    if not packing:
        assert [("double" in text, "triple" in text) for text in texts(prepared)] == [(True, False), (False, True)] * 7


def test_a_curriculum_by_length_keeps_the_order_of_equals_and_the_names_of_rows(tmp_path):
    save_chats(tmp_path / "rows.jsonl", [("q", "a b c d"), ("q", "a b"), ("q", "a c"), ("q", "a")])
    plain, by_length = prepare()[0], prepare(mixing=Mixing(curriculum="length"))[0]
    before = texts(plain)
    assert texts(by_length) == [before[row] for row in (3, 1, 2, 0)]
    assert np.load(by_length.path.with_name(preparing.ORIGINS))[1].tolist() == [3, 1, 2, 0]


def test_a_curriculum_by_a_column_orders_the_sequences_of_all_sources_and_is_another_entry(tmp_path):
    lines = [("rows.jsonl", ["3", "1"]), ("more.jsonl", ["2", "1"])]
    for name, numbers in lines:
        save_chats(tmp_path / name, [(f"{name} {number}", number) for number in numbers])
    found = []
    for ranks in ([[3, 1], [2, 1]], [[3, 1], [4, 1]]):
        tokens = []
        for (name, _), of_source in zip(lines, ranks, strict=True):
            tokens.append(tokens_of(replace(rows(name), ranks=array("d", of_source)), make_tokenizer(), max_length=64))
        prepared = prepare_rows(tokens, Mixing(curriculum="column"), max_length=64, packing=False)
        found.append(np.load(prepared.path.with_name(preparing.ORIGINS)).tolist())
    assert found == [[[0, 1, 1, 0], [1, 1, 0, 0]], [[0, 1, 0, 1], [1, 1, 0, 0]]]
