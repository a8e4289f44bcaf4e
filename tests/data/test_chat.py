"""Which characters of a conversation are the assistant's, and what it costs to find them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_families import FAMILIES, TOOL
from tests.data.test_tokenize import chat, learned, rows
from tests.data.tokenised import tokenised
from tests.data.tokenizers import CHATML, CHATML_MARKED, byte_tokenizer
from tunekit.data.formats.row_formats import Row
from tunekit.data.tokenization.render import ChatRenderer, Rendered
from tunekit.errors import DataError

pytestmark = pytest.mark.usefixtures("both_ways")

NUMBERED = (  # the number of a turn depends on all that came before, so no turn can be rendered alone
    "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ messages | length + 1 }} assistant: {% endif %}"
)
LAST_IN_FULL = (  # writes earlier answers by their first letter, so the beginnings are not those of the whole
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if m.role == 'user' or loop.last else m.content[0] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT_ONCE_LONG = (  # the same in a template with markers, once there are four messages
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content if messages | length < 4 else m.content[0] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Counting(ChatRenderer):
    """Notes how long each rendering was."""

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.lengths: list[int] = []

    def text(self, messages, place, **how) -> str:
        rendered = super().text(messages, place, **how)
        self.lengths.append(len(rendered))
        return rendered


def said(rendered: Rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.spans]


def long_chat(num_turns: int) -> list[Row]:
    return [
        {"role": "system", "content": "be"},
        *(
            {"role": role, "content": f"{role[0]}{i} {'x' * (i % 7)}"}
            for i in range(num_turns)
            for role in ("user", "assistant")
        ),
    ]


def agent(num_calls: int, *, most_results: int) -> list[Row]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    steps: list[Row] = []
    for i in range(num_calls):
        steps.append({"role": "assistant", "content": f"step {i}", "tool_calls": [call]})
        steps += [{"role": "tool", "content": f"{i}"}] * (1 + i % most_results)
    return [{"role": "user", "content": "go"}, *steps, {"role": "assistant", "content": "done"}]


def by_prefixes(renderer: ChatRenderer, messages: list[Row], *, tools: list[Row] | None = None) -> Rendered:
    """The ranges from the rendering of everything up to each turn, as far as the end-of-turn token."""
    text = renderer.text(messages, "", tools=tools)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = renderer.text(messages[:i], "", tools=tools, add_generation_prompt=True)
            answered = renderer.text(messages[: i + 1], "", tools=tools)
            assert text.startswith(answered)
            assert answered.startswith(asked)
            spans.append((len(asked), len(answered.rstrip())))
    return Rendered(text, tuple(spans))


UNMARKED = (
    "Llama 3",
    "Llama 3.1",
    "Qwen 2.5",
    "Gemma 3",
    "Mistral",
    "Phi-4",
    "ChatML",
    "Zephyr",
    "Command R",
    "Granite 3",
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*UNMARKED, "Llama 2", "Tulu 3"])
def test_two_hundred_turns_are_found_in_renderings_as_long_as_a_few_conversations(name):
    renderer = Counting(FAMILIES[name].tokenizer())
    messages = long_chat(200)
    rendered = renderer.render(messages, "a row")
    assert max(renderer.lengths[1:]) < 400
    assert len(renderer.lengths) <= 2 * 200 + 2
    assert sum(renderer.lengths) < 8 * len(rendered.text)
    assert rendered == by_prefixes(renderer, messages)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Llama 3.1", "Qwen 2.5", "Mistral"])
def test_two_hundred_calls_of_tools_after_one_question_cost_no_more(name):
    renderer = Counting(FAMILIES[name].tokenizer())
    messages = agent(200, most_results=2)
    rendered = renderer.render(messages, "a row", tools=[TOOL])
    assert len(renderer.lengths) <= 3 * 201 + 2
    assert sum(renderer.lengths) < 12 * len(rendered.text)
    assert rendered == by_prefixes(renderer, messages, tools=[TOOL])


@st.composite
def conversations(draw) -> list[Row]:
    texts = st.text(alphabet="ab<>|{}\n é日", max_size=6)
    turns = draw(st.lists(st.lists(st.sampled_from(["user", "assistant", "system", "tool"]), max_size=3), max_size=5))
    roles = ["user", *(role for turn in turns for role in turn), "assistant"]
    return [{"role": role, "content": draw(texts)} for role in roles]


@given(conversations())
@settings(max_examples=200)
def test_roles_in_any_order_give_the_turns_that_markers_give(messages):
    derived = ChatRenderer(byte_tokenizer(CHATML)).render(messages, "a row")
    assert derived == ChatRenderer(byte_tokenizer(CHATML_MARKED)).render(messages, "a row")


def test_pieces_that_do_not_make_up_the_whole_are_not_believed():
    renderer = ChatRenderer(byte_tokenizer(NUMBERED))
    messages = long_chat(5)
    rendered = renderer.render(messages, "a row")
    assert rendered == by_prefixes(renderer, messages)
    assert said(rendered)[3:] == ["a3 xxx<|im_end|>", "a4 xxxx<|im_end|>"]
    assert "9 assistant: a3" in rendered.text


def test_what_only_the_whole_conversation_ends_with_is_no_piece_and_not_lost():
    renderer = ChatRenderer(
        byte_tokenizer(CHATML.replace("{% if", "{% if messages | length > 6 %}<|pad|>{% endif %}{% if"))
    )
    rendered = renderer.render(long_chat(3), "a row")
    assert said(rendered) == ["a0 <|im_end|>", "a1 x<|im_end|>", "a2 xx<|im_end|>\n<|pad|>"]


def test_a_template_that_refuses_a_part_of_a_conversation_is_given_all_of_it():
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    renderer = ChatRenderer(byte_tokenizer(template))
    assert renderer.render(long_chat(5), "a row") == by_prefixes(renderer, long_chat(5))


def test_a_result_is_rendered_behind_the_call_that_it_answers():
    template = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'tool' %}{{ before.tool_calls[0].function.name }}: {% endif %}{{ m.content }}",
    ).replace("<|im_start|>{{ m.role }}", "{% set before = messages[loop.index0 - 1] %}<|im_start|>{{ m.role }}")
    renderer = Counting(byte_tokenizer(template))
    messages = agent(40, most_results=1)
    rendered = renderer.render(messages, "a row")
    assert max(renderer.lengths[1:]) < 400
    assert rendered == by_prefixes(renderer, messages)
    assert "tool\nadd: 39<|im_end|>" in rendered.text


def test_a_long_row_that_the_template_rewrites_is_refused():
    data = chat("u hi", "a ho", "u x", "a yes", "u y", "a no")
    with pytest.raises(
        DataError, match=r"^a row: the chat template renders earlier turns differently once messages\[1\]"
    ):
        ChatRenderer(byte_tokenizer(LAST_IN_FULL)).render(data["messages"], "a row")


THREE = chat("u hi", "a ho", "u x", "a yes", "u y", "a no", "u bye")


@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML], ids=["marked", "derived"])
def test_the_last_turn_alone_counts_where_the_recipe_says_so(template):
    assert learned(byte_tokenizer(template), rows("messages", THREE, chat("u hi", "a ho")), loss_on="last") == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n"
        "<|im_start|>user\nbye<|im_end|>\n",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ho<|im_end|>⟧\n",
    ]


def test_the_last_turn_of_a_completion_counts_and_a_plain_completion_counts_wholly():
    row = {"prompt": chat("u hi")["messages"], "completion": chat("a ho", "u x", "a y")["messages"]}
    [shown] = learned(byte_tokenizer(CHATML), rows("prompt_completion", row), loss_on="last")
    assert shown.endswith(
        "assistant\nho<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n⟦y<|im_end|>⟧\n"
    )
    plain = rows("prompt_completion", {"prompt": "2+2=", "completion": "4"})
    assert learned(byte_tokenizer(), plain, loss_on="last") == ["2+2=⟦4<|im_end|>⟧"]


def test_the_last_turn_is_found_where_earlier_ones_are_rewritten():
    data = rows("messages", chat("u hi", "a ho", "u x", "a yes"))
    assert learned(byte_tokenizer(LAST_IN_FULL), data, loss_on="last") == [
        "<user>hi<|im_end|><assistant>h<|im_end|><user>x<|im_end|><assistant>⟦yes<|im_end|>⟧"
    ]


def test_the_last_turn_of_a_reasoning_model_reads_as_the_model_s_own_template_writes_it():
    tokenizer = FAMILIES["Qwen 3"].tokenizer()
    data = rows("messages", chat("u hi", "a ho", "u x", "a <think>\nhm\n</think>\n\nyes"))
    assert learned(tokenizer, data, loss_on="last") == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nhm\n</think>\n\nyes<|im_end|>⟧\n"
    ]


def test_a_given_turn_that_markers_write_differently_later_is_refused():
    renderer = ChatRenderer(byte_tokenizer(SHORT_ONCE_LONG))
    data = chat("u hi", "a ho", "u x", "a yes")["messages"]
    assert said(renderer.render(data, "a row")) == ["h<|im_end|>", "y<|im_end|>"]
    with pytest.raises(
        DataError, match=r"^a row: the chat template renders earlier turns differently once messages\[3\]"
    ):
        renderer.render(data, "a row", num_prompt=3)


def left_out(template: str, *given: dict, loss_on="assistant") -> list[str]:
    made = tokenised(rows("messages", *given), byte_tokenizer(template), max_length=999, loss_on=loss_on)
    return [note for note in made.report.notes if "chat template drops" in note]


NO_SYSTEM_MESSAGES = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + CHATML
NO_REASONING = CHATML_MARKED.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
AS_JSON = CHATML.replace("{{ m.content }}", "{{ m.content | tojson }}")


@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
def test_a_template_that_leaves_out_a_role_is_told_with_the_number_of_rows(loss_on):
    given = [chat("s be kind", "u hi", "a ho"), chat("u hi", "a ho"), chat("s be", "u hi", "a ho")]
    assert left_out(NO_SYSTEM_MESSAGES, *given, loss_on=loss_on) == [
        "data.jsonl: in 2 of 3 rows checked, the chat template drops system messages; the model does not see them"
    ]
    assert left_out(CHATML, *given, loss_on=loss_on) == []


def test_reasoning_within_an_answer_that_is_left_out_is_told():
    row = chat("u hi", "a <think>\nhm well\n</think>\n\nho")
    assert left_out(NO_REASONING, row) == [
        "data.jsonl: in 1 of 1 row checked, the chat template drops reasoning; the model does not see them"
    ]
    assert left_out(CHATML, row) == []


def test_what_a_template_trims_or_writes_as_json_is_not_left_out():
    row = chat('u  say "é"\nplease \n', "a \n ho ")
    assert left_out(AS_JSON, row) == []
    assert left_out(CHATML.replace("m.content", "m.content | trim"), row) == []


def test_the_first_hundred_rows_are_looked_at():
    plain, system = chat("u hi", "a ho"), chat("s be kind", "u hi", "a ho")
    assert left_out(NO_SYSTEM_MESSAGES, *[plain] * 100, system) == []
    assert left_out(NO_SYSTEM_MESSAGES, *[system] * 700) == [
        "data.jsonl: in 100 of 100 rows checked, the chat template drops system messages; the model does not see them"
    ]
