"""Memory and speed of a draft, on this machine or any other, and the button that starts it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

import tunekit
from tunekit import frontend
from webui import launching, plan_notes
from webui.failures import told_by
from webui.form_lock import ACT, DONE, PRESS, SETTLED
from webui.in_order import attach_in_order
from webui.plan_view import brief_html, plan_html, refused_html, side_by_side
from webui.planning import HERE, Planned, planned, with_changes
from webui.site import Site
from webui.words import Words, told

NOWHERE = ""
"""Stands for no second machine."""

LOOK_TICKS = 5
"""Number of the site's ticks until the devices are probed again."""

GO = "(url) => { if (url) window.location = url }"
"""Leads a browser to an address that is not empty."""


@dataclass(frozen=True)
class Launch:
    """Start of a run beside the form: the plan in brief, changes that make it fit, and the buttons."""

    brief: gr.HTML
    mend: gr.Button
    check: gr.Button
    start: gr.Button
    reason: gr.HTML
    said: gr.HTML
    devices: gr.CheckboxGroup
    name: gr.Textbox
    waits: gr.Checkbox


def make_launch(words: Words, *, read_only: bool) -> Launch:
    """Make the components of the launch, inside a context of Gradio's; where pages only show, nothing starts."""
    planning = f"<p role='status'>{escape(words('plan.planning'))}</p>"
    with gr.Column(elem_id="plan-launch"):
        # On a phone, this part stays in sight at the bottom of the screen.
        with gr.Column(elem_id="plan-bar"):
            brief = gr.HTML(planning, elem_id="plan-brief")
            mend = gr.Button(visible=False, size="md", elem_id="plan-mend")
            with gr.Row(elem_id="plan-buttons"):
                check = gr.Button(words("plan.check"), size="md", min_width=120, elem_id="plan-check")
                start = gr.Button(
                    words("plan.start"),
                    variant="primary",
                    size="md",
                    min_width=120,
                    interactive=False,
                    visible=not read_only,
                    elem_id="plan-start",
                )
            reason = gr.HTML(elem_id="plan-reason", padding=False)
            message = gr.HTML(elem_id="plan-said")
        with gr.Accordion(words("plan.start_title"), open=False, visible=not read_only, elem_id="plan-options"):
            name = gr.Textbox(
                label=words("plan.name"), info=words("plan.name_info"), max_length=64, max_lines=1, elem_id="plan-name"
            )
            devices = gr.CheckboxGroup(
                [], label=words("plan.devices"), info=words("plan.devices_info"), elem_id="plan-devices"
            )
            waits = gr.Checkbox(label=words("plan.wait"), info=words("plan.wait_info"), elem_id="plan-wait")
    return Launch(brief, mend, check, start, reason, message, devices, name, waits)


def build(
    page: gr.Blocks,
    site: Site,
    words: Words,
    draft: gr.Component,
    launch: Launch,
    holders: Sequence[gr.Component],
    form: Sequence[gr.Component],
) -> None:
    """The panel, below a draft.

    Args:
        page: The page's Blocks.
        site: The workspace.
        words: The page's texts.
        draft: What holds the draft's YAML text.
        launch: What starts a run of it.
        holders: What else is to hold the text when this panel changes it.
        form: What asks for the form that stands beside it.
    """
    gr.Markdown(f"## {words('plan.title')}", elem_id="plan-title")
    with gr.Row():
        names = [(name, name) for name in frontend.machines()]
        machine = gr.Dropdown(
            [(words("plan.here"), HERE), *names],
            value=HERE,
            label=words("plan.machine"),
            info=words("plan.machine_info"),
            allow_custom_value=True,
            min_width=260,
            elem_id="plan-machine",
        )
        other = gr.Dropdown(
            [(words("plan.nowhere"), NOWHERE), (words("plan.here"), HERE), *names],
            value=NOWHERE,
            label=words("plan.other"),
            info=words("plan.other_info"),
            allow_custom_value=True,
            min_width=260,
            elem_id="plan-other",
        )
    view = gr.HTML(elem_id="plan-plan")
    changes = gr.Textbox(visible=False)
    notes = gr.HTML(elem_id="plan-notes", padding=False)
    latest = gr.State(plan_notes.Seen())
    _attach_start(page, site, words, draft, machine, launch)

    def show(text: str, machine: str, other: str, before: plan_notes.Seen) -> tuple[Any, ...]:
        """The plan of a draft, what would make it fit, and whether it can be started."""
        return shown(site, words, text, machine, other, before)

    inputs = [draft, machine, other, latest]
    told_of = [launch.brief, view, changes, launch.mend, launch.start, launch.reason, notes, latest]
    events = [draft.change, machine.change, other.change]
    attach_in_order(events, show, inputs, told_of, concurrency_limit=4)
    texts = [draft, *holders]

    def mended(text: str, changes: str) -> Any:
        """The draft with the changes; as it is, with its faults shown, where it has become unreadable meanwhile."""
        try:
            return [with_changes(text, changes)] * len(texts)
        except tunekit.TunekitError:
            return [gr.skip()] * len(texts)

    acting = launch.mend.click(None, None, None, js=ACT)
    acted = acting.then(mended, [draft, changes], texts, show_progress="hidden")
    acted.then(None, form, None, js=DONE)
    acted.failure(None, form, None, js=DONE)


