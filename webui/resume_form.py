"""Checkpoint and edits of a resume: the effect of each is shown before anything is done."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

import tunekit
from tunekit import frontend
from webui import situation
from webui.reach import check_edits
from webui.site import Site
from webui.situation import Situation, situation_of
from webui.words import Words, told

_starting: set[str] = set()
"""Runs that are being started: a second click, in whichever browser, starts nothing."""

_lock = threading.Lock()


class ResumeForm:
    """A checkpoint to choose, edits, what becomes of them, and the button.

    Args:
        site: The workspace.
        words: The texts.
        run_name: The run's name.
    """

    def __init__(self, site: Site, words: Words, run_name: gr.Textbox) -> None:
        self._site, self._words, self._run_name = site, words, run_name
        with gr.Column(elem_id="controls-resume"):
            heading = f"<h2>{escape(words('controls.resume'))}</h2><p>{escape(words('controls.resume_help'))}</p>"
            gr.HTML(heading)
            with gr.Row():
                # A request may name one that is no longer offered by then, as when a run was just resumed. Gradio would
                # answer with an error; whoever uses the name looks for it among the run's own.
                self.checkpoint = gr.Dropdown(
                    [(words("controls.newest"), "")], value="", label=words("controls.checkpoint"),
                    elem_id="controls-checkpoint", min_width=280, allow_custom_value=True,
                )  # fmt: skip
                self.edits = gr.Textbox(
                    "", label=words("controls.edits"), info=words("controls.edits_help"), lines=2, max_length=4000,
                    elem_id="controls-edits", min_width=280,
                )  # fmt: skip
            with gr.Row():
                self.weights_only = gr.Checkbox(
                    label=words("controls.weights_only"), info=words("controls.weights_only_help"),
                    elem_id="controls-weights-only", min_width=280,
                )  # fmt: skip
                self.queue = gr.Checkbox(
                    label=words("controls.queue"), info=words("controls.queue_help"), elem_id="controls-queue",
                    min_width=280,
                )  # fmt: skip
            self.effects = gr.HTML(elem_id="controls-effects")
            # Its change has the effects looked at, which decide whether the button is enabled.
            self.can_go_on = gr.Textbox("", visible=False)
            self.go_on = gr.Button(
                words("controls.go_on"), variant="primary", interactive=False, elem_id="controls-go-on"
            )

    @property
    def outputs(self) -> list[Any]:
        """Outputs that follow the run."""
        return [self.checkpoint, self.can_go_on]

    def updates(self, found: Situation, chosen: str) -> list[Any]:
        """The same, for what a run is at. A chosen checkpoint that is gone is chosen no longer."""
        choices = choices_of(self._words, found)
        stays = {} if chosen in dict(choices).values() else {"value": ""}
        return [gr.Dropdown(choices=choices, **stays), "yes" if found.can_go_on else ""]

    def disabled(self) -> list[Any]:
        """The same, where there is no run."""
        return [gr.skip(), ""]

    def attach(
        self,
        manage: gr.Accordion,
        mend: gr.Button,
        problem: gr.HTML,
        refresh: Callable[..., list[Any]],
        again: dict[str, Any],
    ) -> None:
        """Attach the events.

        Args:
            manage: What the form is in.
            mend: The button that fills in the change that mends a failure.
            problem: Where it is shown what goes wrong.
            refresh: Looks at the run again.
            again: What that takes and answers.
        """
        inputs = [self._run_name, self.checkpoint, self.edits, self.weights_only]

        def effects(
            name: str, checkpoint: str, edits: str, weights_only: bool, can_go_on: str
        ) -> tuple[str, dict[str, Any]]:
            outcome = effects_of(self._site, self._words, name, checkpoint, edits, weights_only=weights_only)
            return outcome.html, gr.update(interactive=outcome.is_possible and bool(can_go_on))

        def mended(name: str) -> tuple[Any, Any]:
            diagnosis = situation_of(self._site.run(name)).diagnosis
            return "\n".join(diagnosis.changes if diagnosis else ()), gr.Accordion(open=True)

        follow: dict[str, Any] = {
            "fn": effects,
            "inputs": [*inputs, self.can_go_on],
            "outputs": [self.effects, self.go_on],
            "show_progress": "hidden",
        }
        # Each by itself: of several in one, the last may be lost while another is answered.
        for changed in (self.edits.change, self.checkpoint.input, self.weights_only.change, self.can_go_on.change):
            changed(**follow, trigger_mode="always_last")
        # Requests of two events may overtake one another: what was typed while the form opened is asked for again.
        manage.expand(**follow).then(**follow)
        filled = mend.click(mended, self._run_name, [self.edits, manage], show_progress="hidden")
        filled.then(**follow)
        started = self.go_on.click(self._start, [*inputs, self.queue], [problem, self.edits, self.weights_only])
        started.then(refresh, **again)

    def _start(self, name: str, checkpoint: str, edits: str, weights_only: bool, queue: bool) -> tuple[Any, ...]:
        """Resume, and return the message, and the edits and the tick, which are empty once they are the run's."""
        try:
            run = self._site.run(name)
            check_edits(self._site, run, lines_of(edits))
            _check_offered(run, checkpoint)
            effects = frontend.effects_of(run, lines_of(edits), from_=checkpoint or None, weights_only=weights_only)
            for why_not in _why_not(self._words, effects):
                raise tunekit.TunekitError(why_not)
            with _lock:
                if name in _starting:
                    raise tunekit.TunekitError(self._words("controls.already"))
                _starting.add(name)
            try:
                tunekit.start_resume(
                    run, lines_of(edits), from_=checkpoint or None, weights_only=weights_only, queue=queue
                )
            finally:
                with _lock:
                    _starting.discard(name)
        except tunekit.TunekitError as error:
            return message(told(error)), gr.skip(), gr.skip()
        situation.forget(run)
        return message(f"<p role='status'>{escape(self._words('controls.going_on'))}</p>"), "", False


