"""Only the answer to the latest request of a page is shown, in whichever order requests arrive and are answered."""

import threading

import gradio as gr
import pytest

from tests.waiting import LIMIT_SECONDS
from webui.in_order import Newest, attach_in_order


@pytest.fixture
def attach():
    def attach(function):
        with gr.Blocks() as page:
            text, shown = gr.Textbox(), gr.Textbox()
            attach_in_order([text.change], function, [text], [shown])
        (dependency,) = page.fns.values()
        return dependency.fn

    return attach


def is_skipped(answer):
    return answer == [gr.skip()]


def test_a_request_that_arrives_after_a_later_one_changes_nothing(attach):
    calls = []
    answer, newest = attach(lambda text: [calls.append(text) or text]), Newest()
    assert answer("later", 2.0, newest) == ["later"]
    assert is_skipped(answer("earlier", 1.0, newest))
    assert answer("last", 3.0, newest) == ["last"]
    assert calls == ["later", "last"]


def test_an_answer_that_took_longer_than_that_to_a_later_request_changes_nothing(attach):
    begun, end = threading.Event(), threading.Event()

    def show(text):
        if text == "slow":
            begun.set()
            assert end.wait(LIMIT_SECONDS)
        return [text]

    answer, newest, answers = attach(show), Newest(), []
    slow = threading.Thread(target=lambda: answers.append(answer("slow", 1.0, newest)))
    slow.start()
    assert begun.wait(LIMIT_SECONDS)
    assert answer("fast", 2.0, newest) == ["fast"]
    end.set()
    slow.join()
    (late,) = answers
    assert is_skipped(late)
