"""Talking with what a run made, beside what it was before or another run.

The model is in a process of its own, which the page's session holds (see `webui.talks`). What was said is in the
browser alone. Answers are shown as they are, as text: nothing in them is taken for a page.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

import tunekit
from tunekit import frontend
from webui.failures import told_by
from webui.history import history_of, steps_of
from webui.listing import listing_of
from webui.run_parts import empty
from webui.said import Messages, asked_of, before_answer, shown, with_turn
from webui.site import MODELS, Site
from webui.talks import Choice, Talks
from webui.words import Words, next_step, told

RESULT, NOTHING, BEFORE = "", "", "before"
"""Values of the choices that are no run."""

MAX_PROMPTS = 6

Prompt = dict[str, Any]
"""The text and the files of the field for a prompt."""


@dataclass(frozen=True)
class Chooser:
    """Chooser of a model before it is loaded."""

    run: gr.Dropdown
    checkpoint: gr.Dropdown
    beside: gr.Dropdown
    device: gr.Radio


@dataclass(frozen=True)
class Conversation:
    """Conversation and its sampling parameters."""

    left: gr.Chatbot
    right: gr.Chatbot
    prompt: gr.MultimodalTextbox
    send: gr.Button
    stop: gr.Button
    again: gr.Button
    clear: gr.Button
    system: gr.Textbox
    options: list[Any]


def build(page: gr.Blocks, site: Site, words: Words) -> None:
    """The page."""
    gr.Markdown(f"# {words('chat.title')}")
    if site.read_only:
        gr.HTML(empty(words("chat.read_only")), elem_id="chat-read-only")
        return
    talks = Talks(site)
    nothing = gr.HTML(visible=False, elem_id="chat-nothing")
    with gr.Column() as everything:
        devices = [(words("chat.device_auto"), "auto"), (words("chat.device_cpu"), "cpu")]
        with gr.Row(elem_id="chat-choices"):
            run = gr.Dropdown(
                [], label=words("chat.run"), allow_custom_value=True, elem_id="chat-run", min_width=220
            )  # fmt: skip
            checkpoint = gr.Dropdown([], label=words("chat.checkpoint"), elem_id="chat-checkpoint", min_width=160)
            beside = gr.Dropdown([], label=words("chat.beside"), elem_id="chat-beside", min_width=220)
            device = gr.Radio(devices, value="auto", label=words("chat.device"), elem_id="chat-device", min_width=220)
        with gr.Row(elem_id="chat-loading"):
            load = gr.Button(
                words("chat.load"), variant="primary", interactive=False, size="md", elem_id="chat-load", min_width=120
            )
            unload = gr.Button(words("chat.unload"), interactive=False, size="md", elem_id="chat-unload", min_width=120)
            status = gr.HTML(empty(words("chat.none_loaded")), elem_id="chat-status")
        talk = _conversation(words)
        samples = gr.Dataset(
            label=words("chat.prompts"), components=[gr.Textbox(visible=False)], samples=[], type="values",
            visible=False, elem_id="chat-prompts",
        )  # fmt: skip
    chooser = Chooser(run, checkpoint, beside, device)
    # What the address has loaded at once.
    at_once = gr.Textbox("", visible=False)
    _attach_choices(page, site, words, chooser, load, samples, nothing, everything, at_once)
    _attach_loading(page, site, words, talks, chooser, talk, load, unload, status, at_once)
    _attach_talking(words, talks, talk, status)
    samples.click(lambda row: _prompt(row[0]), samples, talk.prompt, show_progress="hidden")


def _conversation(words: Words) -> Conversation:
    with gr.Row(elem_id="chat-sides"):
        left_chat, right = (
            gr.Chatbot(
                label=words("chat.answers"), elem_id=f"chat-{side}", render_markdown=False, min_width=300,
                # What is above and below it leaves the message in sight.
                height="max(240px, 100vh - 560px)",
                buttons=[], feedback_options=None, visible=side == "left", allow_file_downloads=False,
                placeholder=escape(words("chat.placeholder")),
            )
            for side in ("left", "right")
        )  # fmt: skip
    prompt = gr.MultimodalTextbox(
        show_label=False, placeholder=words("chat.prompt"), lines=1, max_lines=8, elem_id="chat-prompt",
        sources=[], file_types=list(frontend.PICTURE_SUFFIXES), file_count="multiple", submit_btn=False,
    )  # fmt: skip
    with gr.Row(elem_id="chat-buttons"):
        send = gr.Button(
            words("chat.send"), variant="primary", interactive=False, size="md", elem_id="chat-send", min_width=100
        )
        stop = gr.Button(words("chat.stop"), interactive=False, size="md", elem_id="chat-stop", min_width=100)
        again = gr.Button(words("chat.again"), interactive=False, size="md", elem_id="chat-again", min_width=100)
        clear = gr.Button(words("chat.clear"), size="md", elem_id="chat-clear", min_width=100)
    with gr.Accordion(words("chat.options"), open=False, elem_id="chat-options"):
        system = gr.Textbox(label=words("chat.system"), info=words("chat.system_help"), lines=2, elem_id="chat-system")
        with gr.Row():
            temperature = gr.Slider(
                0, 2, 0, step=0.05, label=words("chat.temperature"), info=words("chat.temperature_help"),
                elem_id="chat-temperature", min_width=220,
            )  # fmt: skip
            top_p = gr.Slider(
                0.05, 1, 1, step=0.05, label=words("chat.top_p"), info=words("chat.top_p_help"), elem_id="chat-top-p",
                min_width=220,
            )  # fmt: skip
        with gr.Row():
            length = gr.Number(
                256, precision=0, minimum=1, maximum=8192, label=words("chat.max_new_tokens"),
                elem_id="chat-max-new-tokens", min_width=220,
            )  # fmt: skip
            seed = gr.Number(
                None, precision=0, minimum=0, label=words("chat.seed"), info=words("chat.seed_help"),
                elem_id="chat-seed", min_width=220,
            )  # fmt: skip
    return Conversation(left_chat, right, prompt, send, stop, again, clear, system, [temperature, top_p, length, seed])


def _attach_choices(
    page: gr.Blocks,
    site: Site,
    words: Words,
    chooser: Chooser,
    load: gr.Button,
    samples: gr.Dataset,
    nothing: gr.HTML,
    everything: gr.Column,
    at_once: gr.Textbox,
) -> None:
    """Fill the choices from the runs that there are, and from what the address asks for."""

    def opened(request: gr.Request) -> list[Any]:
        names = [line.name for line in listing_of(site.root).lines() if line.state != "unreadable"]
        if not names:
            start = site.link(words.language, "new", from_="recipe:sft/quickstart")
            link = next_step(start, words("chat.start"))
            return [
                gr.HTML(empty(words("chat.no_runs")) + link, visible=True), gr.Column(visible=True), _on(),
                gr.Dropdown(choices=[*MODELS], value=MODELS[0]), *choices_of(site, words, MODELS[0]), "",
            ]  # fmt: skip
        asked = request.query_params.get("run", "")
        name = asked if asked in {*names, *MODELS} or "/" in asked else names[0]
        step = request.query_params.get("checkpoint", RESULT)
        return [
            gr.HTML(visible=False), gr.Column(visible=True), _on(),
            gr.Dropdown(choices=[*names, *MODELS], value=name),
            # An address loads no model that is not here yet.
            *choices_of(site, words, name, step), request.query_params.get("load", "") if name in names else "",
        ]  # fmt: skip

    chosen = [chooser.checkpoint, chooser.beside, samples]
    requested = gr.Textbox("", visible=False)
    outputs = [nothing, everything, load, chooser.run, *chosen, requested]
    opening = page.load(opened, None, outputs, show_progress="hidden")
    # Once the choices are there.
    opening.then(None, requested, at_once, js="(requested) => requested")
    chooser.run.input(lambda name: choices_of(site, words, name), chooser.run, chosen, show_progress="hidden")


def choices_of(site: Site, words: Words, name: str, step: str = RESULT) -> list[Any]:
    """The checkpoints of a run, what it may answer beside, and prompts that it was tried with; a model has no more."""
    try:
        run = site.model(name)
        if isinstance(run, str):
            return _choices_of_model(site, words)
        steps = steps_of(run)
        with history_of(run, patient=True) as reader:
            prompts = [prompt for prompt in reader.answers if prompt not in reader.pictures]
        is_done = run.state == "finished"
    except tunekit.TunekitError as error:
        gr.Warning(escape(str(error)))
        return [gr.Dropdown(choices=[], value=None), gr.Dropdown(choices=[], value=None), gr.Dataset(samples=[])]
    own = [(words("chat.step", step=saved_step), str(saved_step)) for saved_step in steps]
    of_run = [(words("chat.result"), RESULT), *own] if is_done else own
    values = [value for _, value in of_run]
    first = step if step in values else values[0] if values else None
    besides = [
        (words("chat.beside_before"), BEFORE),
        (words("chat.beside_nothing"), NOTHING),
        *((words("chat.beside_step", step=saved_step), f"{name}/{saved_step}") for saved_step in steps),
        *_finished(site, name),
    ]
    prompts_shown = prompts[:MAX_PROMPTS]
    return [
        gr.Dropdown(choices=of_run, value=first),
        gr.Dropdown(choices=besides, value=BEFORE),
        gr.Dataset(samples=[[prompt] for prompt in prompts_shown], visible=bool(prompts_shown)),
    ]


def _choices_of_model(site: Site, words: Words) -> list[Any]:
    besides = [(words("chat.beside_nothing"), NOTHING), *_finished(site)]
    return [
        gr.Dropdown(choices=[(words("chat.model"), RESULT)], value=RESULT),
        gr.Dropdown(choices=besides, value=NOTHING),
        gr.Dataset(samples=[], visible=False),
    ]


def _finished(site: Site, but: str = "") -> list[tuple[str, str]]:
    """Return the choices of other runs' results."""
    lines = listing_of(site.root).lines()
    return [(line.name, f"{line.name}/") for line in lines if line.name != but and line.state == "finished"]


