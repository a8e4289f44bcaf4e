"""What good files become: rows, their places, and what is said about them."""

import json

import pytest

from tunekit.data.sources import rows as stored
from tunekit.data.sources.hub import open_dataset
from tunekit.data.sources.load import load_data
from tunekit.data.sources.rows import RowStore
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(path, **section):
    return load_data(DataSection(train=str(path), **section))


def test_json_lines_survive_a_byte_order_mark_crlf_and_blank_lines(here):
    (here / "notes.jsonl").write_bytes(b'\xef\xbb\xbf{"text":"a\xc3\xa9"}\r\n\r\n{"text":"b","id":1}')
    data = load("notes.jsonl")
    assert list(data.train[0].rows) == [{"text": "aé"}, {"text": "b"}]
    assert [data.train[0].place(i) for i in range(2)] == ["notes.jsonl:1", "notes.jsonl:3"]
    assert data.notes == ["notes.jsonl: 2 rows of text (recognized from the column text); ignored: id"]


def test_a_line_separator_inside_a_json_string_ends_no_line(here):
    (here / "notes.jsonl").write_text('{"text":"a\u2028b\x85c"}\n{"text":"d"}\n', encoding="utf-8")
    assert [row["text"] for row in load("notes.jsonl").train[0].rows] == ["a\u2028b\x85c", "d"]


def test_a_json_list_knows_the_line_of_every_object(here):
    (here / "notes.json").write_text('[\n{"text":"a"},\n\n  {\n "text":\n "b"}, {"text":"c"}\n]\n')
    rows = load("notes.json").train[0]
    assert [row["text"] for row in rows.rows] == ["a", "b", "c"]
    assert [rows.place(i) for i in range(3)] == ["notes.json:2", "notes.json:4", "notes.json:6"]


def test_json_lines_under_the_suffix_of_a_list_are_read(here):
    (here / "notes.json").write_text('{"text":"a"}\n{"text":"b"}\n')
    assert [row["text"] for row in load("notes.json").train[0].rows] == ["a", "b"]


def test_csv_cells_hold_line_breaks_and_rows_keep_their_first_line(here):
    (here / "qa.csv").write_bytes(b'id,prompt,completion\r\n1,"a\r\n""b"", c",d\r\n2,e,f\r\n')
    rows = load("qa.csv").train[0]
    assert list(rows.rows) == [{"prompt": 'a\n"b", c', "completion": "d"}, {"prompt": "e", "completion": "f"}]
    assert [rows.place(i) for i in range(2)] == ["qa.csv:2", "qa.csv:4"]


def test_csv_cells_may_be_longer_than_the_csv_module_allows_by_default(here):
    (here / "long.csv").write_text("text\n" + "a" * 200_000 + "\n")
    assert len(load("long.csv").train[0].rows[0]["text"]) == 200_000


def test_parquet_messages_lose_the_nulls_that_the_table_needs(here):
    import pyarrow as pa
    import pyarrow.parquet as pq

    turns = [{"role": "user", "content": "hi", "name": "Ann"}, {"role": "assistant", "content": "ho", "name": None}]
    pq.write_table(pa.table({"messages": [turns], "score": [0.5]}), here / "chats.parquet")
    data = load("chats.parquet")
    assert data.train[0].rows[0] == {
        "messages": [{"role": "user", "content": "hi", "name": "Ann"}, {"role": "assistant", "content": "ho"}]
    }
    assert data.train[0].place(0) == "chats.parquet row 1"
    assert data.notes == [
        "chats.parquet: 1 row of messages (recognized from the column messages); ignored: score; also passed to "
        "the chat template: name of messages"
    ]


def test_a_text_file_is_parted_at_two_blank_lines(here):
    (here / "tales.txt").write_text("\n\nOne.\n\n  Still one.\n\n\n \nTwo.\n\n")
    data = load("tales.txt")
    assert [row["text"] for row in data.train[0].rows] == ["One.\n\n  Still one.", "Two."]
    assert [data.train[0].place(i) for i in range(2)] == ["tales.txt:3", "tales.txt:9"]
    assert data.notes == ["tales.txt: 2 documents of plain text (separated by two blank lines)"]


def test_a_format_that_is_given_decides_between_columns_that_fit_two(here):
    row = {"text": "hi ho", "prompt": "hi", "completion": "ho"}
    (here / "both.jsonl").write_text(json.dumps(row))
    assert load("both.jsonl", format="prompt_completion").train[0].rows[0] == {"prompt": "hi", "completion": "ho"}
    assert load("both.jsonl", format="text").notes == ["both.jsonl: 1 row of text; ignored: completion, prompt"]


def test_prompt_and_completion_may_be_lists_of_messages(here):
    row = {
        "prompt": [{"role": "user", "content": "hi"}],
        "completion": [{"role": "assistant", "content": "ho"}],
    }
    (here / "qa.jsonl").write_text(json.dumps(row))
    assert load("qa.jsonl").train[0].rows[0] == row


