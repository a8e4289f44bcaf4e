"""Options of sources that choose and change rows: how many, texts in them, system messages, prompts, and lengths."""

import json
import random
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from tests.data.tokenizers import CHATML_MARKED, byte_tokenizer
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.prepare import prepare_data
from tunekit.data.sources.load import SAMPLING_SEED, load_data, stream_rows
from tunekit.data.tokenization.encode import Encoded, Observed
from tunekit.data.tokenization.tokenize import TokenReport, shares_of
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def write(name, *rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def load(**section):
    return load_data(DataSection(**section)).train[0]


def texts(source, num_rows=2):
    section = DataSection(train=source, streaming=True)
    batches = stream_rows(section.sources[0], max_bad_rows=0, num_rows=num_rows)
    return [[row["text"] for row in rows.rows] for rows in batches]


TEXTS = [{"text": str(number)} for number in range(7)]


def test_the_first_rows_of_a_source_are_used(here) -> None:
    write("a.jsonl", *TEXTS[:3])
    write("b.jsonl", *TEXTS[3:])
    rows = load(train={"path": "*.jsonl", "max_samples": 5})
    assert [row["text"] for row in rows.rows] == ["0", "1", "2", "3", "4"]
    assert rows.place(4) == "b.jsonl:2"
    assert "5 rows in 2 files" in rows.notes[0]
    assert len(load(train={"path": "a.jsonl", "max_samples": 9}).rows) == 3


def test_rows_behind_the_last_that_is_used_are_not_read(here) -> None:
    write("a.jsonl", *TEXTS[:2], {"text": 3})
    assert len(load(train={"path": "a.jsonl", "max_samples": 2}).rows) == 2
    with pytest.raises(DataError, match=r"a\.jsonl:3"):
        load(train="a.jsonl")


def test_a_stream_ends_behind_the_last_row_that_is_used(here) -> None:
    write("a.jsonl", *TEXTS[:3])
    write("b.jsonl", *TEXTS[3:])
    assert texts({"path": "*.jsonl", "max_samples": 5}) == [["0", "1"], ["2"], ["3", "4"]]
    assert texts({"path": "*.jsonl", "max_samples": 3}) == [["0", "1"], ["2"]]
    assert sum(map(len, texts({"path": "*.jsonl"}))) == 7


def test_a_random_sample_is_the_same_each_time_and_keeps_its_places(here) -> None:
    write("a.jsonl", *TEXTS)
    source = {"path": "a.jsonl", "max_samples": 3, "sampling": "random"}
    rows = load(train=source)
    expected = sorted(random.Random(SAMPLING_SEED).sample(range(7), 3))
    assert [int(row["text"]) for row in rows.rows] == expected != [0, 1, 2]
    assert rows.place(1) == f"a.jsonl:{expected[1] + 1}"
    assert rows.notes[-1] == "a.jsonl: 3 of 7 rows, a random sample"
    assert len(load(train={**source, "max_samples": 8}).rows) == 7


@pytest.mark.parametrize(
    ("source", "more", "words"),
    [
        ({"sampling": "random"}, {}, "has no effect without max_samples"),
        ({"sampling": "random", "max_samples": 3}, {"streaming": True}, "cannot be random with data.streaming"),
    ],
)
def test_a_sample_that_cannot_be_drawn_is_refused(source, more, words) -> None:
    with pytest.raises(ValidationError, match=f"train.sampling: {words}"):
        DataSection(train={"path": "a.jsonl", **source}, **more)


ALPACA = {"instruction": "Add {x}.", "input": "1 2", "output": "3"}
ALONE = {"instruction": "Greet.", "input": "", "output": "Hi"}
HEAD = "Below is an instruction that describes a task"
TAIL = "Write a response that appropriately completes the request.\n\n### Instruction:\n"
CONTEXT = ", paired with an input that provides further context. "
WITH_INPUT = f"{HEAD}{CONTEXT}{TAIL}Add {{x}}.\n\n### Input:\n1 2\n\n### Response:\n"
WITHOUT = f"{HEAD}. {TAIL}Greet.\n\n### Response:\n"


@pytest.mark.parametrize(
    ("style", "prompts"),
    [
        ("plain", ("Add {x}.\n\n1 2", "Greet.")),
        ("line", ("Add {x}.\n1 2", "Greet.")),
        ("joined", ("Add {x}.1 2", "Greet.")),
        ("alpaca_turn", (WITH_INPUT, WITHOUT)),
    ],
)
def test_instruction_and_input_become_a_user_turn_in_each_style(here, style, prompts) -> None:
    rows = load(train=write("a.jsonl", ALPACA, ALONE), prompt_style=style)
    assert [row["messages"][0]["content"] for row in rows.rows] == list(prompts)
    assert rows.rows[1]["messages"][1] == {"role": "assistant", "content": "Hi"}


def test_the_headings_of_alpaca_make_plain_text_of_a_row(here) -> None:
    rows = load(train={"path": write("a.jsonl", ALPACA, ALONE), "prompt_style": "alpaca"})
    assert rows.format == "prompt_completion"
    assert list(rows.rows) == [
        {"prompt": WITH_INPUT, "completion": "3"},
        {"prompt": WITHOUT, "completion": "Hi"},
    ]
    assert "instruction + input -> prompt, output -> completion" in rows.notes[0]


def test_what_has_no_place_in_alpacas_text_is_refused(here) -> None:
    write("a.jsonl", {**ALONE, "system": "be"})
    with pytest.raises(DataError, match=r"a.jsonl:1: system is unsupported in plain text.*alpaca_turn"):
        load(train="a.jsonl", prompt_style="alpaca")
    write("b.jsonl", {"text": "hi"})
    with pytest.raises(DataError, match=r"data\.prompt_style: only for rows of alpaca, but 'b.jsonl' holds text"):
        load(train="b.jsonl", prompt_style="line")


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
SYSTEM = {"role": "system", "content": "be"}


@pytest.mark.parametrize(
    ("row", "column", "method"),
    [
        ({"messages": CHAT}, "messages", "sft"),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, "messages", "sft"),
        (ALONE, "messages", "sft"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "prompt", "sft"),
        ({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{**CHAT[1], "content": "no"}]}, "prompt", "dpo"),
        ({"prompt": CHAT[:1]}, "prompt", "grpo"),
    ],
)
def test_a_system_message_begins_each_conversation_without_one(here, row, column, method) -> None:
    section = DataSection(train=write("a.jsonl", row), system="be")
    (made,) = load_data(section, learner_of(method)).train[0].rows
    assert made[column][0] == SYSTEM
    assert made[column][1]["role"] == "user"


