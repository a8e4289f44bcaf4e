"""What fails in a handler is told to whoever asked, and no button stays taken away."""

import asyncio
import inspect
from collections.abc import Iterator

import gradio as gr
import pytest

import tunekit
from tests.training.folders import made_run
from tests.waiting import until
from webui import chat, data_page, exports, failures, jobs, launching, situation
from webui.app import build_pages
from webui.failures import Pages, told_by
from webui.site import LANGUAGES, Site
from webui.words import Words

WRONG = "the rows of <b>pairs.jsonl</b> are wrong"


def raising(error):
    """A handler that fails so."""

    def handler(*args, **options):
        raise error

    return handler


def toast(pages, session="mine"):
    """The error that gradio shows for the first handler of pages."""
    with pytest.raises(gr.Error) as caught:
        asyncio.run(pages.process_api(block_fn=0, inputs=[], session_hash=session))
    return caught.value


def pages_with(handler):
    with Pages(analytics_enabled=False) as pages:
        gr.Button().click(handler)
    return pages


def test_whatever_a_handler_raises_is_shown_in_a_toast_as_text(capsys):
    said = toast(pages_with(raising(tunekit.TunekitError(WRONG, hint="mend them"))))
    assert said.visible and said.message == "the rows of &lt;b&gt;pairs.jsonl&lt;/b&gt; are wrong; mend them"
    assert "Traceback" not in capsys.readouterr().err
    said = toast(pages_with(raising(KeyError("_HubError"))))
    assert said.visible and "tunekit itself failed: KeyError" in said.message and "_HubError" in said.message
    assert "Traceback" in (printed := capsys.readouterr().err) and "KeyError: '_HubError'" in printed


def test_a_toast_shows_no_secret(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-a-secret-of-mine")
    said = toast(pages_with(raising(OSError("no answer to sk-a-secret-of-mine"))))
    assert "no answer to" in said.message and "sk-a-secret-of-mine" not in said.message


def test_a_toast_that_stands_is_not_shown_once_more_to_the_same_visitor():
    pages = pages_with(raising(OSError("the disk is gone")))
    assert [toast(pages).visible for _ in range(3)] == [True, False, False]
    assert toast(pages, "another visitor").visible


def test_what_gradio_refuses_keeps_gradios_own_words():
    assert toast(pages_with(raising(gr.Error("Value: x is not in the list of choices")))).message.startswith("Value: x")


@pytest.mark.parametrize("error", [tunekit.TunekitError(WRONG), KeyError(WRONG)])
def test_a_handler_that_answers_in_steps_ends_with_the_error_in_the_place_for_it(error):
    @told_by(lambda told: (str(told), "free"))
    def handler(name: str, request: gr.Request) -> Iterator[tuple[str, str]]:
        yield "busy", "taken"
        raise error

    first, last = handler("mine", None)
    assert first == ("busy", "taken")
    assert WRONG in last[0] and last[1] == "free"
    # Gradio gives a handler what its signature asks for.
    assert list(inspect.signature(handler).parameters) == ["name", "request"]
    assert inspect.isgeneratorfunction(handler)


@pytest.fixture
def site(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return Site(workspace)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_handler_of_every_page_is_seen_and_those_that_answer_in_steps_tell_in_their_place(site, language):
    pages = build_pages(site, Words(language))
    assert isinstance(pages, Pages)
    handlers = [one.fn for one in pages.fns.values() if one.fn is not None]
    in_steps = [one for one in handlers if inspect.isgeneratorfunction(one)]
    assert len(handlers) > 40 and len(in_steps) == 7
    assert {one.__code__.co_filename for one in in_steps} == {failures.__file__}, "each is decorated with told_by"


def start_of(pages):
    """The handler of Start."""
    (found,) = [
        one
        for one in pages.fns.values()
        if inspect.isgeneratorfunction(one.fn) and "plan-start" in [block.elem_id for block in one.outputs]
    ]
    return found


def test_start_is_free_again_and_says_why_whatever_went_wrong(site, monkeypatch):
    monkeypatch.setattr(launching, "begin", raising(KeyError("_HubError")))
    start = start_of(build_pages(site, Words("en")))
    *_, (said, address, button) = start.fn(*["" for _ in start.inputs])
    assert "tunekit itself failed" in said and "_HubError" in said and "role='alert'" in said
    assert not address and button.interactive


def test_work_in_the_background_that_fails_in_any_way_has_an_end(site, monkeypatch):
    run = made_run(site.root / "runs" / "mine")
    monkeypatch.setattr(jobs.work, "call", raising(OSError("no process can be started")))
    exports.begin(run, None, kind="merged", dtype="auto", checkpoint=None)
    progress = until(lambda: found if (found := exports.progress_of(run)).is_over else None)
    assert progress.phase == "failed" and "no process can be started" in str(progress.error)
    with pytest.raises(OSError, match="no process can be started"):
        list(data_page.events_of("session", "data_report"))
    monkeypatch.setattr(tunekit, "stop", raising(OSError("no such process")))
    situation.stop(run, now=True)
    ending = situation._endings[run.path.resolve()]
    until(lambda: ending.ended)
    assert "no such process" in ending.words


def test_a_run_that_cannot_be_read_is_told_where_it_is_chosen_to_talk_with(site):
    with pytest.warns(UserWarning, match="no run &#x27;gone&#x27; in runs"):
        checkpoint, beside, _ = chat.choices_of(site, Words("en"), "gone")
    assert (checkpoint.choices, beside.choices) == ([], [])
