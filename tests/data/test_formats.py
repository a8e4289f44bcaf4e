"""What rows of each format become: conversions worked by hand, and what is said about them."""

import json

import pytest

from tunekit.data.sources.load import load_data
from tunekit.recipe.sections.data import DataSection

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, *rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(path, **section):
    return load_data(DataSection(train=str(path), **section))


def test_sharegpt_becomes_messages_and_the_renamed_speakers_are_said(here):
    write(
        here / "chats.jsonl",
        {
            "id": 1,
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Ho", "weight": None},
            ],
        },
        {"conversations": [{"from": "user", "value": "a"}, {"from": "GPT", "value": "b", "weight": 1}]},
    )
    data = load("chats.jsonl")
    assert data.train[0].format == "messages"
    assert data.train[0].read_as == "sharegpt"
    assert list(data.train[0].rows) == [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Ho"},
            ]
        },
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}]},
    ]
    assert data.notes == [
        "chats.jsonl: 2 rows of sharegpt: conversations -> messages (human -> user, gpt -> assistant, "
        "GPT -> assistant); ignored: id"
    ]


def test_sharegpt_takes_its_system_turn_and_tools_from_columns(here):
    turns = [
        {"from": "human", "value": "Rain?"},
        {"from": "observation", "value": "no"},
        {"from": "gpt", "value": "No"},
    ]
    write(
        here / "chats.jsonl",
        {"conversations": turns, "system": "Be brief.", "tools": json.dumps([WEATHER])},
        {"conversations": turns, "system": "", "tools": "[]"},
    )
    data = load("chats.jsonl")
    said = [
        {"role": "user", "content": "Rain?"},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "No"},
    ]
    assert list(data.train[0].rows) == [
        {"messages": [{"role": "system", "content": "Be brief."}, *said], "tools": [WEATHER]},
        {"messages": said},
    ]
    assert data.notes == [
        "chats.jsonl: 2 rows of sharegpt: conversations -> messages (human -> user, observation -> tool, gpt -> "
        "assistant), system -> system; also passed to the chat template: tools"
    ]


def test_conversations_may_hold_roles_and_contents_already(here):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    write(here / "chats.jsonl", {"conversations": messages})
    data = load("chats.jsonl")
    assert list(data.train[0].rows) == [{"messages": messages}]
    assert data.notes == ["chats.jsonl: 1 row of sharegpt: conversations -> messages"]


def test_parts_of_text_are_joined_and_developer_messages_are_those_of_the_system(here):
    parts = [{"type": "text", "text": "Hi "}, {"type": "input_text", "text": "there"}]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief.", "image_url": None}]},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Ho"}]},
    ]
    write(here / "chats.jsonl", {"messages": messages})
    other = [{"role": "assistant", "content": [{"type": "text", "text": "No"}]}]
    write(here / "pairs.jsonl", {"prompt": messages[:2], "chosen": messages[2:], "rejected": other})
    data = load("chats.jsonl")
    turns = [("system", "Be brief."), ("user", "Hi there"), ("assistant", "Ho")]
    as_strings = [{"role": role, "content": content} for role, content in turns]
    assert list(data.train[0].rows) == [{"messages": as_strings}]
    assert data.notes == [
        "chats.jsonl: 1 row of messages (recognized from the column messages); 1 developer message read as system"
    ]
    pairs = load("pairs.jsonl").train[0]
    assert pairs.rows[0] == {
        "prompt": as_strings[:2],
        "chosen": as_strings[2:],
        "rejected": [{"role": "assistant", "content": "No"}],
    }


def test_alpaca_becomes_a_conversation(here):
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Greet.", "input": "", "output": "Hi"},
    ]
    (here / "alpaca.json").write_text(json.dumps(rows))
    data = load("alpaca.json")
    assert data.train[0].format == "messages"
    assert list(data.train[0].rows) == [
        {"messages": [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]},
        {"messages": [{"role": "user", "content": "Greet."}, {"role": "assistant", "content": "Hi"}]},
    ]
    assert data.notes == ["alpaca.json: 2 rows of alpaca: instruction + input -> user, output -> assistant"]


