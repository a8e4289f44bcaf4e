"""Which files are read, and how: folders, patterns, compressed text, tables."""

import gzip
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(path, **section):
    return load_data(DataSection(train=str(path), **section))


def zstd(text: bytes) -> bytes:
    import pyarrow as pa

    return pa.compress(text, codec="zstd", asbytes=True)


@pytest.fixture
def folder(here):
    """Three files whose names are not in the order of their making, and one that holds no rows."""
    folder = here / "data"
    folder.mkdir()
    (folder / "c.jsonl").write_text('{"text":"5"}\n')
    (folder / "a.jsonl").write_text('{"text":"1"}\n\n{"text":"2"}\n')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'\n{"text":"3"}\n{"text":"4"}\n'))
    (folder / "LICENSE").write_text("Do what you like.")
    (folder / ".hidden.csv").write_text("text\n")
    return folder


PLACES = ["data/a.jsonl:1", "data/a.jsonl:3", "data/b.jsonl.gz:2", "data/b.jsonl.gz:3", "data/c.jsonl:1"]


@pytest.mark.parametrize("path", ["data", "data/", "data/*.jsonl*", "*/[abc].jsonl*", "**/*.jsonl*"])
def test_a_folder_or_pattern_is_read_in_the_order_of_names(folder, path):
    rows = load(path).train[0]
    assert [row["text"] for row in rows.rows] == ["1", "2", "3", "4", "5"]
    assert [rows.place(i) for i in range(5)] == PLACES
    assert rows.place(-1) == PLACES[-1]


def test_what_a_folder_holds_besides_rows_is_said(folder):
    assert load("data").notes == [
        "data: 5 rows in 3 files of text (recognized from the column text)",
        "data: files of unsupported formats ignored: LICENSE",
    ]


def test_a_pattern_may_be_absolute(folder):
    rows = load(folder / "*.jsonl").train[0]
    assert [rows.place(i) for i in range(3)] == [f"{folder}/a.jsonl:1", f"{folder}/a.jsonl:3", f"{folder}/c.jsonl:1"]


def test_a_file_whose_name_is_a_pattern_is_that_file(here):
    (here / "a[1].jsonl").write_text('{"text":"1"}')
    assert load("a[1].jsonl").train[0].place(0) == "a[1].jsonl:1"


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
@pytest.mark.parametrize(
    ("kind", "text", "numbers"),
    [
        (".jsonl", '\ufeff{"text":"é"}\r\n\r\n{"text":"b"}\r\n', [1, 3]),
        (".json", '[\n{"text":"é"},\n{"text":"b"}]', [2, 3]),
        (".csv", 'text\n"é"\nb\n', [2, 3]),
        (".tsv", "id\ttext\n1\té\n2\tb\n", [2, 3]),
        (".txt", "é\n\n\nb\n", [1, 4]),
    ],
)
def test_compressed_text_keeps_its_line_numbers(here, compress, kind, text, numbers):
    name = f"rows{kind}{'.gz' if compress is gzip.compress else '.zst'}"
    (here / name).write_bytes(compress(text.encode()))
    rows = load(name).train[0]
    assert [row["text"] for row in rows.rows] == ["é", "b"]
    assert [rows.place(i) for i in range(2)] == [f"{name}:{number}" for number in numbers]


