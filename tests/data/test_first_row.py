"""A check sees what training would refuse in the first row, and refuses nothing that transformers renders."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from jinja2 import TemplateError

from tests.tiny import make_tokenizer, save_chats, save_tiny_model
from tunekit.api import verbs
from tunekit.data.sources.load import LoadedData
from tunekit.data.sources.rows import Rows
from tunekit.data.tokenization.encode import Encoder
from tunekit.data.tokenization.first_rows import check_first_rows
from tunekit.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first-row")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    return folder


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the tokenizer has no chat template to render messages"),
        (
            "{% generation %}{% endgeneration %}{{ raise_exception('no ' + messages[0]['role']) }}",
            "rows.jsonl:1: the chat template rejects the row: no user",
        ),
        ("{% include 'other' %}", "rows.jsonl:1: the chat template reads another file, 'other'; write its text into"),
    ],
)
@pytest.mark.parametrize("call", [verbs.plan, verbs.check, verbs.train], ids=["plan", "check", "train"])
def test_the_first_row_is_refused_before_a_run_as_in_it(folder, tmp_path, call, template, words):
    for file in (folder / "model").glob("chat_template*"):
        file.unlink()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "model")
    recipe = {"model": str(folder / "model"), "data": {"train": str(folder / "rows.jsonl"), "max_length": 64}}
    with pytest.raises(DataError, match=re.escape(words)):
        call({**recipe, "output": {"dir": str(tmp_path / "run")}})


TEMPLATES = sorted((Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates").glob("*.jinja"))
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CONVERSATIONS = [
    [USER, ANSWER],
    [{"role": "system", "content": "s"}, USER, ANSWER],
    [USER, USER, ANSWER],
    [ANSWER, USER],
]


def test_a_row_after_the_first_is_refused_as_well():
    refusal = "{% if message.content == 'no' %}{{ raise_exception('never') }}{% endif %}"
    text = f"{{% for message in messages %}}{refusal}{{% endfor %}}"
    chats = [[{"role": "user", "content": word}, {"role": "assistant", "content": "x"}] for word in ("a", "b", "no")]
    rows = Rows("messages", [{"messages": chat} for chat in chats], source="rows.jsonl", numbers=[1, 2, 3])
    with pytest.raises(DataError, match=r"rows\.jsonl:3: the chat template rejects the row: never"):
        check_first_rows(LoadedData((rows,), (), []), text, {}, set)


@pytest.mark.sample(30)
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda file: file.stem)
def test_a_template_refuses_here_what_it_refuses_in_transformers(template):
    tokenizer, text = make_tokenizer(), template.read_text()
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    for messages in CONVERSATIONS:
        rows = Rows("messages", [{"messages": messages}], source="rows.jsonl", numbers=[1], loss_on="all")
        try:
            tokenizer.apply_chat_template(messages, chat_template=text, tokenize=False, **tokens)
        except TemplateError as error:
            if type(error) is TemplateError:
                with pytest.raises(DataError, match=re.escape(str(error))):
                    check_first_rows(LoadedData((rows,), (), []), text, tokens, set)
                continue
        except TypeError:
            pass
        check_first_rows(LoadedData((rows,), (), []), text, tokens, set)


MOVED = (
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'user' %}<|user|>"
    "{% if loop.last or loop.nextitem is defined and loop.index == messages | length - 1 %}"
    "{{ messages[0].content }}{% endif %}{{ m.content }}{% else %}<|assistant|>{{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that moves the system prompt into the last question, as Mistral's third version does."""

NO_CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
ROWS = {
    "one turn": [USER, ANSWER],
    "two turns": [USER, ANSWER, USER, ANSWER],
    "a system prompt and two turns": [{"role": "system", "content": "s"}, USER, ANSWER, USER, ANSWER],
    "an answer first": [ANSWER, USER, ANSWER],
    "a call": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "content": "2"},
        ANSWER,
    ],
}


def refused(check):
    """Return the words of a refusal; None where there is none."""
    try:
        check()
    except DataError as error:
        return str(error)
    return None


@pytest.mark.sample(40)
@pytest.mark.parametrize("messages", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    "text",
    [MOVED, NO_CALLS, *(file.read_text() for file in TEMPLATES)],
    ids=["moved", "no-calls", *(file.stem for file in TEMPLATES)],
)
def test_turns_that_are_not_located_in_a_run_are_refused_here_with_its_words(text, messages):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = text
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    rows = Rows("messages", [{"messages": messages}], source="rows.jsonl", numbers=[1])
    here = refused(lambda: check_first_rows(LoadedData((rows,), (), []), text, tokens, set))
    in_a_run = refused(lambda: Encoder(rows, tokenizer).encode(rows, range(1)))
    if here is not None or text in (MOVED, NO_CALLS):
        assert here == in_a_run