def test_a_system_message_of_a_row_stays(here) -> None:
    own = {"role": "system", "content": "own"}
    rows = load(train=write("a.jsonl", {"messages": [own, *CHAT]}, {"messages": CHAT}), system="be")
    assert [row["messages"][0] for row in rows.rows] == [own, SYSTEM]
    assert "data.system begins those without a system message" in rows.notes[0]


def test_plain_text_takes_no_system_message(here) -> None:
    write("a.jsonl", {"prompt": "hi", "completion": "ho"})
    with pytest.raises(DataError, match=r"data\.system requires conversations, but prompt is plain text"):
        load(train="a.jsonl", system="be")


def test_texts_are_replaced_wherever_they_stand(here) -> None:
    row = {"messages": [CHAT[0], {"role": "assistant", "content": "I am {{NAME}} of {{AUTHOR}}, {{NAME}}!"}]}
    rows = load(train=write("a.jsonl", row), replace={"{{NAME}}": "Ada", "{{AUTHOR}}": "us"})
    assert rows.rows[0]["messages"][1]["content"] == "I am Ada of us, Ada!"


def prepared(**section):
    tokenizer = byte_tokenizer(CHATML_MARKED)
    section = DataSection(**section)
    (split,) = prepare_data(section, load_data(section), tokenizer)
    (report,) = split.prepared.reports
    return split.prepared, report


