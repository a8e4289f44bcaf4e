"""Actions on a run: stop, resume, clone, tag, annotate, delete; and why it failed.

What a browser sees is compared with what the run is at now, at every tick, and only what has changed is answered. A
button that cannot act is disabled, and the reason stands below. Where the pages only show, none of them is there.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from html import escape
from typing import Any

import gradio as gr

import tunekit
from webui import diagnosis, situation
from webui.listing import listing_of
from webui.resume_form import ResumeForm, message
from webui.site import Site
from webui.situation import OVER, Situation, situation_of
from webui.words import Words, told

GO = "(url) => { if (url) window.location = url; }"
"""Leads to an address that a handler has answered."""


def build(page: gr.Blocks, site: Site, words: Words, run_name: gr.Textbox, tick: gr.Timer) -> None:
    """The panel. `run_name` says of which run; it is asked again at every tick."""
    seen_state = gr.Textbox("", visible=False)
    if site.read_only:
        panel = _Shown(
            seen_state, gr.HTML(elem_id="controls-line"), gr.HTML(elem_id="controls-diagnosis", visible=False)
        )

        def look_only(name: str, seen: str) -> list[Any]:
            return look(site, words, name, seen, panel)

        gr.on(
            [run_name.change, tick.tick], look_only, [run_name, seen_state], panel.outputs, show_progress="hidden",
            trigger_mode="always_last",
        )  # fmt: skip
        return
    with gr.Row(elem_id="controls-buttons"):
        stop = gr.Button(words("controls.stop"), interactive=False, size="md", elem_id="controls-stop")
        stop_now = gr.Button(
            words("controls.stop_now"), interactive=False, size="md", variant="stop", elem_id="controls-stop-now"
        )
        talk = gr.Button(words("export.chat"), size="md", visible=False, elem_id="controls-talk")
        clone = gr.Button(words("controls.clone"), size="md", elem_id="controls-clone")
    ask = _StopNow(words)
    line = gr.HTML(elem_id="controls-line")
    problem = gr.HTML(elem_id="controls-problem", visible=False)
    card = gr.HTML(elem_id="controls-diagnosis", visible=False)
    mend = gr.Button(
        words("controls.mend"), variant="primary", size="md", visible=False, elem_id="controls-mend"
    )  # fmt: skip
    with gr.Accordion(words("controls.manage"), open=False, elem_id="controls-manage") as manage:
        form = ResumeForm(site, words, run_name)
        tags, note, path = _tags_and_folder(words)
        deletion = _Deletion(site, words, run_name)
    panel = _Shown(seen_state, line, card, stop, stop_now, talk, clone, mend, form, tags, note, path, deletion)

    def refresh(name: str, seen: str, chosen: str) -> list[Any]:
        return look(site, words, name, seen, panel, chosen)

    inputs = [run_name, seen_state, form.checkpoint]
    gr.on(
        [run_name.change, tick.tick], refresh, inputs, panel.outputs, show_progress="hidden",
        trigger_mode="always_last",
    )  # fmt: skip
    again = {"inputs": inputs, "outputs": panel.outputs, "show_progress": "hidden"}
    clicked = stop.click(lambda name: _stop(site, name, now=False), run_name, problem)
    clicked.then(refresh, **again)
    ask.attach(stop_now)
    ended = ask.sure.click(lambda name: _stop(site, name, now=True), run_name, problem)
    ended.then(refresh, **again)
    form.attach(manage, mend, problem, refresh, again)
    # `input` is not told of words that were typed. What is on the disk already changes nothing there.
    for key, listen, field in (("tags", tags.change, tags), ("note", note.blur, note)):
        listen(partial(_write, site, key), [run_name, field, seen_state], problem).then(refresh, **again)
    deletion.attach(problem)


@dataclass(frozen=True)
class _Shown:
    """Parts of the panel that change by themselves; on read-only pages, the first three."""

    seen: gr.Textbox
    line: gr.HTML
    card: gr.HTML
    stop: gr.Button | None = None
    stop_now: gr.Button | None = None
    talk: gr.Button | None = None
    clone: gr.Button | None = None
    mend: gr.Button | None = None
    form: ResumeForm | None = None
    tags: gr.Dropdown | None = None
    note: gr.Textbox | None = None
    path: gr.Textbox | None = None
    deletion: "_Deletion | None" = None

    @property
    def outputs(self) -> list[Any]:
        """In the order of what `look` answers."""
        always: list[Any] = [self.seen, self.line, self.card]
        if self.form is None or self.deletion is None:
            return always
        buttons = [self.stop, self.stop_now, self.talk, self.clone, self.mend]
        return [*always, *buttons, *self.form.outputs, self.tags, self.note, self.path, self.deletion.help]


def look(site: Site, words: Words, name: str, seen: str, shown: _Shown, chosen: str = "") -> list[Any]:
    """Return the changes of a run since a browser's last request, for each of the outputs.

    Args:
        site: The workspace.
        words: The texts.
        name: The run's name.
        seen: What the browser was answered last.
        shown: The outputs.
        chosen: The checkpoint that is chosen in the browser.
    """
    nothing = [gr.skip()] * len(shown.outputs)
    if not name:
        return nothing
    try:
        run = site.run(name)
        situation = situation_of(run)
    except tunekit.TunekitError as error:
        # It may have been deleted meanwhile.
        digest = f"none {error}"
        return nothing if seen == digest else [digest, told(error), gr.HTML("", visible=False), *_nothing_to_do(shown)]
    all_tags = [] if shown.form is None else tags_in(site)
    # How far it is stands elsewhere. Tags and note are compared by themselves: a browser that edits them is not to lose
    # its edits.
    shows = asdict(replace(situation, step=0, updated=0.0))
    own = {"tags": list(situation.tags), "note": situation.note}
    digest = json.dumps({"shows": hashlib.sha256(f"{name} {shows} {all_tags}".encode()).hexdigest(), **own})
    if seen == digest:
        return nothing
    before = _answered(seen)
    failed = situation.diagnosis
    always = [
        digest,
        line_of(words, situation, read_only=site.read_only),
        gr.HTML(diagnosis.card(site, words, name, failed) if failed else "", visible=failed is not None),
    ]
    if shown.form is None:
        return always
    can_stop = situation.state not in OVER
    return [
        *always,
        gr.Button(visible=can_stop, interactive=situation.wish is None),
        gr.Button(visible=can_stop, interactive=situation.wish != "now"),
        gr.Button(link=site.link(words.language, "chat", run=name, load="1"), visible=situation.state == "finished"),
        gr.Button(link=site.link(words.language, "new", from_=f"run:{name}"), interactive=True),
        gr.Button(visible=bool(failed and failed.can_go_on and failed.changes and situation.can_go_on)),
        *shown.form.updates(situation, chosen),
        gr.Dropdown(choices=all_tags, **({} if before["tags"] == own["tags"] else {"value": own["tags"]})),
        gr.skip() if before["note"] == own["note"] else own["note"],
        str(run.path),
        f"<p>{escape(words('controls.delete_help', name=name))}</p>",
    ]


def _answered(seen: str) -> dict[str, Any]:
    """Return the tags and the note that a browser was answered last; at first it shows none."""
    answered = json.loads(seen) if seen.startswith("{") else {}
    return {"tags": answered.get("tags", []), "note": answered.get("note", "")}


def _nothing_to_do(shown: _Shown) -> list[Any]:
    """Return the values of the rest of the panel where there is no run."""
    if shown.form is None:
        return []
    disabled = [gr.Button(interactive=False)] * 4
    return [*disabled, gr.Button(visible=False), *shown.form.disabled(), gr.skip(), gr.skip(), "", ""]


def line_of(words: Words, found: Situation, *, read_only: bool = False) -> str:
    """Describe why the run waits, and why a button is disabled, a sentence each."""
    sentences: list[tuple[str, str]] = []
    if found.place is not None:
        behind = ", ".join(found.behind)
        key = "controls.waits_first" if found.place == 1 else "controls.waits"
        sentences.append(("controls-ends", words(key, place=found.place, behind=behind)))
    if found.wish is not None:
        sentences.append(("controls-ends", words("controls.wish_now" if found.wish == "now" else "controls.wish_step")))
    if found.stopping:
        sentences.append(("controls-ends", found.stopping))
    if found.stopped:
        sentences.append(("controls-ends", found.stopped))
    if read_only:
        sentences.append(("", words("controls.read_only")))
    elif found.state == "stuck":
        sentences.append(("", words("controls.stuck")))
    elif not found.is_over:
        sentences.append(("", words("controls.runs")))
    elif not found.can_go_on:
        sentences.append(("", words("controls.no_checkpoint")))
    lines = "".join(f"<p class='{kind}'>{escape(text)}</p>" for kind, text in sentences)
    return f"<div role='status'>{lines}</div>"


def tags_in(site: Site) -> list[str]:
    """All tags of the workspace's runs."""
    return sorted({tag for line in listing_of(site.root).lines() for tag in line.tags})


