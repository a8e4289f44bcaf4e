"""Answers that are compared, and prompts for rewards: rows worked by hand, and what is refused."""

import copy
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from trl import extract_prompt

from tunekit.data.formats.preferences import pair
from tunekit.data.formats.row_formats import BadRow
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection

WEATHER = {"type": "function", "function": {"name": "weather"}}


def user(said: str) -> dict:
    return {"role": "user", "content": said}


def bot(said: str, **more) -> dict:
    return {"role": "assistant", "content": said, **more}


ASK, GOOD, BAD = [user("sky?")], [bot("blue")], [bot("green")]
HH = "\n\nHuman: sky?\n\nAssistant:"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(*rows, **section):
    with open("rows.jsonl", "w") as file:  # noqa: PTH123
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return load_data(DataSection(train="rows.jsonl", **section))


def refusal(*rows, **section) -> str:
    with pytest.raises(DataError) as caught:
        load(*rows, **section)
    return str(caught.value)


def test_axolotls_pairs_have_their_prompt_in_messages_and_an_answer_in_one_message():
    data = load({"messages": ASK, "chosen": GOOD[0], "rejected": BAD[0]}, format="preference")
    assert list(data.train[0].rows) == [{"prompt": ASK, "chosen": GOOD, "rejected": BAD}]
    assert data.notes[0].endswith(": messages -> prompt")


def test_an_answer_may_be_one_message_after_a_prompt_of_a_column_that_is_named():
    row = {"conversation": ASK, "chosen": GOOD[0], "rejected": BAD[0]}
    data = load(row, columns={"prompt": "conversation"}, format="preference")
    assert list(data.train[0].rows) == [{"prompt": ASK, "chosen": GOOD, "rejected": BAD}]