def test_alpaca_keeps_its_system_words_and_its_history(here):
    row = {"instruction": "And 3?", "output": "6", "system": "Add.", "history": [["1", "1"], ["2", "3"]], "id": 7}
    write(here / "alpaca.jsonl", row)
    data = load("alpaca.jsonl")
    assert data.train[0].rows[0] == {
        "messages": [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "2"},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "And 3?"},
            {"role": "assistant", "content": "6"},
        ]
    }
    assert data.notes == [
        "alpaca.jsonl: 1 row of alpaca: instruction -> user, output -> assistant, history -> earlier messages, "
        "system -> system; ignored: id"
    ]


def test_a_format_that_is_given_keeps_the_columns_of_the_other_aside(here):
    write(here / "alpaca.jsonl", {"instruction": "Add.", "output": "3", "text": "Add. 3"})
    assert load("alpaca.jsonl", format="alpaca").notes == [
        "alpaca.jsonl: 1 row of alpaca: instruction -> user, output -> assistant; ignored: text"
    ]
    assert load("alpaca.jsonl", format="text").train[0].rows[0] == {"text": "Add. 3"}


def test_calls_of_tools_keep_their_arguments_as_objects(here):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    row = {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "no", "tool_call_id": "c1"},
        ],
        "tools": [WEATHER],
    }
    write(here / "chats.jsonl", row)
    data = load("chats.jsonl")
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert data.train[0].rows[0] == {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "no", "tool_call_id": "c1"},
        ],
        "tools": [WEATHER],
    }
    assert data.notes == [
        "chats.jsonl: 1 row of messages (recognized from the column messages); also passed to the chat template: "
        "tools and tool_call_id, tool_calls of messages"
    ]


def test_a_table_gives_tools_and_calls_no_keys_that_only_others_have(here):
    import pyarrow as pa
    import pyarrow.parquet as pq

    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"x": {"type": "string"}}}},
        {"type": "function", "function": {"name": "b", "parameters": {"y": {"type": "number"}}}},
    ]
    answer = [{"role": "assistant", "content": "", "tool_calls": [{"name": "b", "arguments": {"y": 1}}]}]
    rows = [{"messages": answer, "tools": tools}]
    pq.write_table(pa.Table.from_pylist(rows), here / "chats.parquet")
    assert list(load("chats.parquet").train[0].rows) == rows


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet", "arrow"])
def test_columns_of_other_names_are_read_from_every_kind_of_file(here, suffix):
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"question": "a", "answer": "b", "prompt": "not this"}
    file = here / f"qa.{suffix}"
    table = pa.Table.from_pylist([row])
    if suffix == "parquet":
        pq.write_table(table, file)
    elif suffix == "arrow":
        with pa.ipc.new_file(str(file), table.schema) as writer:
            writer.write_table(table)
    elif suffix in ("csv", "tsv"):
        mark = "," if suffix == "csv" else "\t"
        file.write_text("\n".join(mark.join(cells) for cells in (row.keys(), row.values())))
    else:
        file.write_text(json.dumps(row if suffix == "jsonl" else [row]))
    data = load(file.name, columns={"prompt": "question", "completion": "answer"})
    assert list(data.train[0].rows) == [{"prompt": "a", "completion": "b"}]
    assert data.notes == [
        f"qa.{suffix}: 1 row of prompt_completion (recognized from the columns question and answer); "
        "data.columns: question -> prompt, answer -> completion; ignored: prompt"
    ]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"chat": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, {"conversations": "chat"}),
        ({"task": "a", "response": "b"}, {"instruction": "task", "output": "response"}),
        ({"a": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, {"messages": "a"}),
    ],
)
def test_columns_of_other_names_are_read_in_every_format(here, row, columns):
    write(here / "rows.jsonl", row)
    assert load("rows.jsonl", columns=columns).train[0].rows[0] == {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    }


def test_columns_may_change_places(here):
    write(here / "qa.jsonl", {"prompt": "b", "completion": "a"})
    data = load("qa.jsonl", columns={"prompt": "completion", "completion": "prompt"})
    assert data.train[0].rows[0] == {"prompt": "a", "completion": "b"}


def test_an_optional_column_of_another_name_need_not_stand_in_every_row(here):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    write(here / "chats.jsonl", row, {**row, "functions": [WEATHER]})
    rows = load("chats.jsonl", columns={"tools": "functions"}).train[0].rows
    assert list(rows) == [row, {**row, "tools": [WEATHER]}]