class _StopNow:
    """The question whether a run is really to end at once.

    Args:
        words: The texts.
    """

    def __init__(self, words: Words) -> None:
        with gr.Group(visible=False, elem_id="controls-stop-now-ask") as self.group:
            gr.HTML(f"<p>{escape(words('controls.stop_now_ask'))}</p>", padding=True)
            with gr.Row():
                self.sure = gr.Button(
                    words("controls.stop_now_sure"), variant="stop", size="md", elem_id="controls-stop-now-sure"
                )
                self.no = gr.Button(words("controls.stop_now_not"), size="md", elem_id="controls-stop-now-not")

    def attach(self, opener: gr.Button) -> None:
        """Have a button ask it, and an answer take it away."""
        opener.click(lambda: gr.Group(visible=True), outputs=self.group, show_progress="hidden")
        for answer in (self.sure, self.no):
            answer.click(lambda: gr.Group(visible=False), outputs=self.group, show_progress="hidden")


class _Deletion:
    """Deletion of a run, once its name was typed.

    Args:
        site: The workspace.
        words: The texts.
        run_name: The run's name.
    """

    def __init__(self, site: Site, words: Words, run_name: gr.Textbox) -> None:
        self._site, self._words, self._run_name = site, words, run_name
        with gr.Column(elem_id="controls-delete"):
            gr.HTML(f"<h2>{escape(words('controls.delete'))}</h2>")
            self.help = gr.HTML(elem_id="controls-delete-help")
            self._typed = gr.Textbox("", label=words("controls.delete_name"), elem_id="controls-delete-name")
            self._sure = gr.Button(
                words("controls.delete_sure"), variant="stop", interactive=False, elem_id="controls-delete-sure"
            )
            self._to = gr.Textbox(visible=False)

    def attach(self, problem: gr.HTML) -> None:
        """Attach the events; what goes wrong is shown in `problem`."""
        names = [self._run_name, self._typed]
        self._typed.change(
            lambda name, typed: gr.Button(interactive=bool(name) and typed.strip() == name), names, self._sure,
            show_progress="hidden", trigger_mode="always_last",
        )  # fmt: skip
        clicked = self._sure.click(self._delete, names, [problem, self._to])
        clicked.then(None, self._to, None, js=GO)

    def _delete(self, name: str, typed: str) -> tuple[Any, str]:
        try:
            run = self._site.run(name)
            if typed.strip() != name:
                raise tunekit.TunekitError(f"{typed!r} is not {name!r}", hint="type its name")
            tunekit.delete_run(run)
        except tunekit.TunekitError as error:
            return message(told(error)), ""
        situation.forget(run)
        return message(""), self._site.link(self._words.language, "runs")


