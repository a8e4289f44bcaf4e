"""Notes at the fields of the form: the plan's choice where the draft leaves one, and the effect of the last edit.

They are CSS, so that a form that is made anew keeps them. The effect of the last edit stands in the plan in brief too,
where a screen reader finds it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape

import tunekit
from tunekit import frontend
from webui import draft
from webui.form import id_of
from webui.plan_view import BRIEF, FIGURES
from webui.words import Words

FIELDS = {
    "layout": "parallel.strategy",
    "precision": "model.dtype",
    "attention": "model.attn_implementation",
    "kernels": "model.kernels",
    "chat template": "model.chat_template",
    "padding": "data.padding_free",
    "batch": "train.micro_batch_size",
    "checkpointing": "train.gradient_checkpointing",
    "compile": "train.torch_compile",
    "optimizer": "train.learning_rate",
    "steps": "train.eval_steps",
    "checkpoints": "train.save_steps",
}
"""Fields that a decision of the plan fills in where the draft does not, by its topic."""

MAX_EDITS = 3
"""Number of fields that change at once in an edit; more are another draft."""

_UNITS = {"GiB": " GiB", "USD": " USD"}


@dataclass(frozen=True)
class Seen:
    """The last plan that a page showed, and what the last edit changed.

    Attributes:
        machine: The machine that it is for.
        text: The draft.
        figures: Its figures, by their names; empty where the draft does not fit.
        keys: The fields that the last edit changed.
        effect: The change of the figures by it.
    """

    machine: str = ""
    text: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    effect: str = ""


def seen(before: Seen, machine: str, text: str, plan: tunekit.Plan | tunekit.TunekitError, words: Words) -> Seen:
    """Return what is seen of a plan, with the effect of the edits since an earlier one of the same machine.

    Args:
        before: The earlier plan.
        machine: The machine.
        text: The draft, which is valid.
        plan: Its plan.
        words: The page's texts.
    """
    figures = {} if isinstance(plan, tunekit.TunekitError) else _figures(plan)
    if machine != before.machine:
        return Seen(machine, text, figures)
    keys = changed_keys(before.text, text)
    if not keys:
        return Seen(machine, text, figures, before.keys, before.effect)
    if len(keys) > MAX_EDITS:
        return Seen(machine, text, figures)
    return Seen(machine, text, figures, keys, _effect(before.figures, figures, words))


def _figures(plan: tunekit.Plan) -> dict[str, str]:
    figures = frontend.plan_figures(plan)
    return {name: figures[name].partition(" of ")[0] + _UNITS.get(name, "") for name in BRIEF if name in figures}


def _effect(before: Mapping[str, str], after: Mapping[str, str], words: Words) -> str:
    """Return the change of the figures of a plan in words."""
    if not before or not after:
        return words("plan.fits_now") if after else words("plan.fits_no_more") if before else ""
    changes = [
        f"{words(f'plan.{FIGURES[name]}')} {before.get(name, '–')} → {after.get(name, '–')}"
        for name in BRIEF
        if before.get(name) != after.get(name)
    ]
    return " · ".join(changes) or words("plan.no_effect")


def changed_keys(before: str, after: str) -> tuple[str, ...]:
    """Return the fields in which two drafts differ; empty where one cannot be read."""
    try:
        old, new = (
            {entry.key: entry.value for entry in draft.entries_of(text) if entry.kind not in ("section", "sections")}
            for text in (before, after)
        )
    except tunekit.TunekitError:
        return ()
    keys = dict.fromkeys([*old, *new])
    return tuple(key for key in keys if old.get(key, frontend.UNSET) != new.get(key, frontend.UNSET))


def effect_html(found: Seen) -> str:
    """Render the effect of the last edit; empty where there is none."""
    if not found.effect:
        return ""
    return f"<p class='plan-effect'><code>{escape(', '.join(found.keys))}</code>: {escape(found.effect)}</p>"


def notes_html(found: Seen, plan: tunekit.Plan | tunekit.TunekitError, words: Words) -> str:
    """Render the notes at the fields, as a style sheet."""
    notes = dict(_chosen(found.text, plan, words))
    for key in found.keys if found.effect else ():
        notes[key] = f"{words('plan.last_edit')} {found.effect}"
    rules = "".join(f"#{id_of(key)}::after{{content:{_css(note)}}}" for key, note in notes.items())
    return f"<style>{rules}</style>"


def _chosen(text: str, plan: tunekit.Plan | tunekit.TunekitError, words: Words) -> Iterable[tuple[str, str]]:
    """Yield the fields that the plan fills in, each with its choice and reason."""
    if isinstance(plan, tunekit.TunekitError):
        return
    open_keys = {entry.key for entry in draft.entries_of(text) if entry.value in (frontend.UNSET, "auto")}
    for decision in plan.decisions:
        key = FIELDS.get(decision.topic)
        if key in open_keys:
            why = f" ({decision.why})" if decision.why else ""
            yield str(key), f"{words('plan.by_plan')} {decision.choice}{why}"


def _css(text: str) -> str:
    """A string of CSS, which ends neither itself nor the element that it stands in."""
    return '"' + re.sub(r'[\\"<>&\n\r\f]', lambda found: f"\\{ord(found[0]):x} ", text) + '"'
