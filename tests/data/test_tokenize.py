"""Which tokens count in the loss. What is expected is written out by hand: [brackets] hold the text that counts."""

import os
import re
import signal
from pathlib import Path

import pytest
import trl.chat_template_utils

from tests.data.tokenised import tokenised
from tests.data.tokenizers import (
    CHATML,
    CHATML_MARKED,
    END_LEFT_OUT,
    FORGETFUL,
    NO_END,
    NO_SYSTEM,
    WITH_BOS,
    byte_tokenizer,
)
from tests.rows import check_row
from tunekit.data.sources.rows import Rows, RowStore
from tunekit.data.tokenization import tokenize as tokenizing
from tunekit.data.tokenization.encode import Encoder
from tunekit.errors import DataError
from tunekit.recipe.sections.data import Format

pytestmark = pytest.mark.usefixtures("both_ways")


def rows(format: Format, *given) -> Rows:
    checked = [check_row(row, format) for row in given]
    return Rows(format=format, rows=RowStore(checked), source="data.jsonl", numbers=range(1, len(given) + 1))


def chat(*turns: str) -> dict:
    """A row of messages: `u hi` is a user's turn."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return {"messages": [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]}


def learned(tokenizer, data: Rows, *, max_length: int = 1000, loss_on="assistant") -> list[str]:
    """The sequences as text, with ⟦ ⟧ around what counts in the loss."""
    made = tokenised(data, tokenizer, max_length=max_length, loss_on=loss_on)
    shown = []
    for row in made.sequences:
        assert len(row["input_ids"]) == len(row["labels"]) <= max_length
        text = ""
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            assert label in (token, -100)
            piece = tokenizer.decode([token])
            text += piece if label == -100 else f"⟦{piece}⟧"
        shown.append(re.sub("⟧⟦", "", text))
    return shown


TWO_TURNS = chat("s be", "u hi", "a ho", "u and", "a no more")
CHATML_TWO_TURNS = (
    "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ho<|im_end|>⟧\n"
    "<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n⟦no more<|im_end|>⟧\n"
)


@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML], ids=["marked", "derived"])
def test_the_assistant_and_its_end_of_turn_count_and_nothing_else(template):
    assert learned(byte_tokenizer(template), rows("messages", TWO_TURNS)) == [CHATML_TWO_TURNS]


@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML], ids=["marked", "derived"])
def test_a_row_may_end_with_the_user_and_turns_may_begin_with_white_space(template):
    row = chat("u hi", "a \n ho", "u bye")
    assert learned(byte_tokenizer(template), rows("messages", row)) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦\n ho<|im_end|>⟧\n<|im_start|>user\nbye<|im_end|>\n"
    ]


def test_characters_of_several_bytes_are_wholly_in_or_out_of_the_loss():
    tokenizer = byte_tokenizer(CHATML_MARKED)
    made = tokenised(rows("messages", chat("u é", "a 日")), tokenizer, max_length=99, loss_on="assistant")
    kept = [label for label in made.sequences[0]["labels"] if label != -100]
    assert tokenizer.decode(kept) == "日<|im_end|>"
    assert len(kept) == 4


def test_the_mask_is_that_of_transformers_where_the_template_marks_it():
    tokenizer = byte_tokenizer(CHATML_MARKED)
    made = tokenised(rows("messages", TWO_TURNS), tokenizer, max_length=999, loss_on="assistant").sequences[0]
    theirs = tokenizer.apply_chat_template(TWO_TURNS["messages"], return_dict=True, return_assistant_tokens_mask=True)
    assert made["input_ids"] == theirs["input_ids"]
    assert [label != -100 for label in made["labels"]] == [bool(m) for m in theirs["assistant_masks"]]


def test_loss_on_all_counts_every_token_of_a_conversation():
    row = chat("u hi", "a ho")
    for template in (CHATML_MARKED, CHATML, END_LEFT_OUT, FORGETFUL):
        text = learned(byte_tokenizer(template), rows("messages", row), loss_on="all")[0]
        first = re.match(r"<\|\w+\|>|.", text)[0]
        assert text[len(first)] == "⟦"
        assert text.index("⟧") == len(text) - 1


def test_a_template_that_writes_the_first_token_gets_no_second_one():
    tokenizer = byte_tokenizer(WITH_BOS, adds_bos=True)
    assert learned(tokenizer, rows("messages", chat("u hi", "a ho", "u x", "a y"))) == [
        "<|bos|>[hi]⟦ho<|im_end|>⟧[x]⟦y<|im_end|>⟧"
    ]
    assert learned(tokenizer, rows("messages", chat("u hi", "a ho")), loss_on="all") == ["<|bos|>⟦[hi]ho<|im_end|>⟧"]


@pytest.mark.parametrize("pad", ["<|im_end|>", "<|pad|>"])
def test_the_end_token_counts_even_where_it_is_the_padding_token(pad):
    data = rows("messages", chat("u hi", "a ho"))
    for template in (CHATML_MARKED, CHATML):
        assert learned(byte_tokenizer(template, pad=pad), data)[0].endswith("⟦ho<|im_end|>⟧\n")


def test_a_template_that_rewrites_earlier_turns_is_refused_for_the_rows_that_it_rewrites():
    tokenizer = byte_tokenizer(FORGETFUL)
    assert learned(tokenizer, rows("messages", chat("u hi", "a why#ho"))) == ["u:hi<|im_end|>a:⟦why#ho<|im_end|>⟧"]
    with pytest.raises(DataError) as caught:
        learned(tokenizer, rows("messages", chat("u hi", "a ho"), chat("u hi", "a why#ho", "u x", "a y")))
    assert str(caught.value) == (
        "data.jsonl:2: the chat template renders earlier turns differently once messages[1] or a later message "
        "follows, so the assistant's tokens cannot be located; set model.chat_template to a template with {% "
        "generation %} markers, or set data.loss_on=all or last"
    )
    assert learned(tokenizer, rows("messages", chat("u hi", "a why#ho", "u x", "a y")), loss_on="last") == [
        "u:hi<|im_end|>a:ho<|im_end|>u:x<|im_end|>a:⟦y<|im_end|>⟧"
    ]


TRL_TEMPLATES = Path(trl.chat_template_utils.__file__).with_name("chat_templates")


def family(name: str, *special: str):
    """A tokenizer with the chat template of a family of models, and special tokens of it."""
    tokenizer = byte_tokenizer((TRL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def test_a_well_known_template_that_rewrites_earlier_turns_is_trained_through_trl_s_version_of_it():
    tokenizer = family("qwen3")
    made = tokenised(
        rows("messages", chat("u hi", "a ho", "u x", "a y")), tokenizer, max_length=999, loss_on="assistant"
    )
    assert learned(tokenizer, rows("messages", chat("u hi", "a ho", "u x", "a y"))) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nho<|im_end|>\n⟧"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\ny<|im_end|>\n⟧"
    ]
    assert made.report.notes == (
        "the chat template has no {% generation %} markers; TRL's training version of it is used to mask the loss, "
        "the model keeps its own",
    )
    assert "generation %}" not in tokenizer.chat_template


@pytest.mark.parametrize(
    ("name", "special", "ends"),
    [
        ("llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
        ("qwen2_5", (), "<|im_end|>"),
        ("gemma", ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
        (
            "cohere2",
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
            "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        ),
        ("phi3", ("<|end|>",), "<|end|>"),
        ("deepseekv3", ("<｜end▁of▁sentence｜>",), "<｜end▁of▁sentence｜>"),
    ],
)
def test_the_templates_of_well_known_models_teach_both_answers_and_their_ends(name, special, ends):
    data = rows("messages", chat("u QUESTION", "a ho", "u ANOTHER", "a no more"))
    [shown] = learned(family(name, *special), data, max_length=5000)
    counted = "".join(re.findall("⟦(.*?)⟧", shown, flags=re.DOTALL))
    assert f"ho{ends}" in counted
    assert f"no more{ends}" in counted
    assert "QUESTION" not in counted
    assert "ANOTHER" not in counted


def test_markers_that_leave_out_the_end_token_are_refused():
    with pytest.raises(DataError) as caught:
        learned(byte_tokenizer(END_LEFT_OUT), rows("messages", chat("u hi", "a ho", "u x")))
    assert str(caught.value) == (
        "the chat template's {% generation %} block excludes '<|im_end|>', the end of an assistant turn; the model "
        "would not learn to stop; move {% endgeneration %} after '<|im_end|>' (model.chat_template), or set "
        "data.loss_on=all"
    )


def test_a_template_without_an_end_token_is_trained_with_a_note():
    tokenizer = byte_tokenizer(NO_END)
    data = rows("messages", chat("u hi", "a ho"))
    assert learned(tokenizer, data) == ["user: hi\nassistant: ⟦ho\n⟧"]
    assert tokenised(data, tokenizer, max_length=99, loss_on="assistant").report.notes == (
        "the chat template ends assistant turns without a special token; the model learns no end-of-turn token",
    )


def test_markers_that_mark_nothing_leave_nothing_to_train():
    template = CHATML + "{% generation %}{% endgeneration %}"
    with pytest.raises(DataError) as caught:
        learned(byte_tokenizer(template), rows("messages", chat("u hi", "a ho")))
    assert str(caught.value) == (
        "data.jsonl: zero trainable tokens in 1 row: the chat template marks no assistant tokens; put {% "
        "generation %} around the assistant's content (model.chat_template), or set data.loss_on=all"
    )


def test_a_tokenizer_without_chat_template_takes_no_messages():
    with pytest.raises(DataError) as caught:
        learned(byte_tokenizer(None), rows("messages", chat("u hi", "a ho")))
    assert str(caught.value) == (
        "the tokenizer has no chat template to render messages; set model.chat_template to one that its tokens fit, "
        "such as chatml, qwen2_5, qwen3, qwen3_instruct_2507, qwen3_5_think, set it to a Jinja file, use a chat model, "
        "or use rows of prompt and completion"
    )


def test_what_the_template_refuses_is_told_with_the_row():
    data = rows("messages", chat("u hi", "a ho"), chat("s be", "u hi", "a ho"))
    for loss_on in ("assistant", "all"):
        with pytest.raises(DataError) as caught:
            learned(byte_tokenizer(NO_SYSTEM), data, loss_on=loss_on)
        assert str(caught.value) == (
            "data.jsonl:2: the chat template rejects the row: System role not supported; change the row or "
            "model.chat_template"
        )


def test_a_template_that_is_no_jinja_is_told_with_its_line():
    with pytest.raises(DataError, match=r"^chat template syntax error in line 2: "):
        learned(byte_tokenizer("\n{% for %}"), rows("messages", chat("u hi", "a ho")))


def test_an_assistant_that_speaks_first_needs_markers():
    data = rows("messages", chat("a ho", "u hi", "a yes"))
    assert learned(byte_tokenizer(CHATML_MARKED), data) == [
        "<|im_start|>assistant\n⟦ho<|im_end|>⟧\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    ]
    with pytest.raises(DataError, match=r"^data\.jsonl:1: the row begins with an assistant turn"):
        learned(byte_tokenizer(CHATML), data)


@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML], ids=["marked", "derived"])
def test_a_prompt_of_messages_is_given_even_where_the_assistant_speaks_in_it(template):
    row = {"prompt": chat("u hi", "a ho", "u and")["messages"], "completion": chat("a no", "u x", "a y")["messages"]}
    assert learned(byte_tokenizer(template), rows("prompt_completion", row)) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\nand<|im_end|>\n"
        "<|im_start|>assistant\n⟦no<|im_end|>⟧\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n⟦y<|im_end|>⟧\n"
    ]


PAIR = {"prompt": "2+2=", "completion": "4"}


def test_a_completion_is_plain_text_with_one_end_token():
    assert learned(byte_tokenizer(), rows("prompt_completion", PAIR)) == ["2+2=⟦4<|im_end|>⟧"]
    spelt = {"prompt": "2+2=", "completion": "4<|im_end|>"}
    assert learned(byte_tokenizer(), rows("prompt_completion", spelt)) == ["2+2=⟦4<|im_end|>⟧"]
    assert learned(byte_tokenizer(adds_bos=True, adds_eos=True), rows("prompt_completion", PAIR)) == [
        "<|bos|>2+2=⟦4<|im_end|>⟧"
    ]
    assert learned(byte_tokenizer(), rows("prompt_completion", PAIR), loss_on="all") == ["2⟦+2=4<|im_end|>⟧"]


def test_a_chat_model_is_told_that_its_template_is_not_applied():
    made = tokenised(rows("prompt_completion", PAIR), byte_tokenizer(CHATML), max_length=99, loss_on="assistant")
    assert made.report.notes == (
        "data.jsonl: prompt and completion concatenated as plain text, without the chat template; for a chat "
        "model, use rows of messages",
    )


def test_a_token_across_the_boundary_counts_and_is_reported():
    tokenizer = byte_tokenizer(merges=(("a", "b"),))
    data = rows("prompt_completion", {"prompt": "so a", "completion": "b."}, {"prompt": "so a", "completion": "!"})
    assert learned(tokenizer, data) == ["so ⟦ab.<|im_end|>⟧", "so a⟦!<|im_end|>⟧"]
    assert tokenised(data, tokenizer, max_length=99, loss_on="assistant").report.notes[1] == (
        "data.jsonl: in 1 row one token spans the end of the prompt and the start of the completion and is "
        "included in the loss; end prompts with a line break or a period"
    )


def test_a_token_across_the_start_of_an_answer_counts_and_one_across_no_boundary_is_not_parted():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    tokenizer = byte_tokenizer(template, merges=(("t", "h"), ("r", "h")))
    assert learned(tokenizer, rows("messages", chat("u hé", "a ho, the"))) == [
        "<|im_start|>userh\ufffd\ufffd<|im_end|><|im_start|>assistan⟦tho, the<|im_end|>⟧"
    ]


def test_a_tokenizer_without_end_token_takes_no_plain_text():
    for data in (rows("prompt_completion", PAIR), rows("text", {"text": "abc"})):
        with pytest.raises(DataError) as caught:
            learned(byte_tokenizer(eos=None), data)
        assert str(caught.value) == (
            "the tokenizer has no end-of-sequence token, needed to learn where a text ends; set eos_token in the "
            "model's tokenizer_config.json"
        )


def test_plain_text_counts_wholly_and_ends_once():
    assert learned(byte_tokenizer(adds_bos=True), rows("text", {"text": "abc"}, {"text": "<|bos|>d<|im_end|>"})) == [
        "<|bos|>⟦abc<|im_end|>⟧",
        "<|bos|>⟦d<|im_end|>⟧",
    ]


def test_a_long_text_goes_on_in_the_next_sequence_and_every_token_is_predicted_once():
    text = "abcdefghij"
    for max_length in range(8, 12):
        tokenizer = byte_tokenizer()
        made = tokenised(rows("text", {"text": text}), tokenizer, max_length=max_length, loss_on="assistant")
        assert {row["labels"][0] for row in made.sequences} == {-100}
        predicted = "".join(tokenizer.decode(row["labels"][1:]) for row in made.sequences)
        assert predicted == "bcdefghij<|im_end|>"
        assert made.report.num_trainable_tokens == len(text)
        assert made.report.num_split == (max_length < 11)
    assert learned(byte_tokenizer(), rows("text", {"text": text}), max_length=8) == ["a⟦bcdefgh⟧", "h⟦ij<|im_end|>⟧"]


def test_rows_are_cut_at_the_end_and_counted():
    short, long = chat("u h", "a o"), chat("u h", "a ooooooooooooooooooo")
    # <|im_start|>user\nh<|im_end|>\n<|im_start|>assistant\n is 1+5+1+1+1 + 1+10 = 20 tokens.
    made = tokenised(rows("messages", short, long), byte_tokenizer(CHATML), max_length=23, loss_on="assistant")
    report = made.report
    assert (report.num_rows, report.num_sequences, report.num_truncated, report.num_dropped) == (2, 2, 1, 0)
    assert (report.num_tokens, report.num_trainable_tokens, report.longest_tokens) == (23 + 23, 2 + 3, 41)
    assert learned(byte_tokenizer(CHATML), rows("messages", long), max_length=23)[0].endswith("assistant\n⟦ooo⟧")


@pytest.mark.parametrize(("max_length", "num_trainable"), [(20, 0), (21, 1), (22, 2), (23, 2)])
def test_a_row_whose_answer_is_cut_away_is_dropped(max_length, num_trainable):
    data = rows("messages", chat("u h", "a o"), chat("u ", "a o"))  # 20 and 19 tokens before the answer
    report = tokenised(data, byte_tokenizer(CHATML), max_length=max_length, loss_on="assistant").report
    assert report.num_dropped == (num_trainable == 0)
    assert report.num_trainable_tokens == num_trainable + min(max_length - 19, 2)


def test_zero_trainable_tokens_is_an_error_that_says_what_to_raise():
    with pytest.raises(DataError) as caught:
        learned(byte_tokenizer(CHATML), rows("messages", *[chat("u h", "a o")] * 1200), max_length=20)
    assert str(caught.value) == (
        "data.jsonl: zero trainable tokens in 1,200 rows: all tokens in the loss lie beyond data.max_length=20 "
        "(longest row: 23 tokens); raise data.max_length"
    )


def test_more_rows_than_a_batch_keep_their_order():
    data = rows("text", *({"text": f"{i}."} for i in range(1100)))
    made = tokenised(data, byte_tokenizer(), max_length=16, loss_on="assistant")
    assert len(made.sequences) == 1100
    for i in (0, 499, 500, 1099):
        assert byte_tokenizer().decode(made.sequences[i]["input_ids"]) == f"{i}.<|im_end|>"


def test_token_ids_are_taken_as_they_are_and_cut_like_a_conversation():
    tokenizer = byte_tokenizer()
    ids = tokenizer("so be it")["input_ids"]
    given = rows("tokens", {"input_ids": ids, "labels": [-100] * 3 + ids[3:]}, {"input_ids": ids})
    assert learned(tokenizer, given) == ["so ⟦be it⟧", "s⟦o be it⟧"]
    assert learned(tokenizer, given, loss_on="all") == ["s⟦o be it⟧"] * 2
    assert learned(tokenizer, given, max_length=4) == ["so ⟦b⟧", "s⟦o b⟧"]
    assert tokenised(given, tokenizer, max_length=4).report.num_truncated == 2


def test_a_token_id_that_the_tokenizer_does_not_know_is_refused_with_its_place():
    tokenizer = byte_tokenizer()
    given = rows("tokens", {"input_ids": [1, 2]}, {"input_ids": [1, 2**40]})
    with pytest.raises(DataError) as caught:
        learned(tokenizer, given)
    assert str(caught.value) == (
        "data.jsonl:2: input_ids contain 1099511627776, but the tokenizer has 260 tokens; tokenize the rows with "
        "the tokenizer of the model"
    )


@pytest.fixture
def in_processes(monkeypatch):
    monkeypatch.setattr(tokenizing, "FEW_ROWS", 0)
    monkeypatch.setattr(tokenizing, "BATCH_ROWS", 3)


MANY = [chat(f"u say {i}", f"a {'x' * i} {i}", "u and", f"a {i}!") for i in range(40)]


def test_processes_make_the_same_sequences_in_the_same_order(in_processes, monkeypatch):
    shared = tokenised(rows("messages", *MANY), byte_tokenizer(CHATML), max_length=85)
    monkeypatch.setattr(tokenizing, "FEW_ROWS", 1000)
    alone = tokenised(rows("messages", *MANY), byte_tokenizer(CHATML), max_length=85)
    assert shared.report == alone.report
    assert shared.report.num_truncated
    assert list(shared.sequences) == list(alone.sequences)


def test_a_row_that_is_refused_in_a_process_is_named(in_processes):
    given = [*MANY, chat("s be", "u hi", "a ho")]
    with pytest.raises(DataError, match=r"^data\.jsonl:41: the chat template rejects the row: System role not"):
        tokenised(rows("messages", *given), byte_tokenizer(NO_SYSTEM), max_length=99)


def test_progress_is_told_up_to_the_last_row(in_processes, tmp_path):
    told = []
    data = rows("messages", *MANY)
    tokenizing.tokenize(
        data,
        byte_tokenizer(CHATML),
        tmp_path,
        max_length=99,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told[0] == (3, 40)
    assert told[-1] == (40, 40)
    assert told == sorted(told)


def test_a_process_that_is_killed_is_an_error_and_not_a_hang(in_processes, monkeypatch):
    monkeypatch.setattr(Encoder, "encode", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match=r"^a data preparation worker was killed"):
        tokenised(rows("messages", *MANY), byte_tokenizer(CHATML), max_length=99)