def chosen(run: str | None, checkpoint: str | None, beside: str | None) -> list[Choice]:
    """The models that the choices mean.

    Raises:
        TunekitError: There is nothing to load.
    """
    if not run or checkpoint is None:
        raise tunekit.TunekitError(
            "this run has no result and no complete checkpoint yet", hint="wait for its first checkpoint"
        )
    choices = [Choice(run, checkpoint or None, compare=beside == BEFORE)]
    if beside and beside != BEFORE:
        name, _, step = beside.partition("/")
        choices.append(Choice(name, step or None))
    return choices


def _attach_loading(
    page: gr.Blocks,
    site: Site,
    words: Words,
    talks: Talks,
    chooser: Chooser,
    talk: Conversation,
    load: gr.Button,
    unload: gr.Button,
    status: gr.HTML,
    at_once: gr.Textbox,
) -> None:
    seen_state = gr.Textbox("", visible=False)
    outputs = [status, load, unload, talk.send, talk.again, talk.left, talk.right, seen_state, talk.prompt]

    @told_by(lambda error: [told(error), _on(), _off(), _off(), _off(), gr.skip(), gr.skip(), "failed", gr.skip()])
    def load_chosen(run: str, checkpoint: str, beside: str, device: str, request: gr.Request) -> Iterator[list[Any]]:
        session = str(request.session_hash)
        busy = f"<p class='chat-busy' role='status'>{escape(words('chat.loading', name=run or ''))}</p>"
        yield [busy, _off(), _off(), _off(), _off(), gr.skip(), gr.skip(), "loading", gr.skip()]
        talks.load(session, chosen(run, checkpoint, beside), device=device)
        sides = talks.sides(session)
        name = run if not checkpoint else words("chat.name_step", name=run, step=checkpoint)
        titles = [words("chat.tuned", name=name)]
        if beside:
            titles.append(words("chat.before", name=name) if beside == BEFORE else _title(beside, words))
        pair = [
            gr.Chatbot(label=title, visible=bool(title), value=[])
            for title in (titles[0], titles[1] if len(sides) > 1 else "")
        ]
        sources = ["upload"] if all(side.talk.reads_pictures for side in sides) else []
        field = gr.MultimodalTextbox(sources=sources)
        yield [_loaded(talks, session, words), _on(), _on(), _on(), _off(), *pair, "loaded", field]

    def ended(message: str) -> list[Any]:
        return [empty(message), _on(), _off(), _off(), _off(), gr.skip(), gr.skip(), "unloaded", gr.skip()]

    def unload_all(request: gr.Request) -> list[Any]:
        talks.close(str(request.session_hash))
        return ended(words("chat.unloaded"))

    def look(seen: str, request: gr.Request) -> list[Any]:
        if seen != "loaded" or not talks.has_ended(str(request.session_hash)):
            return [gr.skip()] * len(outputs)
        return ended(words("chat.ended"))

    inputs = [chooser.run, chooser.checkpoint, chooser.beside, chooser.device]
    gr.on([load.click, at_once.change], load_chosen, inputs, outputs, show_progress="hidden", concurrency_limit=None)
    unload.click(unload_all, None, outputs, show_progress="hidden")
    gr.Timer(site.tick_seconds).tick(look, seen_state, outputs, show_progress="hidden")

    def closed(request: gr.Request) -> None:
        talks.close(str(request.session_hash))

    page.unload(closed)


