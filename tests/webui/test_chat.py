"""The page to talk with runs: models belong to the page that loaded them, and go with it."""

import time

import psutil
import pytest

import tunekit
from tests.training.folders import made_run
from tests.waiting import LIMIT_SECONDS
from webui.chat import Words, choices_of, chosen
from webui.said import asked_of, before_answer, shown, text_of, with_turn
from webui.site import Site
from webui.talks import IDLE_SECONDS, NUM_ALL, Choice, Talks

QUESTION = [{"role": "user", "content": "What is 3 and 3?"}]

HOSTILE = "<img src=/x onerror=alert(1)> **bold** &lt; 1 < 2"


@pytest.fixture
def site(workspace, trained_run):
    return Site(root=workspace)


@pytest.fixture
def talks(site):
    opened = Talks(site)
    yield opened
    for session in ("one", "two"):
        opened.close(session)


def pids(talks, session):
    return {side.talk.pid for side in talks.sides(session)}


@pytest.mark.slow
def test_a_model_is_its_sessions_own_and_goes_when_it_is_closed(talks, trained_run):
    talks.load("one", [Choice(trained_run.name, compare=True)], device="cpu")
    tuned, before = talks.sides("one")
    assert (tuned.base, before.base) == (False, True) and tuned.talk is before.talk
    assert "".join(tuned.talk.say(QUESTION, base=tuned.base)) and "".join(tuned.talk.say(QUESTION, base=before.base))
    assert talks.sides("two") == []
    talks.load("two", [Choice(trained_run.name, "4")], device="cpu")
    mine, theirs = pids(talks, "one"), pids(talks, "two")
    assert mine.isdisjoint(theirs)
    talks.close("one")
    assert not psutil.pid_exists(mine.pop()) and psutil.pid_exists(theirs.pop())
    assert talks.sides("one") == [] and not talks.has_ended("one"), "it was unloaded, and has not ended by itself"


@pytest.mark.slow
def test_a_model_that_nobody_asks_ends_and_that_is_told(talks, trained_run):
    talks.load("one", [Choice(trained_run.name)], device="cpu")
    (pid,) = pids(talks, "one")
    talks.begin("one")
    assert talks.close_idle(time.monotonic() + 2 * IDLE_SECONDS) == [], "it answers just now"
    talks.end("one")
    assert talks.close_idle(time.monotonic()) == []
    assert talks.close_idle(time.monotonic() + 2 * IDLE_SECONDS) == ["one"]
    assert not psutil.pid_exists(pid) and talks.has_ended("one")


class Idle:
    """A model that is loaded at once."""

    pid, is_open = 1, True

    def close(self):
        self.is_open = False


def test_a_model_that_answers_is_not_taken_for_idle(workspace, monkeypatch):
    made_run(workspace / "runs" / "mine")
    talk = Idle()
    monkeypatch.setattr(tunekit, "chat", lambda *chosen, **options: talk)
    talks = Talks(Site(workspace))
    talks.load("one", [Choice("mine")], device="cpu")
    later = time.monotonic() + 2 * IDLE_SECONDS
    talks.begin("one")
    talks.begin("one")
    talks.end("one")
    assert talks.close_idle(later) == [] and talk.is_open, "one of its answers is still coming"
    talks.end("one")
    assert talks.close_idle(time.monotonic()) == [] and talks.sides("one")
    assert talks.close_idle(later) == ["one"]
    assert talks.has_ended("one") and not talk.is_open and talks.sides("one") == []


@pytest.mark.slow
def test_a_page_that_is_closed_while_its_model_loads_leaves_no_process(talks, trained_run):
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(tunekit.TunekitError, match="the page was closed"):
        choice = [Choice(trained_run.name)]
        talks.load("one", choice, device="cpu", on_loading=lambda name: talks.close("one"))
    assert {child.pid for child in psutil.Process().children()} <= before


@pytest.mark.slow
def test_more_models_than_there_may_be_are_refused_in_words(talks, trained_run):
    with pytest.raises(tunekit.TunekitError, match=f"; the limit is {NUM_ALL}"):
        talks.load("one", [Choice(trained_run.name)] * (NUM_ALL + 1), device="cpu")
    assert talks.sides("one") == []


NO_RUNS = ["nothing", "../runs", "", "/etc", "~root/x", "./x/y", "a/b/c", "-/../../x"]


@pytest.mark.parametrize(("name", "step"), [*((name, None) for name in NO_RUNS), (None, "../../model")])
def test_what_is_no_run_of_the_workspace_is_not_loaded(talks, trained_run, name, step):
    with pytest.raises(tunekit.TunekitError):
        talks.load("one", [Choice(trained_run.name if name is None else name, step)], device="cpu")
    assert talks.sides("one") == []


def test_the_choices_are_what_the_run_has(site, trained_run):
    checkpoint, beside, prompts = choices_of(site, Words("en"), trained_run.name, "4")
    assert [value for _, value in checkpoint.choices] == ["", "8", "4"] and checkpoint.value == "4"
    assert [value for _, value in beside.choices] == ["before", "", f"{trained_run.name}/8", f"{trained_run.name}/4"]
    assert len(prompts.samples) == len(trained_run.samples()) > 0
    assert choices_of(site, Words("en"), "nothing")[0].choices == []


