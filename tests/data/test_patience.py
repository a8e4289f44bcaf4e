"""A chat template that takes too long is ended, wherever it spends its time and whoever renders it."""

import signal
import threading

import pytest

from tests.tiny import make_tokenizer
from tunekit.errors import DataError
from tunekit.probe import chat_template
from tunekit.probe.chat_template import template_in_time

MESSAGES = [{"role": "user", "content": "a"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"
POWER = "{{ 9 ** 999999999 }}"
POWERS = "{{ 9 ** (9 ** 9) }}" * 3


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def render(tokenizer, template):
    with template_in_time("rows.jsonl:1"):
        tokenizer.apply_chat_template(MESSAGES, chat_template=template, tokenize=False)


@pytest.mark.parametrize("template", [LOOP, POWER, POWERS, "{% set n = 9 %}{{ n ** 999999999 }}"])
def test_a_template_is_ended_also_while_it_is_compiled(template, tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "ROW_SECONDS", 0.3)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: rendering the chat template timed out after 0 s"):
        render(tokenizer, template)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_template_is_ended_in_other_threads_and_where_the_alarm_is_taken(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "ROW_SECONDS", 0.3)
    told = []

    def work():
        with pytest.raises(DataError, match="rendering the chat template timed out after 0 s"):
            render(tokenizer, LOOP)
        render(tokenizer, "{{ messages[0].content }}")
        told.append("both")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    taken = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        work()
    finally:
        signal.signal(signal.SIGALRM, taken)
    assert told == ["both", "both"]