def _tags_and_folder(words: Words) -> tuple[gr.Dropdown, gr.Textbox, gr.Textbox]:
    with gr.Row():
        tags = gr.Dropdown(
            [], multiselect=True, allow_custom_value=True, label=words("controls.tags"),
            info=words("controls.tags_help"), elem_id="controls-tags", min_width=280,
        )  # fmt: skip
        path = gr.Textbox(
            label=words("controls.path"), interactive=False, buttons=["copy"], elem_id="controls-path", min_width=280
        )
    note = gr.Textbox(
        "", label=words("runs.note"), info=words("controls.note_help"), lines=2, max_lines=12, elem_id="controls-note"
    )
    return tags, note, path


def _stop(site: Site, name: str, *, now: bool) -> Any:
    try:
        situation.stop(site.run(name), now=now)
    except tunekit.TunekitError as error:
        return message(told(error))
    return message("")


WRITERS: dict[str, Callable[[tunekit.Run, Any], Any]] = {"tags": tunekit.set_tags, "note": tunekit.set_note}
"""Functions that write tags and note of a run."""


def _write(site: Site, key: str, name: str, value: Any, seen: str) -> Any:
    # What the browser was answered is nobody's wish: an answer that is late comes after words that were typed.
    if _answered(seen)[key] == value:
        return gr.skip()
    try:
        run = site.run(name)
        WRITERS[key](run, value)
    except tunekit.TunekitError as error:
        return message(told(error))
    situation.forget(run)
    return message("")