@pytest.mark.parametrize(
    ("row", "made", "said"),
    [
        (
            {"prompt": "sky?", "chosen": "blue", "rejected": "green", "id": 1},
            {"prompt": "sky?", "chosen": "blue", "rejected": "green"},
            " (recognized from the columns chosen and rejected); ignored: id",
        ),
        (
            {"prompt": ASK, "chosen": GOOD, "rejected": BAD, "tools": [WEATHER]},
            {"prompt": ASK, "chosen": GOOD, "rejected": BAD, "tools": [WEATHER]},
            " (recognized from the columns chosen and rejected); also passed to the chat template: tools",
        ),
        (
            {"prompt": ASK, "chosen": ASK + GOOD, "rejected": ASK + BAD},
            {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
            " (recognized from the columns chosen and rejected)",
        ),
        (
            {"prompt": " sky?", "chosen": ASK + GOOD, "rejected": ASK + BAD},
            {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
            " (recognized from the columns chosen and rejected)",
        ),
        (
            {"chosen": ASK + GOOD, "rejected": ASK + BAD},
            {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
            ": common prefix of chosen and rejected -> prompt",
        ),
        (  # the first answer is the same, the second is not
            {"chosen": [*ASK, *GOOD, user("sea?"), bot("a")], "rejected": [*ASK, *GOOD, user("sea?"), bot("b")]},
            {"prompt": [*ASK, *GOOD, user("sea?")], "chosen": [bot("a")], "rejected": [bot("b")]},
            ": common prefix of chosen and rejected -> prompt",
        ),
        (  # the second question is not the same: the first answer is no part of the prompt
            {"chosen": [*ASK, *GOOD, user("sea?"), bot("a")], "rejected": [*ASK, *GOOD, user("sun?"), bot("a")]},
            {"prompt": ASK, "chosen": [*GOOD, user("sea?"), bot("a")], "rejected": [*GOOD, user("sun?"), bot("a")]},
            ": common prefix of chosen and rejected -> prompt",
        ),
        (  # one goes on where the other ends
            {"chosen": ASK + GOOD, "rejected": [*ASK, *GOOD, user("sea?"), bot("a")]},
            {"prompt": ASK, "chosen": GOOD, "rejected": [*GOOD, user("sea?"), bot("a")]},
            ": common prefix of chosen and rejected -> prompt",
        ),
        (
            {"chosen": HH + " It is blue.", "rejected": HH + " It is green."},
            {"prompt": HH, "chosen": " It is blue.", "rejected": " It is green."},
            ": common prefix of chosen and rejected -> prompt",
        ),
        (
            {
                "conversations": [{"from": "human", "value": "sky?"}],
                "chosen": {"from": "gpt", "value": "blue"},
                "rejected": {"from": "gpt", "value": "green"},
                "system": "Be brief.",
            },
            {"prompt": [{"role": "system", "content": "Be brief."}, *ASK], "chosen": GOOD, "rejected": BAD},
            ": conversations -> prompt (human -> user, gpt -> assistant), system -> system",
        ),
    ],
)
def test_pairs_become_a_prompt_and_two_answers(row, made, said):
    data = load(row)
    assert (data.train[0].format, data.train[0].read_as) == ("preference", "preference")
    assert list(data.train[0].rows) == [made]
    assert data.notes == [f"rows.jsonl: 1 row of preference{said}"]


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**PAIR, "rejected": "b"}, "chosen and rejected are identical"),
        (  # only the better answer repeats the prompt
            {
                "prompt": [{"role": "system", "content": "brief"}, *ASK],
                "chosen": [{"role": "system", "content": "brief"}, *ASK, *GOOD],
                "rejected": [*BAD, user("sea?"), bot("grey")],
            },
            "chosen must begin with an assistant message, got role system",
        ),
        ({**PAIR, "chosen": " "}, "chosen is empty"),
        ({**PAIR, "rejected": None}, "rejected must be a string, got null"),
        ({**PAIR, "prompt": ""}, "prompt is empty"),
        (
            {**PAIR, "chosen": GOOD},
            "prompt, chosen and rejected must all be strings or all be lists of messages, got a string, a list and "
            "a string",
        ),
        (
            {"prompt": "sky?", "chosen": GOOD, "rejected": BAD},
            "prompt, chosen and rejected must all be strings or all be lists of messages, got a string, a list and "
            "a list",
        ),
        (
            {"prompt": "sea?", "chosen": ASK + GOOD, "rejected": ASK + BAD},
            "prompt is a string, but chosen is a conversation with another first user message; make them equal, or "
            "make prompt, chosen and rejected all strings or all lists of messages",
        ),
        (
            {"prompt": ASK + GOOD, "chosen": GOOD, "rejected": BAD},
            "prompt ends with an assistant message; move that message to chosen and rejected",
        ),
        (
            {"prompt": ASK, "chosen": [user("x"), *GOOD], "rejected": BAD},
            "chosen must begin with an assistant message, got role user",
        ),
        ({"prompt": ASK, "chosen": [bot("")], "rejected": BAD}, "chosen: every assistant message is empty"),
        (
            {"prompt": ASK, "chosen": [*GOOD, user("x"), bot("y", weight=0)], "rejected": BAD},
            "chosen[2].weight is 0, but completions are compared as a whole; remove it",
        ),
        (
            {"chosen": ASK + GOOD, "rejected": [user("sea?"), *GOOD]},
            "chosen and rejected have no common prompt; without a column prompt, both must be complete "
            "conversations that begin with the same messages",
        ),
        (
            {"chosen": ASK + GOOD, "rejected": ASK + GOOD},
            "chosen and rejected are identical",
        ),
        (
            {"chosen": ASK + GOOD, "rejected": "b"},
            "chosen and rejected must both be strings or both be lists of messages, got a list and a string",
        ),
        (
            {"chosen": "The sky is blue.", "rejected": "The sky is green."},
            r"chosen and rejected are strings without a common prompt (\n\nHuman: ... \n\nAssistant:); set "
            "data.columns={prompt: ...} to the column of the prompt",
        ),
        (
            {"prompt": "a", "conversations": ASK, "chosen": GOOD[0], "rejected": BAD[0]},
            "columns prompt and conversations both hold the prompt; keep one of them",
        ),
        (
            {"conversations": ASK + GOOD, "chosen": GOOD[0], "rejected": BAD[0]},
            "conversations ends with an assistant message; move that message to chosen and rejected",
        ),
        (
            {"conversations": ASK, "chosen": {"from": "gtp", "value": "b"}, "rejected": BAD[0]},
            "chosen[0].from: unknown speaker 'gtp'; known: system, user, assistant, tool, human, gpt, chatgpt, "
            "bot, chatbot, model, function_call, observation",
        ),
        (
            {**PAIR, "system": "Be brief."},
            "column system is unsupported with a plain-text prompt; put it into the prompt, for example by a row "
            "function (data.format=module:function)",
        ),
        (
            {**PAIR, "tools": [WEATHER]},
            "tools are unsupported with a plain-text prompt; make the prompt a list of messages",
        ),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused(row, message):
    assert refusal(row) == f"rows.jsonl:1: {message}"


def test_prompts_of_two_kinds_are_refused():
    assert refusal(PAIR, {"prompt": ASK, "chosen": GOOD, "rejected": BAD}) == (
        "rows.jsonl:2: prompt is a list of messages, but a string in the first row"
    )


TURNS = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "tool"]),
    st.sampled_from(["a", "b", " "]),
)