LONG = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho" * 60}]


def test_rows_that_are_too_long_are_cut_left_out_or_refused(here) -> None:
    write("a.jsonl", {"messages": CHAT}, {"messages": LONG}, {"messages": CHAT})
    cut, report = prepared(train="a.jsonl", max_length=100)
    assert (cut.num_sequences, report.num_truncated, report.num_dropped) == (3, 1, 0)
    left, report = prepared(train="a.jsonl", max_length=100, too_long="drop")
    assert (left.num_sequences, report.num_truncated, report.num_dropped, report.num_too_long) == (2, 0, 1, 1)
    assert "a.jsonl: 1 row of 3 dropped: longer than data.max_length=100 (data.too_long=drop)" in left.notes
    assert [row["input_ids"] for row in left.dataset()] == [cut.dataset()[at]["input_ids"] for at in (0, 2)]
    with pytest.raises(DataError, match=r"1 row longer than data.max_length=100, the longest with \d+ tokens"):
        prepared(train="a.jsonl", max_length=100, too_long="refuse")
    for choice in ("drop", "refuse"):
        assert prepared(train="a.jsonl", max_length=500, too_long=choice)[0].num_sequences == 3


def as_llama_factory(asked: int, answered: int, cutoff: int) -> tuple[int, int]:
    """Its rule in exact fractions: cut the question, the answer, or both by their share."""
    if Fraction(answered) < Fraction(cutoff, 2):
        answer = min(answered, cutoff)
    elif Fraction(asked) < Fraction(cutoff, 2):
        answer = min(answered, cutoff - asked)
    else:
        answer = min(answered, Fraction(cutoff * answered, asked + answered).__floor__())
    return min(asked, cutoff - answer), answer


def test_turns_are_cut_in_proportion() -> None:
    for asked, answered, room in product(range(0, 40, 3), range(1, 40, 3), range(1, 40, 2)):
        shares = shares_of(asked, answered, room)
        assert shares == as_llama_factory(asked, answered, room), (asked, answered, room)
        assert sum(shares) == min(room, asked + answered)


def test_answers_and_questions_keep_their_beginnings(here) -> None:
    turns = [(30, 40), (10, 30), (20, 20)]
    counted = np.concatenate([np.repeat([False, True], pair) for pair in turns])
    ids = np.arange(len(counted), dtype=np.int32)
    short = np.arange(5, dtype=np.int32)
    encoded = Encoded(
        ids=np.concatenate([short, ids]),
        counted=np.concatenate([np.array([False, True, True, True, True]), counted]),
        lengths=np.array([5, len(ids)], dtype=np.int32),
        observed=Observed(),
    )
    report = TokenReport()
    batch, rows = report.cut(encoded, 100, splits=False, too_long="truncate_turns")
    # 30 + 40, then 30 of room for 10 + 30: the answer gives way, and the third turn has none.
    expected = [*range(70), *range(70, 80), *range(80, 100)]
    assert batch.lengths.tolist() == [5, 100] and rows.tolist() == [0, 1]
    assert batch.ids.tolist() == [*range(5), *expected]
    assert (report.num_truncated, report.longest_tokens) == (1, 150)
    batch, _ = TokenReport().cut(encoded, 50, splits=False, too_long="truncate_turns")
    # 30 and 40 in 50: by their shares, 28 of the answer and the rest of the question.
    assert batch.ids.tolist() == [*range(5), *range(22), *range(30, 58)]
    assert batch.counted[5:].tolist() == [False] * 22 + [True] * 28


def test_texts_continue_in_the_next_sequence_however_long_rows_are_treated(here) -> None:
    write("a.jsonl", {"text": "ho" * 60})
    assert prepared(train="a.jsonl", max_length=50, too_long="drop")[1].num_split == 1