def test_a_model_is_chosen_by_its_name_on_the_hub_or_its_folder(site, trained_run):
    for name in ("pico", "Qwen/Qwen3-0.6B"):
        assert site.model(name) == name
        checkpoint, beside, prompts = choices_of(site, Words("en"), name)
        assert [value for _, value in checkpoint.choices] == [""] and beside.value == "" and not prompts.visible
        assert [value for _, value in beside.choices] == ["", f"{trained_run.name}/"]
    folder = trained_run.path / "model"
    assert site.model(str(folder.relative_to(site.root))) == str(folder)
    assert site.model(trained_run.name).path == trained_run.path
    made_run(site.root / "runs" / "pico")
    assert site.model("pico").path == site.root / "runs" / "pico", "a run of that name comes first"


def test_an_answer_is_generated_again_from_the_turns_before_it():
    answer = {"role": "assistant", "content": "1 &lt; 2"}
    assert before_answer([*QUESTION, answer, *QUESTION, answer]) == [
        *QUESTION,
        {**answer, "content": "1 < 2"},
        *QUESTION,
    ]
    assert before_answer(QUESTION) == QUESTION and before_answer([answer]) == before_answer(None) == []


def test_what_is_chosen_is_what_is_loaded():
    assert chosen("a", "", "before") == [Choice("a", None, compare=True)]
    assert chosen("a", "4", "") == [Choice("a", "4")]
    assert chosen("a", "", "b/") == [Choice("a"), Choice("b")]
    assert chosen("a", "", "a/4") == [Choice("a"), Choice("a", "4")]
    for run, checkpoint in ((None, ""), ("a", None)):
        with pytest.raises(tunekit.TunekitError, match="no result and no complete checkpoint"):
            chosen(run, checkpoint, "")


def test_what_is_said_is_shown_as_text_and_comes_back_as_it_was():
    said = with_turn([], HOSTILE)
    page = shown(said)
    assert "<" not in page[0]["content"]
    # A browser hands texts back in parts.
    back = {"role": "user", "content": [{"type": "text", "text": page[0]["content"]}, {"type": "file", "file": "x"}]}
    assert text_of(back) == HOSTILE
    assert with_turn([back], "and?")[0]["content"] == HOSTILE


def test_an_answer_that_never_came_is_not_asked_about():
    said = [*QUESTION, {"role": "assistant", "content": ""}, {"role": "user", "content": "And?"}]
    assert asked_of(said, " ") == [{"role": "user", "content": "And?"}]
    assert asked_of(QUESTION, "Be brief.")[0] == {"role": "system", "content": "Be brief."}


def holders(server) -> list[psutil.Process]:
    """The processes of a server that hold models."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "tunekit.inference.chat_worker" in child.cmdline()]


@pytest.mark.slow
def test_a_run_answers_beside_what_it_was_and_goes_with_the_page(workspace, trained_run, serve, open_page):
    server = serve(workspace)
    page = open_page(f"{server.url}runs?run={trained_run.name}", height=800)
    requested = []
    page.on("request", lambda request: requested.append(request.url))
    page.locator("#controls-talk").click()
    page.locator(".chat-loaded").wait_for()
    box = page.locator("#chat-prompt").bounding_box()
    assert box["y"] + box["height"] < 800, "the message is in sight"
    (first,) = holders(server)
    prompt = page.locator("#chat-prompt textarea")
    prompt.fill(HOSTILE)
    prompt.press("Enter")
    for side in ("left", "right"):
        page.locator(f"#chat-{side} [data-testid=bot] .md").first.wait_for()
        assert page.locator(f"#chat-{side} [data-testid=user] .md").first.inner_text().strip() == HOSTILE
    page.locator("#chat-send:enabled").wait_for()
    assert all(page.locator(f"#chat-{side} [data-testid=bot] .md").first.inner_text() for side in ("left", "right"))
    assert page.locator("#chat-left .md img, #chat-left .md strong").count() == 0
    assert not [url for url in requested if url.endswith("/x")], "nothing in a message is loaded"
    # An answer is generated anew, with other settings, in the place of the last one.
    page.locator("#chat-options > button").click()
    page.locator("#chat-max-new-tokens input").fill("1")
    page.locator("#chat-max-new-tokens input").press("Tab")
    before = page.locator("#chat-left [data-testid=bot] .md").inner_text()
    page.locator("#chat-again").click()
    page.wait_for_function(
        "before => document.querySelector('#chat-left [data-testid=bot] .md')?.innerText.length < before.length"
        " && !document.querySelector('#chat-again').disabled",
        arg=before,
    )
    for side in ("left", "right"):
        assert page.locator(f"#chat-{side} [data-testid=user]").count() == 1
        assert page.locator(f"#chat-{side} [data-testid=bot]").count() == 1
    page.locator("#chat-unload").click()
    page.get_by_text("its memory is free").wait_for()
    assert not first.is_running() and holders(server) == []
    page.locator("#chat-load").click()
    page.locator(".chat-loaded").wait_for()
    (second,) = holders(server)
    page.context.close()
    second.wait(LIMIT_SECONDS)


def test_pictures_are_shown_come_back_and_are_asked_about(tmp_path):
    from gradio.components import Chatbot
    from PIL import Image

    path = tmp_path / "a.png"
    Image.new("RGB", (4, 6)).save(path)
    said = with_turn([], "a < b?", [str(path)])
    chatbot = Chatbot()
    back = chatbot.preprocess(chatbot.postprocess(shown(said)))
    again = with_turn(back, "and?")
    assert [turn.get("pictures") for turn in again] == [[str(path)], None]
    assert [turn["content"] for turn in again] == ["a < b?", "and?"]
    first, second = asked_of(again, "")
    assert first["content"] == [tunekit.picture_part(path), {"type": "text", "text": "a < b?"}]
    assert second == {"role": "user", "content": "and?"}