@given(st.lists(TURNS, max_size=4), st.lists(TURNS, max_size=3), st.lists(TURNS, max_size=3))
def test_the_implicit_prompt_of_conversations_is_that_of_trl(begin, chosen, rejected):
    """Wherever TRL's ends before the assistant speaks; ours always does."""
    row = {"chosen": begin + chosen, "rejected": begin + rejected}
    assume(min(map(len, row.values())) > 0)  # TRL fails for an empty one
    theirs = extract_prompt(copy.deepcopy(row))
    prompt, answers = theirs["prompt"], (theirs["chosen"], theirs["rejected"])
    well_parted = (
        prompt != []
        and prompt[-1]["role"] != "assistant"
        and all(answer and answer[0]["role"] == "assistant" for answer in answers)
        and answers[0] != answers[1]
    )
    try:
        ours = pair(None, **row)
    except BadRow:
        silent = [
            not any(turn["role"] == "assistant" and turn["content"].strip() for turn in answer) for answer in answers
        ]
        assert not well_parted or any(silent)
        return
    assert ours["prompt"] + ours["chosen"] == row["chosen"]
    assert ours["prompt"] + ours["rejected"] == row["rejected"]
    assert ours["prompt"][-1]["role"] != "assistant"
    assert ours["chosen"][0]["role"] == ours["rejected"][0]["role"] == "assistant"
    assert len(ours["prompt"]) <= len(prompt)
    if well_parted:
        assert ours == theirs


WORDS = st.text(alphabet="ab \n:", max_size=8)


@given(WORDS, st.lists(st.tuples(WORDS, WORDS), max_size=2), WORDS, WORDS)
def test_the_implicit_prompt_of_texts_is_that_of_trl_where_the_answers_differ_at_once(asked, before, one, other):
    said = "".join(f"\n\nHuman: {question}\n\nAssistant: {answer}" for question, answer in before)
    prompt = f"{said}\n\nHuman: {asked}\n\nAssistant:"
    row = {"chosen": f"{prompt} a{one}", "rejected": f"{prompt} b{other}"}
    assert (
        pair(None, **row) == extract_prompt(row) == {"prompt": prompt, "chosen": f" a{one}", "rejected": f" b{other}"}
    )


def test_the_implicit_prompt_of_texts_takes_nothing_of_answers_that_begin_alike():
    assert pair(None, HH + " It is blue.", HH + " It was blue.")["chosen"] == " It is blue."
    longer = HH + " Blue.\n\nHuman: Why?\n\nAssistant: So."
    assert pair(None, HH + " Blue.", longer) == {
        "prompt": HH,
        "chosen": " Blue.",
        "rejected": " Blue.\n\nHuman: Why?\n\nAssistant: So.",
    }


def test_a_ranking_becomes_its_best_and_its_worst_answer():
    data = load(
        {"prompt": "sky?", "completions": ["grey", "blue", "green", "azure"], "scores": [0.5, 3, -1.5, 3]},
        {"prompt": "sea?", "completions": ["wet", "dry"], "scores": [1, 0], "tools": None},
    )
    assert (data.train[0].format, data.train[0].read_as) == ("preference", "ranking")
    assert list(data.train[0].rows) == [
        {"prompt": "sky?", "chosen": "blue", "rejected": "green"},
        {"prompt": "sea?", "chosen": "wet", "rejected": "dry"},
    ]
    assert data.notes == [
        "rows.jsonl: 2 rows of ranking: completion with the highest score -> chosen, with the lowest -> rejected "
        "(ties: the first)"
    ]
    chats = load({"prompt": ASK, "completions": [BAD, GOOD], "scores": [1, 2], "tools": [WEATHER]})
    assert chats.train[0].rows[0] == {"prompt": ASK, "chosen": GOOD, "rejected": BAD, "tools": [WEATHER]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scores": [1, 1]}, "every score is 1; no completion is better than another"),
        ({"scores": [1]}, "2 completions, but 1 score"),
        ({"scores": [1, "2"]}, "scores[1] must be a number, got a string"),
        ({"scores": [1, True]}, "scores[1] must be a number, got the boolean true"),
        ({"scores": [1, float("nan")]}, "scores[1] must be a number, got the number nan"),
        ({"scores": 3}, "scores must be a list, got the number 3"),
        ({"completions": "b"}, "completions must be a list, got a string"),
        ({"completions": ["b"], "scores": [1]}, "completions must hold at least two completions, got 1"),
        ({"completions": ["b", "b"]}, "chosen and rejected are identical"),
        ({"prompt": None}, "prompt must be a string or a list of messages, got null"),
    ],
)
def test_what_ranks_nothing_is_refused(changed, message):
    assert (
        refusal({"prompt": "a", "completions": ["b", "c"], "scores": [1, 2], **changed}) == f"rows.jsonl:1: {message}"
    )


