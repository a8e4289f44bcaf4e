"""A chat template that takes too long is ended, wherever it spends its time and whoever renders it.

One that fails whatever the row is, is told in a line.
"""

import contextlib
import resource
import signal
import subprocess
import sys
import threading

import pytest

from tests.tiny import make_tokenizer
from tests.waiting import LIMIT_SECONDS
from tunekit.errors import DataError
from tunekit.probe import chat_template
from tunekit.probe.chat_template import template_in_time

MESSAGES = [{"role": "user", "content": "a"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"
POWER = "{{ 9 ** 999999999 }}"
DOUBLING = (
    "{% set all = namespace(text='a' * 1000) %}"
    "{% for _ in range(40) %}{% set all.text = all.text ~ all.text %}{% endfor %}{{ all.text }}"
)
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


TRACED = """
import sys, threading
from tunekit.errors import DataError
from tunekit.probe import chat_template

def work(seconds):
    chat_template.ROW_SECONDS = seconds
    try:
        with chat_template._by_thread():
            while seconds < 1:
                pass
    except chat_template._TimeIsUp:
        print("ended")
    sys.setprofile(lambda *_: None)
    (lambda: None)()
    sys.setprofile(None)

for seconds in (0.1, 30):
    thread = threading.Thread(target=work, args=(seconds,))
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_a_thread_can_be_traced_after_a_template():
    command = [sys.executable, "-c", TRACED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_SECONDS)
    assert done.stdout == "ended\n"


@contextlib.contextmanager
def around(place):
    with template_in_time(place):
        yield


@pytest.mark.parametrize("enter", [template_in_time, around])
def test_an_alarm_that_comes_while_the_alarm_is_taken_back_leaves_nothing_behind(enter, tokenizer):
    def ring(frame, event, argument):
        if event == "call" and frame.f_code is contextlib._GeneratorContextManager.__exit__.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGALRM)

    with enter("rows.jsonl:1"):
        sys.setprofile(ring)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "it is nested too deep, or calls itself without end"),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "it is nested too deep, or calls itself without end"),
        ("{% include 'a' %}", "no loader for this environment specified"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ 'a' * 10 ** 18 }}", "not enough memory for its text"),
        ("{{ 'a' * 10 ** 10 }}", "not enough memory for its text"),
        (DOUBLING, "not enough memory for its text"),
    ],
)
def test_a_template_that_fails_for_any_row_is_told_in_a_line(template, why, tokenizer):
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: rendering the chat template failed: {why}"):
        render(tokenizer, template)


def test_a_template_leaves_the_limit_of_memory_as_it_was(tokenizer):
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match="not enough memory"):
        render(tokenizer, DOUBLING)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    render(tokenizer, "{{ messages[0].content }}")


@pytest.mark.parametrize("template", [LOOP, "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"])
def test_a_tokenizer_with_such_a_template_is_not_looked_at_twice(template, tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "ROW_SECONDS", 0.3)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(DataError, match="a first conversation: rendering the chat template"):
        chat_template.take_texts(tokenizer)
