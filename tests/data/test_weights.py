"""OpenAI's weights: turns that are read and not learned. What counts is written out by hand in ⟦brackets⟧."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.data.test_tokenize import chat, learned, rows
from tests.data.tokenizers import CHATML, CHATML_MARKED, byte_tokenizer
from tests.rows import check_row
from tunekit.data.formats.convert import Findings
from tunekit.data.formats.row_formats import BadRow
from tunekit.data.sources.load import LoadedData, load_data
from tunekit.data.sources.reader import convert_row
from tunekit.data.tokenization.render import ChatRenderer
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection

SHOWS_WEIGHTS = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.weight }}")
CALLS_MARKED = CHATML_MARKED.replace(
    "{% generation %}", "{% generation %}{{ m.role }}{% endgeneration %}{% generation %}"
)


def weighted(*turns: str) -> dict:
    """A row of messages: `a0 hi` is an assistant's turn of weight 0, `a hi` one without a weight."""
    row = chat(*(turn[0] + turn.lstrip("sua01") for turn in turns))
    for message, turn in zip(row["messages"], turns, strict=True):
        if turn[1] != " ":
            message["weight"] = int(turn[1])
    return row


@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML, SHOWS_WEIGHTS], ids=["marked", "derived", "blind"])
def test_a_turn_of_weight_0_is_read_and_not_learned(template):
    data = rows("messages", weighted("u hi", "a0 ho", "u x", "a1 yes", "u y", "a no"), weighted("u hi", "a ho"))
    assert learned(byte_tokenizer(template), data) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
        "<|im_start|>assistant\n⟦yes<|im_end|>⟧\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ho<|im_end|>⟧\n",
    ]


@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML], ids=["marked", "derived"])
def test_only_turns_of_a_long_row_that_have_no_weight_0_count(template):
    turns = [turn for i in range(8) for turn in (f"u q{i}", f"a{0 if i % 3 == 0 else 1} r{i}")]
    messages = check_row(weighted(*turns), "messages")["messages"]
    rendered = ChatRenderer(byte_tokenizer(template)).render(messages, "a row")
    said = [rendered.text[start:end] for start, end in rendered.spans]
    assert said == [f"r{i}<|im_end|>" for i in (1, 2, 4, 5, 7)]


@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML], ids=["marked", "derived"])
def test_the_turns_of_a_completion_have_weights_and_those_of_a_prompt_never_count(template):
    row = {
        "prompt": weighted("u hi", "a1 ho", "u and")["messages"],
        "completion": weighted("a0 no", "u x", "a y")["messages"],
    }
    assert learned(byte_tokenizer(template), rows("prompt_completion", row)) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\nand<|im_end|>\n"
        "<|im_start|>assistant\nno<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n⟦y<|im_end|>⟧\n"
    ]


def test_with_loss_on_last_the_last_turn_must_count():
    data = rows("messages", weighted("u hi", "a ho"), weighted("u hi", "a0 ho", "u x", "a1 yes"))
    assert learned(byte_tokenizer(CHATML), data, loss_on="last")[1].endswith("assistant\n⟦yes<|im_end|>⟧\n")
    data = rows("messages", weighted("u hi", "a ho"), weighted("u hi", "a ho", "u x", "a0 yes", "u bye"))
    with pytest.raises(DataError) as caught:
        learned(byte_tokenizer(CHATML), data, loss_on="last")
    assert str(caught.value) == (
        "data.jsonl:2: messages[3] has weight 0, but data.loss_on=last includes no other turn; set "
        "data.loss_on=assistant, or remove the row"
    )


def test_with_loss_on_all_no_turn_may_have_weight_0():
    data = rows("messages", weighted("u hi", "a1 ho"))
    assert learned(byte_tokenizer(SHOWS_WEIGHTS), data, loss_on="all")[0].endswith("assistant\nho<|im_end|>\n⟧")
    with pytest.raises(DataError) as caught:
        learned(byte_tokenizer(CHATML), rows("messages", weighted("u hi", "a0 ho", "u x", "a y")), loss_on="all")
    assert str(caught.value) == (
        "data.jsonl:1: messages[1] has weight 0, but data.loss_on=all includes every token in the loss; set "
        "data.loss_on=assistant, or remove the weights from the rows"
    )


def test_markers_that_are_more_than_the_turns_cannot_be_weighed():
    tokenizer = byte_tokenizer(CALLS_MARKED)
    assert learned(tokenizer, rows("messages", weighted("u hi", "a1 ho"))) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦assistantho<|im_end|>⟧\n"
    ]
    data = rows("messages", weighted("u hi", "a ho"), weighted("u hi", "a0 ho", "u x", "a y"))
    with pytest.raises(DataError) as caught:
        learned(tokenizer, data)
    assert str(caught.value) == (
        "data.jsonl:2: the chat template marks 4 spans for 2 assistant turns, so turns with weight 0 cannot be "
        "located; remove the weights from the row, or set another model.chat_template"
    )


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"role": "user", "content": "x", "weight": 1},
            "messages[1].weight: only assistant messages may have a weight, got role user",
        ),
        (
            {"role": "assistant", "content": "x", "weight": 0.5},
            "messages[1].weight must be 0 (excluded from the loss) or 1 (included), got the number 0.5",
        ),
        (
            {"role": "assistant", "content": "x", "weight": True},
            "messages[1].weight must be 0 (excluded from the loss) or 1 (included), got the boolean true",
        ),
        (
            {"role": "assistant", "content": "x", "weight": 0},
            "messages: every non-empty assistant message has weight 0; no token is included in the loss",
        ),
    ],
)
def test_another_weight_is_refused(turn, message):
    with pytest.raises(BadRow) as caught:
        check_row({"messages": [{"role": "user", "content": "hi"}, turn]}, "messages")
    assert str(caught.value) == message