@pytest.mark.parametrize(("label", "is_good"), [(True, True), (False, False), (1, True), (0, False)])
def test_a_rated_completion_keeps_its_label_as_a_boolean(label, is_good):
    data = load(
        {"prompt": "sky?", "completion": "blue", "label": label}, {"prompt": "a", "completion": "b", "label": 1}
    )
    assert data.train[0].rows[0] == {"prompt": "sky?", "completion": "blue", "label": is_good}
    assert type(data.train[0].rows[0]["label"]) is bool
    assert data.notes == [
        "rows.jsonl: 2 rows of unpaired_preference (recognized from the columns prompt, completion and label; "
        "data.format=prompt_completion ignores label)"
    ]
    chats = load({"prompt": ASK, "completion": GOOD, "label": label})
    assert chats.train[0].rows[0] == {"prompt": ASK, "completion": GOOD, "label": is_good}
    aside = load({"prompt": "sky?", "completion": "blue", "label": label}, format="prompt_completion")
    assert aside.notes == ["rows.jsonl: 1 row of prompt_completion; ignored: label"]


def test_a_csv_writes_labels_as_words(here):
    (here / "rated.csv").write_text("prompt,completion,label\na,b,true\na,c,false\n")
    assert [row["label"] for row in load_data(DataSection(train="rated.csv")).train[0].rows] == [True, False]


@pytest.mark.parametrize(
    ("label", "got"),
    [
        (2, "the number 2"),
        (1.0, "the number 1.0"),
        ("True", "the string 'True'"),
        (None, "null"),
    ],
)
def test_another_label_is_refused(label, got):
    assert refusal({"prompt": "a", "completion": "b", "label": label}) == (
        f"rows.jsonl:1: label must be true (good completion) or false (bad), got {got}; to ignore the column, set "
        "data.format=prompt_completion"
    )


def test_a_rated_completion_is_an_answer():
    rated = {"completion": ASK + GOOD, "label": True}
    assert refusal({"prompt": ASK, **rated}) == (
        "rows.jsonl:1: completion must begin with an assistant message, got role user"
    )
    assert refusal({"prompt": "a", **rated}) == (
        "rows.jsonl:1: prompt and completion must both be strings or both be lists of messages, got a string and a list"
    )


def test_prompts_keep_all_that_rewards_may_look_at():
    rows = [
        {"prompt": "1+1?", "answer": 2, "tests": [{"in": None, "out": "2"}], "hard": False},
        {"prompt": "1+2?", "answer": 3, "tests": None, "hint": "count"},
    ]
    data = load(*rows)
    assert data.train[0].format == "prompts"
    assert list(data.train[0].rows) == rows
    assert data.notes == [
        "rows.jsonl: 2 rows of prompts (recognized from the column prompt); passed to rewards: answer, tests, "
        "hard, hint"
    ]
    chats = load({"prompt": ASK, "solution": "blue", "tools": [WEATHER]})
    assert chats.train[0].rows[0] == {"prompt": ASK, "solution": "blue", "tools": [WEATHER]}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_prompts_keep_the_columns_of_a_table_too(here, suffix):
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"question": "1+1?", "answer": "2", "prompt": "not this"}
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), here / "rows.parquet")
    else:
        (here / "rows.csv").write_text("question,answer,prompt\n1+1?,2,not this\n")
    data = load_data(DataSection(train=f"rows.{suffix}", columns={"prompt": "question"}))
    assert list(data.train[0].rows) == [{"prompt": "1+1?", "answer": "2"}]
    assert data.notes == [
        f"rows.{suffix}: 1 row of prompts (recognized from the column question); passed to rewards: answer; "
        "data.columns: question -> prompt; ignored: prompt"
    ]


def test_what_is_no_prompt_is_refused(here):
    assert refusal({"prompt": ASK + GOOD}) == (
        "rows.jsonl:1: prompt ends with an assistant message; remove that message; the model generates it"
    )
    assert refusal({"prompt": []}) == "rows.jsonl:1: prompt is empty"
    assert refusal({"prompt": 3}) == "rows.jsonl:1: prompt must be a string, got the number 3"
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a"], "day": [datetime.date(2024, 1, 1)]}), here / "rows.parquet")
    with pytest.raises(DataError) as caught:
        load_data(DataSection(train="rows.parquet"))
    assert str(caught.value) == ("rows.parquet row 1: day holds a value that JSON cannot represent")


def test_the_columns_of_prompts_may_be_named_like_those_of_another_format():
    data = load({"prompt": "1+1?", "label": "2"}, format="prompts")
    assert list(data.train[0].rows) == [{"prompt": "1+1?", "label": "2"}]
