"""A user's own function that makes the rows."""

import json

import pytest

from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection

FUNCTIONS = '''
def answers(row):
    """Rows of messages, without those that nobody liked."""
    if int(row["likes"]) < 1:
        return None
    turns = ({"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]})
    return {"messages": turns, "seen": sorted(row)}

def nothing(row):
    return None

def fails(row):
    return {"text": row["a"]} if row["likes"] else {}[row["q"]]

def mixed(row):
    return {"text": row["a"]} if row["likes"] else {"prompt": row["q"], "completion": row["a"]}

def odd(row):
    return [row["a"], {"text": {1}}][row["likes"] - 1]
'''
ROWS = [{"q": "sky?", "a": "blue", "likes": 2}, {"q": "sea?", "a": "dry", "likes": 0}, {"q": "b", "a": "c", "likes": 1}]
MESSAGES = [
    {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
    for q, a in (("sky?", "blue"), ("b", "c"))
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapers.py").write_text(FUNCTIONS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def refusal(function: str, **section) -> str:
    with pytest.raises(DataError) as caught:
        load_data(DataSection(train="rows.jsonl", format=f"shapers:{function}", **section))
    return str(caught.value)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_the_function_gets_every_column_and_its_rows_are_recognised(here, suffix):
    import pyarrow as pa
    import pyarrow.parquet as pq

    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), here / "rows.parquet")
    if suffix == "csv":
        (here / "rows.csv").write_text("q,a,likes\n" + "".join(f"{r['q']},{r['a']},{r['likes']}\n" for r in ROWS))
    data = load_data(DataSection(train=f"rows.{suffix}", format="shapers:answers"))
    assert (data.train[0].format, list(data.train[0].rows)) == ("messages", MESSAGES)
    assert [data.train[0].numbers[i] for i in range(2)] == ([2, 4] if suffix == "csv" else [1, 3])
    assert data.notes == [
        f"rows.{suffix}: 2 rows of messages, converted by shapers:answers, 1 skipped "
        "(recognized from the column messages); ignored: seen"
    ]


def test_what_the_function_raises_is_told_with_the_row():
    assert refusal("fails") == "rows.jsonl:2: the row function raised KeyError: 'sea?'"
    data = load_data(DataSection(train="rows.jsonl", format="shapers:fails", max_bad_rows=1))
    assert [(bad.place, bad.reason) for bad in data.skipped] == [
        ("rows.jsonl:2", "the row function raised KeyError: 'sea?'")
    ]
    assert [row["text"] for row in data.train[0].rows] == ["blue", "c"]


def test_a_function_that_leaves_out_all_rows_is_refused():
    assert refusal("nothing") == "rows.jsonl: shapers:nothing skips every row (3)"


def test_a_function_that_makes_rows_of_two_formats_is_refused():
    assert refusal("mixed") == (
        "rows.jsonl:2: no column text; the columns match prompt_completion (prompt, completion), not text (text)"
    )


def test_a_function_that_makes_no_rows_is_refused():
    assert refusal("odd").splitlines() == [
        "rows.jsonl:1: the row function returned a value that JSON cannot represent: Object of type set is not "
        "JSON serializable",
        "rows.jsonl:2: the row function returned a value that JSON cannot represent: Object of type set is not "
        "JSON serializable",
        "rows.jsonl:3: the row function must return a row (a dict) or None, got a string",
    ]


def test_a_source_that_is_no_object_does_not_reach_the_function(here):
    (here / "rows.jsonl").write_text('3\n{"q": "sky?", "a": "blue", "likes": 2}\n{"q"\n')
    assert refusal("answers").splitlines() == [
        "rows.jsonl:1: a row must be an object, got the number 3",
        "rows.jsonl:3:5: invalid JSON: expecting ':' delimiter",
    ]
