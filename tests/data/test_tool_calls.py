"""Calls of tools that a chat template does not write are not trained on as empty turns."""

import pytest

from tests.data.test_tokenize import learned, rows
from tests.data.tokenizers import CHATML, CHATML_MARKED, byte_tokenizer
from tunekit.data.reports.preview import answered_sequences
from tunekit.data.sources.load import LoadedData
from tunekit.data.tokenization.alignment import Room, measure_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection

WRITTEN = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}"
)
BY_ID = "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.id }}{% endfor %}"
ONLY_FIRST = "{{ m.content }}{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}{% endif %}"
ESCAPED = WRITTEN.replace("c.function.name", "c.function.name | urlencode")
LISTED = "{% if tools %}{{ tools | tojson }}{% endif %}"

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ASK = {"role": "user", "content": "hi"}
HO = {"role": "assistant", "content": "ho"}


def call(*names: str, said: str = "", **more: object) -> dict:
    calls = [{"id": f"{name}:0", "type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": said, "tool_calls": calls, **more}


def chatml(content: str, template: str = CHATML) -> str:
    return LISTED + template.replace("{{ m.content }}", content)


def refusal(place: str, turn: int, remedy: str = "or set weight: 0 on the message") -> str:
    return (
        f"{place}: messages[{turn}] calls add, but the chat template does not render tool calls; the model would "
        "be trained on the message without its call; set model.chat_template to a template that renders tool "
        f"calls, {remedy}"
    )


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["derived", "marked"])
@pytest.mark.parametrize("said", ["", "I add: add"])
def test_a_call_that_the_template_does_not_write_is_refused_in_whichever_row(template, said):
    good = {"messages": [ASK, HO]}
    bad = {"messages": [ASK, HO, ASK, call("add", said=said), {"role": "tool", "content": "2"}, HO], "tools": TOOLS}
    with pytest.raises(DataError) as caught:
        learned(byte_tokenizer(chatml("{{ m.content }}", template)), rows("messages", *[good] * 150, bad))
    assert str(caught.value) == refusal("data.jsonl:151", 3)


def test_one_of_two_calls_that_is_not_written_is_refused():
    with pytest.raises(DataError) as caught:
        learned(byte_tokenizer(chatml(ONLY_FIRST)), rows("messages", {"messages": [ASK, call("add", "add")]}))
    assert str(caught.value) == refusal("data.jsonl:1", 1)


def test_an_older_function_call_is_a_call():
    turn = {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": {}}}
    with pytest.raises(DataError) as caught:
        learned(byte_tokenizer(chatml(WRITTEN)), rows("messages", {"messages": [ASK, turn, ASK, HO]}))
    assert str(caught.value) == refusal("data.jsonl:1", 1)


@pytest.mark.parametrize("loss_on", ["all", "last"])
def test_calls_are_looked_for_wherever_turns_count(loss_on):
    tokenizer = byte_tokenizer(chatml("{{ m.content }}"))
    data = rows("messages", {"messages": [ASK, call("add")], "tools": TOOLS})
    with pytest.raises(DataError) as caught:
        learned(tokenizer, data, loss_on=loss_on)
    remedy = "or remove the row" if loss_on == "all" else "or set weight: 0 on the message"
    assert str(caught.value) == refusal("data.jsonl:1", 1, remedy)


@pytest.mark.parametrize(
    ("content", "loss_on"),
    [(WRITTEN, "assistant"), (WRITTEN, "all"), (BY_ID, "assistant"), (ESCAPED, "assistant"), (ESCAPED, "all")],
    ids=["by name", "by name in all", "by id", "escaped", "escaped in all"],
)
def test_a_call_that_is_written_in_any_way_is_learned(content, loss_on):
    names = ("añadir",) if content == ESCAPED else ("add", "add")
    data = rows("messages", {"messages": [ASK, call(*names, said="now add")], "tools": TOOLS})
    (shown,) = learned(byte_tokenizer(chatml(content)), data, loss_on=loss_on)
    assert "<call>" in shown.partition("assistant\n⟦" if loss_on == "assistant" else "⟦")[2]


@pytest.mark.parametrize("messages", [[ASK, call("add", weight=0), ASK, HO], [ASK, HO, ASK, HO]])
def test_a_call_that_is_not_learned_may_be_left_out(messages):
    learned(byte_tokenizer(chatml("{{ m.content }}")), rows("messages", {"messages": messages}))
    given = {"prompt": [ASK, call("add"), ASK], "completion": [HO]}
    learned(byte_tokenizer(chatml("{{ m.content }}")), rows("prompt_completion", given))
    learned(byte_tokenizer(chatml("{{ m.content }}")), rows("messages", {"messages": messages}), loss_on="last")


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("preference", {"prompt": [ASK], "chosen": [call("add")], "rejected": [HO]}),
        ("preference", {"prompt": [ASK], "chosen": [HO], "rejected": [call("add")]}),
        ("unpaired_preference", {"prompt": [ASK], "completion": [call("add")], "label": True}),
    ],
    ids=["chosen", "rejected", "rated"],
)
def test_answers_that_are_compared_keep_their_calls(format, row):
    data, room = rows(format, {**row, "tools": TOOLS}), Room(max_length=999, max_prompt_length=500)

    def measured(content: str) -> object:
        section = DataSection(train="data.jsonl")
        return measure_data(section, LoadedData((data,), (), []), byte_tokenizer(chatml(content)), room)

    measured(WRITTEN)
    expected = refusal("data.jsonl:1", 1, "or remove the row")
    with pytest.raises(DataError) as caught:
        measured("{{ m.content }}")
    assert str(caught.value) == expected
    with pytest.raises(DataError) as caught:
        answered_sequences(data, byte_tokenizer(chatml("{{ m.content }}")), room)(0)
    assert str(caught.value) == expected