def _check_offered(run: tunekit.Run, checkpoint: str) -> None:
    """Check that a chosen checkpoint is one of a run's, whose name in the browser may be any text, such as a path.

    Raises:
        TunekitError: It is not.
    """
    if not checkpoint:
        return
    names = [one.name for one in tunekit.checkpoints(run)]
    if checkpoint not in names:
        hint = f"choose one of {', '.join(names)}" if names else "resume from the newest checkpoint"
        raise tunekit.TunekitError(f"{run.name} has no checkpoint {checkpoint}", hint=hint)


def message(html: str) -> Any:
    """Return the message beneath the buttons; an empty one takes no room."""
    return gr.HTML(html, visible=bool(html))


def lines_of(edits: str | None) -> list[str]:
    """Edits that were typed, one a line; a box in which nothing was ever typed has none."""
    return [line.strip() for line in (edits or "").splitlines() if line.strip()]


def choices_of(words: Words, found: Situation) -> list[tuple[str, str]]:
    """The checkpoints to choose from, each by what it is known by; damaged ones are not among them."""
    return [
        (words("controls.newest"), ""),
        *((_label(words, checkpoint), checkpoint.name) for checkpoint in found.checkpoints if checkpoint.fault is None),
    ]


def _label(words: Words, one: frontend.Checkpoint) -> str:
    parts = [words("controls.of_step", step=one.step)]
    if one.loss is not None:
        parts.append(words("controls.loss", loss=f"{one.loss:.4f}"))
    if one.eval_loss is not None:
        parts.append(words("controls.eval_loss", loss=f"{one.eval_loss:.4f}"))
    parts.append(f"{one.size_bytes / 2**20:,.1f} MiB")
    parts += [words("controls.best")] * one.is_best
    # One that was left behind has the name of another one's step.
    parts += [one.name] * (one.name != f"checkpoint-{one.step}")
    return " · ".join(parts)


@dataclass(frozen=True)
class Effects:
    """Effects of edits as a table, or their problems; and whether a run can be resumed with them."""

    html: str
    is_possible: bool


def effects_of(site: Site, words: Words, name: str, checkpoint: str, edits: str, *, weights_only: bool) -> Effects:
    """Render the effects of edits of a run, and decide whether it can be resumed with them."""
    try:
        run = site.run(name)
        if not lines_of(edits) and not situation_of(run).can_go_on:
            return Effects("", is_possible=False)
        _check_offered(run, checkpoint)
        effects = frontend.effects_of(run, lines_of(edits), from_=checkpoint or None, weights_only=weights_only)
    except tunekit.TunekitError as error:
        return Effects(told(error), is_possible=False)
    if not effects:
        return Effects(f"<p>{escape(words('controls.no_edits'))}</p>", is_possible=True)
    heads = "".join(
        f"<th scope='col'>{escape(words(f'controls.effects_{key}'))}</th>" for key in ("key", "before", "now", "effect")
    )
    rows = "".join(_row(words, effect) for effect in effects)
    caption = escape(words("controls.effects"))
    why_not = "".join(f"<p class='controls-why-not'>{escape(line)}</p>" for line in _why_not(words, effects))
    return Effects(f"<table><caption>{caption}</caption><tr>{heads}</tr>{rows}</table>{why_not}", not why_not)


def _why_not(words: Words, effects: Sequence[frontend.EditEffect]) -> Iterator[str]:
    """Yield why a run cannot be resumed with edits of such effects, and the remedy."""
    for effect, text in (("saved state", "needs_weights_only"), ("refused", "needs_removal")):
        keys = [edit.key for edit in effects if edit.effect == effect]
        if keys:
            yield words(f"controls.{text}", keys=", ".join(keys))


def _row(words: Words, one: frontend.EditEffect) -> str:
    if one.effect == "takes effect":
        effect, mark = words("controls.replans" if one.replans else "controls.takes_effect"), "✓"
    elif one.effect == "saved state":
        effect, mark = words("controls.saved_state"), "△"
    else:
        effect, mark = words("controls.refused"), "✗"
    why = f"<span class='controls-why'>{escape(one.why)}</span>" if one.why else ""
    cells = f"<td><code>{escape(one.key)}</code></td><td>{escape(one.before)}</td><td>{escape(one.now)}</td>"
    return f"<tr>{cells}<td>{mark} {escape(effect)}{why}</td></tr>"
