"""Actions on the runs that are ticked in the table: tag them, or delete them."""

import json
from html import escape
from typing import Any

import gradio as gr

import tunekit
from webui import situation
from webui.resume_form import message
from webui.site import Site
from webui.words import Words, told


class ChosenRuns:
    """The panel below the table.

    Args:
        site: The workspace.
        words: The texts.
    """

    def __init__(self, site: Site, words: Words) -> None:
        self._site, self._words = site, words
        self._names = gr.Textbox("[]", visible=False)
        with gr.Column(visible=False, elem_id="chosen-panel") as self._panel:
            self._line = gr.HTML(elem_id="chosen-line")
            with gr.Row():
                self._tags = gr.Dropdown(
                    [], multiselect=True, allow_custom_value=True, label=words("runs.chosen_tags"),
                    info=words("controls.tags_help"), elem_id="chosen-tags", min_width=240,
                )  # fmt: skip
                self._add = gr.Button(words("runs.chosen_add"), elem_id="chosen-add", scale=0, min_width=160)
            with gr.Row():
                self._typed = gr.Textbox(
                    label=words("runs.chosen_confirm"), elem_id="chosen-confirm", max_lines=1, min_width=240
                )
                self._delete = gr.Button(
                    words("runs.chosen_delete"), variant="stop", interactive=False, elem_id="chosen-delete", scale=0,
                    min_width=160,
                )  # fmt: skip
        self._problem = gr.HTML(elem_id="chosen-problem", visible=False)

    def attach(self, table: gr.HTML, update: dict[str, Any]) -> None:
        """Attach the events. The table tells which runs are ticked; `update` fills it anew."""
        quiet: dict[str, Any] = {"show_progress": "hidden"}
        table.input(self._choose, None, [self._names, self._panel, self._line, self._typed, self._delete], **quiet)
        inputs = [self._names, self._typed]
        self._typed.change(self._confirm, inputs, self._delete, trigger_mode="always_last", **quiet)
        tagged = self._add.click(self._tag, [self._names, self._tags], [self._problem, self._tags])
        tagged.then(**update)
        deleted = self._delete.click(self._delete_all, inputs, [self._problem, self._typed])
        deleted.then(**update)

    def _choose(self, event: gr.EventData) -> list[Any]:
        names = [str(name) for name in event.runs]
        title = escape(self._words("runs.chosen", num=len(names)))
        line = f"<p><strong>{title}</strong> {escape(', '.join(names))}</p>"
        # What was typed confirms no other selection.
        return [json.dumps(names), gr.Column(visible=bool(names)), line, "", gr.Button(interactive=False)]

    def _confirm(self, names: str, typed: str) -> Any:
        return gr.Button(interactive=_is_confirmed(json.loads(names), typed))

    def _tag(self, names: str, tags: list[str] | None) -> list[Any]:
        faults: list[tunekit.TunekitError] = []
        for name in json.loads(names):
            try:
                run = self._site.run(name)
                tunekit.set_tags(run, [*run.tags, *(tags or [])])
                situation.forget(run)
            except tunekit.TunekitError as error:
                faults.append(error)
        return [message("".join(map(told, faults))), gr.skip() if faults else []]

    def _delete_all(self, names: str, typed: str) -> list[Any]:
        pending: list[str] = json.loads(names)
        if not _is_confirmed(pending, typed):
            return [gr.skip(), gr.skip()]
        faults: dict[str, tunekit.TunekitError] = {}
        # A run whose model another one of them starts from can be deleted after that.
        while pending:
            before = len(pending)
            results = {name: self._deleted(name) for name in pending}
            faults = {name: fault for name, fault in results.items() if fault is not None}
            pending = list(faults)
            if len(pending) == before:
                break
        return [message("".join(map(told, faults.values()))), ""]

    def _deleted(self, name: str) -> tunekit.TunekitError | None:
        """Delete a run; return why it cannot be."""
        try:
            run = self._site.run(name)
            tunekit.delete_run(run)
        except tunekit.TunekitError as error:
            return error
        situation.forget(run)
        return None


def _is_confirmed(names: list[str], typed: str) -> bool:
    """Return whether somebody typed how many runs are to be deleted."""
    return bool(names) and typed.strip() == str(len(names))