def shown(site: Site, words: Words, text: str, machine: str, other: str, before: plan_notes.Seen) -> tuple[Any, ...]:
    """Return the panel of a draft: its plan in brief and whole, changes that make it fit, the start, and why not; last
    the notes at the fields, and what is compared with the next plan.

    Args:
        site: The workspace.
        words: The page's texts.
        text: The draft.
        machine: Where: `HERE` or a machine's name.
        other: Where else, or `NOWHERE`.
        before: The last plan that the page showed.
    """
    if not (text or "").strip():
        return _without_plan(words("plan.empty"), words("plan.not_empty"))
    recipe, _ = tunekit.check_text(text, find_functions=False)
    if recipe is None:
        return _without_plan(words("plan.faults"), words("plan.not_valid"))
    where = [machine or HERE, *([other] if other else [])]
    plans = [planned(site, recipe, name) for name in where]
    views = [
        (words("plan.here") if name == HERE else name, _view(plan, words))
        for name, plan in zip(where, plans, strict=True)
    ]
    changes = plans[0].changes if isinstance(plans[0], tunekit.TunekitError) else ()
    where_to = views[0][0]
    if site.read_only:  # There is no button, and the page says so at its top.
        why_not = ""
    elif where[0] != HERE:
        why_not = words("plan.elsewhere", machine=where[0])
    else:
        why_not = words("plan.not_here") if isinstance(plans[0], tunekit.TunekitError) else ""
    latest = plan_notes.seen(before, where[0], text, plans[0], words)
    return (
        brief_html(plans[0], where_to, words, plan_notes.effect_html(latest)),
        views[0][1] if len(views) == 1 else side_by_side(views),
        "\n".join(changes),
        gr.Button(words("plan.mend", changes=", ".join(changes)), visible=bool(changes)),
        gr.Button(interactive=not why_not),
        _why_not(why_not),
        plan_notes.notes_html(latest, plans[0], words),
        latest,
    )


def _without_plan(said: str, reason: str) -> tuple[Any, ...]:
    return (
        "",
        f"<p role='status'>{escape(said)}</p>",
        "",
        gr.Button(visible=False),
        gr.Button(interactive=False),
        _why_not(reason),
        "",
        gr.skip(),
    )


def _why_not(reason: str) -> str:
    """Describe why nothing can be started, which may quote the user's text."""
    return f"<p>{escape(reason)}</p>" if reason else ""


def _view(plan: Planned, words: Words) -> str:
    return refused_html(plan, words) if isinstance(plan, tunekit.TunekitError) else plan_html(plan, words)


def _attach_start(
    page: gr.Blocks, site: Site, words: Words, draft: gr.Component, machine: gr.Dropdown, launch: Launch
) -> None:
    """Attach what the launch's own components do."""
    devices, message, name = launch.devices, launch.said, launch.name
    url = gr.Textbox(visible=False)

    def look(chosen: list[str] | None) -> Any:
        """The devices as they are now; those that are gone are chosen no more."""
        try:
            devices = tunekit.devices()
        except tunekit.TunekitError as error:
            return gr.CheckboxGroup(choices=[], value=[], info=str(error))
        if [device.uuid for device in devices] == ["cpu"]:
            only = launching.choices(devices, words)
            return gr.CheckboxGroup(only, value=["cpu"], info=words("plan.no_gpu"), interactive=False)
        return gr.CheckboxGroup(
            choices=launching.choices(devices, words),
            value=[device.uuid for device in devices if device.uuid in (chosen or [])],
        )

    @told_by(told)
    def check_all(text: str, name: str | None) -> Iterator[str]:
        yield f"<p role='status'>{escape(words('plan.checking'))}</p>"
        notes = launching.checked(site, text, name or "")
        items = "".join(f"<li lang='en'>{escape(note)}</li>" for note in notes)
        yield f"<p role='status'>{escape(words('plan.checked'))}</p><ul>{items}</ul>"

    for event in (page.load, gr.Timer(LOOK_TICKS * site.tick_seconds).tick):
        event(look, devices, devices, show_progress="hidden")
    checking = launch.check.click(None, None, None, js=SETTLED)
    checking.then(check_all, [draft, name], message, show_progress="hidden", concurrency_limit=2, trigger_mode="once")
    if site.read_only:
        return

    # What is folded and was never opened has no value.
    @told_by(lambda error: (told(error), "", gr.Button(interactive=True)))
    def begin(
        text: str, machine: str | None, name: str | None, devices: list[str] | None, waits: bool | None
    ) -> Iterator[tuple[str, str, Any]]:
        yield f"<p role='status'>{escape(words('plan.starting'))}</p>", "", gr.Button(interactive=False)
        run = launching.begin(site, text, name or "", devices or [], waits=bool(waits), machine=machine or HERE)
        link = site.link(words.language, "runs", run=run.name)
        started = words("plan.started", run=run.name)
        yield f"<p role='status'><a href='{escape(link)}'>{escape(started)}</a></p>", link, gr.Button(interactive=True)

    # What was typed last is in the draft before it is started.
    starting = launch.start.click(None, None, None, js=PRESS)
    begun = starting.then(
        begin, [draft, machine, name, devices, launch.waits], [message, url, launch.start], show_progress="hidden",
        concurrency_limit=4, trigger_mode="once",
    )  # fmt: skip
    begun.then(look, devices, devices, show_progress="hidden").then(None, url, None, js=GO)