def test_a_compressed_file_may_be_several_put_together(here):
    (here / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text":"a"}\n') + gzip.compress(b'{"text":"b"}\n'))
    (here / "rows.jsonl.zst").write_bytes(zstd(b'{"text":"a"}\n') + zstd(b'{"text":"b"}\n'))
    assert len(load("rows.jsonl.gz").train[0]) == len(load("rows.jsonl.zst").train[0]) == 2


def test_tab_separated_cells_hold_commas_and_line_breaks(here):
    (here / "qa.tsv").write_text('prompt\tcompletion\n"a\nb"\tc, d\ne\tf\n')
    rows = load("qa.tsv").train[0]
    assert list(rows.rows) == [{"prompt": "a\nb", "completion": "c, d"}, {"prompt": "e", "completion": "f"}]
    assert [rows.place(i) for i in range(2)] == ["qa.tsv:2", "qa.tsv:4"]


@pytest.mark.parametrize("kind", ["file", "stream", "feather"])
def test_arrow_files_and_streams_are_read(here, kind):
    import pyarrow as pa
    import pyarrow.feather

    table = pa.table({"text": [str(i) for i in range(2500)], "id": range(2500)})
    name = "rows.feather" if kind == "feather" else "rows.arrow"
    if kind == "feather":
        pyarrow.feather.write_feather(table, name, compression="zstd", chunksize=400)
    else:
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with new(name, table.schema) as writer:
            writer.write_table(table, max_chunksize=2000)
    data = load(name)
    assert [row["text"] for row in data.train[0].rows] == [str(i) for i in range(2500)]
    assert data.train[0].place(2499) == f"{name} row 2500"
    assert data.notes == [f"{name}: 2,500 rows of text (recognized from the column text); ignored: id"]


def test_a_dataset_that_datasets_saved_is_read_from_its_arrow_file(here):
    import datasets

    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk("saved")
    assert [row["text"] for row in load("saved/*.arrow").train[0].rows] == ["a", "b"]


def test_bad_rows_up_to_the_cap_are_left_out_and_told(here):
    lines = ['{"text":"a"}', '{"text"}', '{"text":""}', '{"text":"b"}', "[]", "3"]
    (here / "notes.jsonl").write_text("\n".join(lines))
    data = load("notes.jsonl", max_bad_rows=4)
    assert [row["text"] for row in data.train[0].rows] == ["a", "b"]
    assert [data.train[0].place(i) for i in range(2)] == ["notes.jsonl:1", "notes.jsonl:4"]
    assert [(skipped.place, skipped.reason) for skipped in data.skipped] == [
        ("notes.jsonl:2:8", "invalid JSON: expecting ':' delimiter"),
        ("notes.jsonl:3", "text is empty"),
        ("notes.jsonl:5", "a row must be an object, got a list"),
        ("notes.jsonl:6", "a row must be an object, got the number 3"),
    ]
    assert data.notes[1] == (
        "notes.jsonl: 4 invalid rows skipped (data.max_bad_rows=4): notes.jsonl:2:8: invalid JSON: expecting ':' "
        "delimiter; notes.jsonl:3: text is empty; notes.jsonl:5: a row must be an object, got a "
        "list; and 1 more"
    )


def test_what_is_left_out_of_rows_to_train_and_to_evaluate_on_is_told_together(here):
    (here / "train.jsonl").write_text('{"text":"a"}\n{"text":1}\n')
    (here / "eval.jsonl").write_text('{"text":"a"}\n\n{"text":2}\n')
    data = load("train.jsonl", eval="eval.jsonl", max_bad_rows=1)
    assert [skipped.place for skipped in data.skipped] == ["train.jsonl:2", "eval.jsonl:3"]


def test_the_cap_of_bad_rows_holds_for_all_files_of_a_folder_together(folder):
    (folder / "c.jsonl").write_text('{"text":"5"}\n{}\n')
    (folder / "a.jsonl").write_text('{"text":"1"}\n\n{"text":"2"}\n{}\n')
    data = load("data", max_bad_rows=2)
    assert [skipped.place for skipped in data.skipped] == ["data/a.jsonl:4", "data/c.jsonl:2"]
    assert [data.train[0].place(i) for i in range(5)] == PLACES


TEXTS = ["a\u2028b", "é", '"{', "\n\n", "end"]
WHOLE = {
    "rows.jsonl": "".join(json.dumps({"text": f"x{text}"}, ensure_ascii=False) + "\n" for text in TEXTS).encode(),
    "rows.json": json.dumps([{"text": f"x{text}"} for text in TEXTS], indent=1).encode(),
    "rows.jsonl.gz": gzip.compress("".join(json.dumps({"text": f"x{text}"}) + "\n" for text in TEXTS).encode()),
}


@given(st.data(), st.sampled_from(sorted(WHOLE)))
def test_a_file_cut_anywhere_gives_its_first_rows_or_an_error_with_its_place(tmp_path_factory, data, name):
    whole = WHOLE[name]
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    file = tmp_path_factory.mktemp("cut") / name
    file.write_bytes(cut)
    try:
        rows = load(file).train[0]
    except DataError as error:
        assert re.match(rf"(data\.train\.path: '{re.escape(str(file))}' is empty|{re.escape(str(file))}:)", str(error))
        assert cut != whole
    else:
        read = [row["text"] for row in rows.rows]
        assert read == [f"x{text}" for text in TEXTS][: len(read)]
        assert len(read) == len(TEXTS) or name == "rows.jsonl"