def test_what_weights_leave_out_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(json.dumps(weighted("u hi", "a0 ho", "u x", "a1 y")))
    data = load_data(DataSection(train="chats.jsonl"))
    assert [message.get("weight") for message in data.train[0].rows[0]["messages"]] == [None, 0, None, 1]
    assert data.notes == [
        "chats.jsonl: 1 row of messages (recognized from the column messages); "
        "1 assistant message with weight 0 excluded from the loss"
    ]


def marked(mark: str, *said: object) -> dict:
    """A row of questions and answers, the n-th answer with the n-th value of a mark."""
    turns = [turn for i in range(len(said)) for turn in (f"u q{i}", f"a r{i}")]
    row = chat(*turns)
    for message, value in zip(row["messages"][1::2], said, strict=True):
        message[mark] = value
    return row


@pytest.mark.parametrize("mark", ["train", "training", "loss"])
@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML, SHOWS_WEIGHTS], ids=["marked", "derived", "blind"])
def test_a_turn_that_another_tool_marks_as_not_trained_is_read_and_not_learned(mark, template):
    assert learned(byte_tokenizer(template), rows("messages", marked(mark, False, True, None))) == [
        "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\nr0<|im_end|>\n"
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n⟦r1<|im_end|>⟧\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n⟦r2<|im_end|>⟧\n"
    ]


def test_marks_of_sharegpt_and_of_completions_are_read_as_well():
    shared = {
        "conversations": [
            {"from": "human", "value": "hi", "train": False},
            {"from": "gpt", "value": "no", "train": False},
            {"from": "human", "value": "so", "train": False},
            {"from": "gpt", "value": "yes", "train": True},
        ]
    }
    assert [message.get("weight") for message in convert_row(shared, "sharegpt", Findings())["messages"]] == [
        None, 0, None, None
    ]  # fmt: skip
    row = {"prompt": chat("u hi")["messages"], "completion": marked("loss", False, True)["messages"][1:]}
    assert [message.get("weight") for message in check_row(row, "prompt_completion")["completion"]] == [0, None, None]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"role": "user", "train": True},
            "messages[1].train is true, but only assistant messages are included in the loss, got role user; remove it",
        ),
        ({"train": 0.5}, "messages[1].train must be true (included in the loss) or false, got the number 0.5"),
        ({"loss": "false"}, "messages[1].loss must be true (included in the loss) or false, got a string"),
        ({"weight": 1, "train": False}, "messages[1]: weight is 1, but train is false; keep one of them"),
        (
            {"train": False},
            "messages: every non-empty assistant message has weight 0; no token is included in the loss",
        ),
        *(
            (
                {key: value},
                f"messages[1].{key} looks like a loss weight, but is not read; set weight: 0 on assistant messages "
                "to exclude from the loss, or remove the key",
            )
            for key, value in {
                "loss_scale": 0.0,
                "train_on_turn": False,
                "trainOnTurn": False,
                "masked": True,
                "Weight": "0",
                "loss_mask": [0, 1],
                "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}],
            }.items()
        ),
    ],
)
def test_a_mark_that_cannot_be_honoured_is_refused(turn, message):
    turn = {"role": "assistant", "content": "x", **turn}
    with pytest.raises(BadRow) as caught:
        check_row({"messages": [{"role": "user", "content": "hi"}, turn]}, "messages")
    assert str(caught.value) == message


def test_keys_that_only_sound_alike_stay_the_templates_to_read():
    turn = {"role": "assistant", "content": "x", "trainer": "me", "loss": None, "training_set": "wiki", "glossary": [1]}
    kept = check_row({"messages": [{"role": "user", "content": "hi"}, turn]}, "messages")["messages"][1]
    assert kept == {key: value for key, value in turn.items() if key != "loss"}


@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}])
@pytest.mark.parametrize("prompt", [{"prompt": [{"role": "user", "content": "hi"}]}, {}], ids=["a prompt", "none"])
def test_answers_that_are_compared_have_no_marks(mark, prompt):
    asked = [] if prompt else [{"role": "user", "content": "hi"}]
    answers = [[*asked, {"role": "assistant", "content": said}] for said in ("yes", "no")]
    answers[0][-1].update(mark)
    answers[0].append({"role": "assistant", "content": "and"})
    ((name, value),) = mark.items()
    with pytest.raises(BadRow) as caught:
        check_row(prompt | {"chosen": answers[0], "rejected": answers[1]}, "preference")
    assert str(caught.value) == (
        f"chosen[0].{name} is {str(value).lower()}, but completions are compared as a whole; remove it"
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_column_that_masks_tokens_or_turns_is_refused_and_a_number_left_aside(suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(**row: object) -> LoadedData:
        if suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist([row]), f"rows{suffix}")
        else:
            Path(f"rows{suffix}").write_text(json.dumps(row))
        return load_data(DataSection(train=f"rows{suffix}"))

    for row in ({"input_ids": [1, 2]}, chat("u hi", "a ho")):
        with pytest.raises(DataError) as caught:
            load(**row, loss_mask=[0, 1])
        assert "column loss_mask looks like a loss mask, but is not read; " in str(caught.value)
    assert load(**chat("u hi", "a ho"), weight=0.5).notes[0].endswith("; ignored: weight")
