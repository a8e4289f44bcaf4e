"""Rows copied without the invalid ones: from each kind of file, with all columns, in order."""

import gzip
import json

import datasets
import pytest

import tunekit
from tests.commands import run_command
from tunekit.errors import DataError

GOOD = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!\nyes"}], "id": n}
    for n in range(3)
]
BAD = {"messages": 3, "id": 9}


def copied(path, to, *changes):
    return tunekit.save_good_rows({"model": "pico", "data": {"train": str(path)}}, changes, path=to)


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json"])
def test_good_rows_keep_their_columns_and_order(tmp_path, suffix):
    source, to = tmp_path / f"rows{suffix}", tmp_path / "good.jsonl"
    rows = [BAD, GOOD[0], GOOD[1], BAD, GOOD[2]]
    text = json.dumps(rows) if suffix == ".json" else "\n\n".join([*map(json.dumps, rows), '{"messages": ['])
    source.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    result = copied(source, to)
    assert rows_of(to) == GOOD
    assert (result.path, result.num_rows, result.num_bad) == (to, 3, 2 if suffix == ".json" else 3)


def test_invalid_rows_are_shown_and_copied_in_their_places_once_they_are_corrected(tmp_path):
    source, to = tmp_path / "rows.jsonl", tmp_path / "good.jsonl"
    broken = json.dumps(GOOD[1])[:-1]
    source.write_text("\n".join([json.dumps(GOOD[0]), "", broken, json.dumps(BAD), json.dumps(GOOD[2])]))
    rows = tunekit.invalid_rows({"model": "pico", "data": {"train": str(source)}})
    assert [(row.number, row.text) for row in rows] == [(3, broken), (4, json.dumps(BAD))]
    assert rows[0].place.startswith(f"{source}:3:") and "invalid JSON" in rows[0].reason
    assert tunekit.invalid_rows({"model": "pico", "data": {"train": str(source)}}, most=1) == rows[:1]
    recipe = {"model": "pico", "data": {"train": str(source)}}
    result = tunekit.save_good_rows(recipe, path=to, corrected={3: GOOD[1], 4: {"messages": "still"}})
    assert rows_of(to) == GOOD and (result.num_rows, result.num_bad) == (3, 1)


@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet"])
def test_invalid_rows_of_other_files_are_corrected(tmp_path, suffix):
    rows = [{"prompt": "Where?", "completion": "There"}, {"prompt": "When?", "completion": ""}]
    source, to = tmp_path / f"rows{suffix}", tmp_path / "good.jsonl"
    if suffix == ".csv":
        source.write_text("prompt,completion\nWhere?,There\nWhen?,\n")
    elif suffix == ".json":
        source.write_text(json.dumps(rows, indent=1))
    else:
        datasets.Dataset.from_list(rows).to_parquet(source)
    recipe = {"model": "pico", "data": {"train": str(source)}}
    (bad,) = tunekit.invalid_rows(recipe)
    assert json.loads(bad.text) == rows[1]
    tunekit.save_good_rows(recipe, path=to, corrected={bad.number: {**rows[1], "completion": "Now"}})
    assert rows_of(to) == [rows[0], {"prompt": "When?", "completion": "Now"}]


def test_cells_of_a_table_are_copied_by_their_columns(tmp_path):
    source, to = tmp_path / "rows.csv", tmp_path / "good.jsonl"
    source.write_text('ask,reply,more\nWhere?,"There,\nhere",1\nWhen?,,2\nWho?,Me,3\n', encoding="utf-8")
    result = copied(source, to, "data.columns={prompt: ask, completion: reply}")
    assert rows_of(to) == [
        {"ask": "Where?", "reply": "There,\nhere", "more": "1"},
        {"ask": "Who?", "reply": "Me", "more": "3"},
    ]
    assert result.num_bad == 1


def test_a_copy_replaces_nothing_and_needs_a_good_row_of_one_file(tmp_path):
    source, to = tmp_path / "rows.jsonl", tmp_path / "good.jsonl"
    source.write_text(json.dumps(GOOD[0]), encoding="utf-8")
    to.write_text("mine")
    with pytest.raises(DataError, match=r"cannot write .*good.jsonl: File exists"):
        copied(source, to)
    assert to.read_text() == "mine"
    (tmp_path / "other.jsonl").write_text(json.dumps(BAD), encoding="utf-8")
    with pytest.raises(DataError, match=r"no good row; the first: .*other.jsonl:1: "):
        copied(tmp_path / "other.jsonl", tmp_path / "new.jsonl")
    with pytest.raises(DataError, match="is not one file"):
        copied(tmp_path / "*.jsonl", tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()


def test_the_command_says_how_many_rows_it_left_out(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*GOOD, BAD])), encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("model: pico\ndata: {train: rows.jsonl}\n", encoding="utf-8")
    answer = run_command("data", "mine.yaml", "--good-rows", "good.jsonl", cwd=tmp_path)
    assert answer.stdout == "good.jsonl: 3 rows; 1 invalid rows skipped\n"
    assert rows_of(tmp_path / "good.jsonl") == GOOD