def _title(beside: str, words: Words) -> str:
    name, _, step = beside.partition("/")
    return words("chat.name_step", name=name, step=step) if step else name


def _loaded(talks: Talks, session: str, words: Words) -> str:
    """Describe the loaded model, its device and its memory."""
    facts = dict.fromkeys(
        words("chat.loaded", name=side.talk.name, device=side.talk.device, gib=f"{side.talk.memory_bytes / 2**30:.2f}")
        for side in talks.sides(session)
    )
    return "".join(f"<p class='chat-loaded' role='status'>{escape(line)}</p>" for line in facts)


def _attach_talking(words: Words, talks: Talks, talk: Conversation, status: gr.HTML) -> None:
    outputs = [talk.prompt, talk.left, talk.right, talk.send, talk.stop, talk.again, status]

    @told_by(lambda error: [gr.skip(), gr.skip(), gr.skip(), _on(), _off(), _on(), told(error)])
    def answer(
        prompt: Prompt | None,
        left: Messages,
        right: Messages,
        system: str,
        temperature: float,
        top_p: float,
        length: float | None,
        seed: float | None,
        request: gr.Request,
        event: gr.EventData,
    ) -> Iterator[list[Any]]:
        session = str(request.session_hash)
        sides = talks.sides(session)
        text, pictures = (prompt or {}).get("text") or "", (prompt or {}).get("files") or []
        # A button that was changed is another object for each browser.
        is_again = event.target.elem_id == talk.again.elem_id
        histories = [
            before_answer(history) if is_again else with_turn(history, text, pictures)
            for history in (left, right)[: len(sides)]
        ]
        if not sides or not all(histories) or not (is_again or text.strip() or pictures):
            yield [*[gr.skip()] * 6, gr.skip() if sides else empty(words("chat.none_loaded"))]
            return
        options = _options(temperature, top_p, length, seed)
        talks.begin(session)
        try:
            yield [gr.skip() if is_again else _prompt(""), *_both(histories), _off(), _on(), _off(), gr.skip()]
            for number, side in enumerate(sides):
                question = asked_of(histories[number], system)
                histories[number].append({"role": "assistant", "content": ""})
                for piece in side.talk.say(question, base=side.base, **options):
                    histories[number][-1]["content"] += piece
                    yield [gr.skip(), *_both(histories), *[gr.skip()] * 4]
                if side.talk.last is not None and side.talk.last.reason == "stopped":
                    break
            yield [gr.skip(), *_both(histories), _on(), _off(), _on(), gr.skip()]
        except tunekit.TunekitError as error:
            button = gr.Button(interactive=bool(talks.sides(session)))
            yield [gr.skip(), *_both(histories), button, _off(), button, told(error)]
        finally:
            talks.end(session)

    inputs = [talk.prompt, talk.left, talk.right, talk.system, *talk.options]
    gr.on(
        [talk.send.click, talk.prompt.submit, talk.again.click], answer, inputs, outputs, show_progress="hidden",
        concurrency_limit=None, trigger_mode="once",
    )  # fmt: skip

    def stop(request: gr.Request) -> None:
        talks.stop(str(request.session_hash))

    talk.stop.click(stop, None, None, show_progress="hidden", queue=False)
    talk.clear.click(lambda: [[], [], _off()], None, [talk.left, talk.right, talk.again], show_progress="hidden")


def _both(said: list[Messages]) -> list[Any]:
    """Return the output of each side; the second unchanged where there is one side."""
    return [shown(said[0]), shown(said[1]) if len(said) > 1 else gr.skip()]


def _options(temperature: float, top_p: float, length: float | None, seed: float | None) -> dict[str, Any]:
    return {
        "temperature": float(temperature),
        "top_p": float(top_p),
        "max_new_tokens": int(length or 256),
        "seed": None if seed is None else int(seed),
    }


def _prompt(text: str) -> Prompt:
    return {"text": text, "files": []}


def _on() -> gr.Button:
    return gr.Button(interactive=True)


def _off() -> gr.Button:
    return gr.Button(interactive=False)