def test_a_file_is_found_from_the_home_folder_and_keeps_its_name_in_messages(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    (here / "notes.jsonl").write_text('{"text":"a"}')
    assert load("~/notes.jsonl").train[0].place(0) == "~/notes.jsonl:1"


def test_rows_of_a_hub_dataset_are_read_like_those_of_a_file():
    import datasets

    table = open_dataset(datasets.Dataset.from_dict({"text": ["a", "b"], "id": [1, 2]}))
    assert table.columns == ("text", "id")
    assert [(record.number, record.value) for record in table.read(["text"])] == [
        (1, {"text": "a"}),
        (2, {"text": "b"}),
    ]


@pytest.mark.parametrize("in_memory_bytes", [2**20, 30, 0])
def test_a_row_store_gives_back_what_it_was_given_from_memory_and_from_a_file(in_memory_bytes, monkeypatch):
    monkeypatch.setattr(stored, "IN_MEMORY_BYTES", in_memory_bytes)
    given = [{"text": "é\u2028"}, {"messages": [{"role": "user", "content": ""}]}, {"text": "x"}]
    store = RowStore()
    for row in given:
        store.append(row)
    assert list(store) == given
    assert store[-1] == given[2]
    assert store[0:2] == given[:2]
    with pytest.raises(IndexError):
        store[3]
    with pytest.raises(IndexError):
        store[-4]
    assert list(store.select([0, 2])) == [given[0], given[2]]
    assert [list(batch) for batch in store.batches(num_rows=2, num_bytes=1000)] == [[0, 1], [2]]
    assert [list(batch) for batch in store.batches(num_rows=9, num_bytes=20)] == [[0], [1], [2]]
    assert store.sizes_bytes.tolist() == [16, 43, 12]
    assert store.digest == RowStore(given).digest != RowStore(given[:2]).digest


@pytest.mark.network
def test_a_hub_dataset_is_loaded_by_name_and_its_eval_split_is_found():
    source = {"path": "cornell-movie-review-data/rotten_tomatoes"}
    data = load_data(
        DataSection.model_validate(
            {"train": {**source, "split": "train[:20]"}, "eval": {**source, "split": "test[:5]"}}
        )
    )
    assert (len(data.train[0]), data.train[0].format) == (20, "text")
    assert len(data.eval[0]) == 5


def ranked(path, **section):
    return load(path, curriculum_column="rank", shuffle=False, **section).train[0]


def test_numbers_of_a_curriculum_are_read_from_every_kind_of_table(here):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (here / "notes.jsonl").write_text('{"text":"a","rank":2}\n{"text":"b","rank":-1.5}\n')
    (here / "notes.csv").write_text("text,rank\na,2\nb,-1.5\n")
    pq.write_table(pa.table({"text": ["a", "b"], "rank": [2.0, -1.5]}), here / "notes.parquet")
    for name in ("notes.jsonl", "notes.csv", "notes.parquet"):
        rows = ranked(name)
        assert list(rows.rows) == [{"text": "a"}, {"text": "b"}]
        assert list(rows.ranks) == [2, -1.5]
        assert "ignored" not in rows.notes[0]
        assert list(rows.select([1]).ranks) == [-1.5]


def test_a_curriculum_takes_a_column_that_rewards_read_too(here):
    (here / "sums.jsonl").write_text('{"prompt":"1+1","rank":3}\n')
    rows = ranked("sums.jsonl")
    assert list(rows.rows) == [{"prompt": "1+1", "rank": 3}]
    assert list(rows.ranks) == [3]
    assert "passed to rewards: rank" in rows.notes[0]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "no column rank (data.curriculum_column)"),
        (',"rank":null', "rank must be a finite number (data.curriculum_column), got null"),
        (',"rank":"3"', "rank must be a finite number (data.curriculum_column), got the string 3"),
        (',"rank":true', "rank must be a finite number (data.curriculum_column), got the boolean true"),
        (',"rank":[1]', "rank must be a finite number (data.curriculum_column), got a list"),
        (f',"rank":1{"0" * 400}', "rank must be a finite number (data.curriculum_column), got the number 1000"),
    ],
)
def test_a_row_without_a_number_is_named_by_its_line(here, value, problem):
    (here / "notes.jsonl").write_text(f'{{"text":"a","rank":1}}\n{{"text":"b"{value}}}\n')
    with pytest.raises(DataError) as error:
        ranked("notes.jsonl")
    assert str(error.value).startswith(f"notes.jsonl:2: {problem}")
    rows = ranked("notes.jsonl", max_bad_rows=1)
    assert (list(rows.ranks), rows.skipped[0].place) == ([1], "notes.jsonl:2")


def test_cells_and_numbers_that_are_none_are_named_too(here):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (here / "notes.csv").write_text("text,rank\na,1\nb,hard\nc,nan\nd,\n")
    problem = r"csv:3: rank must be .* got the string hard\n.*csv:4: .* got the string nan\n.*csv:5: .* got the string"
    with pytest.raises(DataError, match=problem):
        ranked("notes.csv")
    pq.write_table(pa.table({"text": ["a", "b"], "rank": [1.0, float("nan")]}), here / "notes.parquet")
    with pytest.raises(DataError, match=r"notes.parquet row 2: rank must be .* got the number nan"):
        ranked("notes.parquet")
    with pytest.raises(DataError, match=r"notes.csv:1: no column rnk \(data.curriculum_column\); did you mean rank"):
        load("notes.csv", curriculum_column="rnk", shuffle=False)
