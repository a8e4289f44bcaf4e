"""The form of a recipe, made from its schema: a field for each that applies to what the draft says.

Fields that most people set stand open, the others below them, folded. A field's help is the schema's sentence about it;
where the draft is wrong, what the command line would say of it stands there too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import gradio as gr

from tunekit import frontend
from webui.fields import choices, default_text, is_choosing_several, shown
from webui.words import Words

SECTIONS = ("model", "data", "method", "adapter", "train", "parallel", "output")
OPEN = ("model", "data", "method", "adapter", "train")
"""Sections that are unfolded."""

EVERYDAY = (
    "model.path",
    "data.train.path",
    "data.train.weight",
    "data.eval.path",
    "data.eval_size",
    "data.max_length",
    "data.packing",
    "method.type",
    "method.beta",
    "method.loss_type",
    "method.rewards.type",
    "method.rewards.weight",
    "method.num_generations",
    "method.max_completion_length",
    "method.teacher.path",
    "adapter.type",
    "adapter.rank",
    "adapter.alpha",
    "train.num_epochs",
    "train.max_steps",
    "train.global_batch_size",
    "train.learning_rate",
    "output.name",
)
"""Fields that stand open and have names in every language, by their keys without positions."""


def name_of(key: str) -> str:
    """A key without positions: `data.train.path` of `data.train[1].path`."""
    return re.sub(r"\[[0-9]+\]", "", key)


def id_of(key: str) -> str:
    """The `elem_id` of a field: `form-data-train-1-path` of `data.train[1].path`."""
    return "form-" + re.sub(r"[\[\].]+", "-", key).strip("-")


def faults_by_entry(entries: Sequence[frontend.Entry], faults: Sequence[frontend.Fault]) -> dict[str, str]:
    """Return the fault of each field, by its key: at the field itself, or the first one of a missing section."""
    fault_texts: dict[str, str] = {}
    keys = [entry.key for entry in entries if entry.kind not in ("section", "sections")]
    for fault in faults:
        at = [key for key in keys if key == fault.key or _is_below(fault.key, key)]
        at = at or [key for key in keys if _is_below(key, fault.key)]
        if fault.key and at and at[0] not in fault_texts:
            fault_texts[at[0]] = fault.message
    return fault_texts


def _is_below(key: str, above: str) -> bool:
    return key.startswith((f"{above}.", f"{above}["))


def info_of(entry: frontend.Entry, words: Words, fault: str | None) -> str:
    """The help of a field: what is wrong with it, if anything, and what it means."""
    text = words.translated(_of_variant(entry) if entry.is_tag else entry.description)
    if entry.kind in ("int", "float", "mapping", "list") and entry.takes:
        text += f" {words('form.takes', takes=words.translated(entry.takes))}"
    if entry.key.endswith("trust_remote_code"):
        text += f" {words('form.no_remote_code')}"
    return f"✗ {fault} · {text}" if fault else text


def _of_variant(entry: frontend.Entry) -> str:
    """Return the schema's text on the chosen variant: its part of the help of a tag."""
    words = "|".join(re.escape(str(word)) for word in entry.choices)
    parts = re.split(rf"(?:^|(?<=\. ))({words}): ", entry.description)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    return texts.get(str(shown(entry)), entry.description).strip()


@dataclass
class Form:
    """The fields of a form that was made, in the order of their keys."""

    fields: dict[str, gr.components.Component] = field(default_factory=dict)
    folds: list[tuple[gr.Accordion, list[str]]] = field(default_factory=list)
    """Folds, with the keys of their fields."""

    adds: list[tuple[gr.Dropdown | gr.Button, frontend.Entry]] = field(default_factory=list)
    """Buttons that add a section to a list."""

    removes: list[tuple[gr.Button, str]] = field(default_factory=list)
    """Buttons that remove a section, with its key."""


def matching(entries: Sequence[frontend.Entry], asked: str, words: Words) -> list[frontend.Entry]:
    """The fields whose key or help, in English or the page's language, has all the words that somebody looks for."""
    parts = asked.lower().split()
    return [
        entry
        for entry in entries
        if entry.kind not in ("section", "sections")
        and all(
            part in f"{entry.key} {entry.description} {words.translated(entry.description)}".lower() for part in parts
        )
    ]


def make_form(entries: Sequence[frontend.Entry], faults: dict[str, str], words: Words, asked: str) -> Form:
    """Make the components of a form, inside a context of Gradio's.

    Args:
        entries: What there is to fill in.
        faults: What is wrong, by key.
        words: The texts.
        asked: What somebody looks for, if anything: only fields that match it are made.
    """
    form = Form()
    if asked.strip():
        selection = matching(entries, asked, words)
        if not selection:
            gr.HTML(f"<p class='form-empty'>{escape(words('form.nothing_found', asked=asked))}</p>")
        for entry in selection:
            form.fields[entry.key] = make_field(entry, words, faults.get(entry.key))
        return form
    for section in SECTIONS:
        inside = [entry for entry in entries if entry.section == section]
        is_open = section in OPEN or any(entry.key in faults for entry in inside)
        title = words(f"form.section_{section}")
        with gr.Accordion(title, open=is_open, elem_id=f"form-section-{section}", key=f"section-{section}") as fold:
            _fill(form, inside, words, faults, section)
        form.folds.append((fold, [entry.key for entry in inside]))
    return form


def _fill(form: Form, entries: Sequence[frontend.Entry], words: Words, faults: dict[str, str], where: str) -> None:
    """Make the fields of a section: what most people set, its lists of sections, and the rest, folded."""
    lists = [entry for entry in entries if entry.kind == "sections"]
    listed = {child.key for entry in lists for child in entries if _is_below(child.key, entry.key)}
    plain = [entry for entry in entries if entry.kind not in ("section", "sections") and entry.key not in listed]
    everyday = [entry for entry in plain if entry.is_required or entry.is_tag or name_of(entry.key) in EVERYDAY]
    rarer = [entry for entry in plain if entry not in everyday]
    for entry in [child for child in everyday if child.is_tag]:
        form.fields[entry.key] = make_field(entry, words, faults.get(entry.key))
    for entry in lists:
        _fill_list(form, entry, [child for child in entries if _is_below(child.key, entry.key)], words, faults)
    common = [child for child in everyday if not child.is_tag]
    for start in range(0, len(common), 2):
        with gr.Row(key=f"row-{where}-{common[start].key}"):
            for entry in common[start : start + 2]:
                form.fields[entry.key] = make_field(entry, words, faults.get(entry.key))
    if rarer:
        is_open = any(entry.key in faults for entry in rarer)
        title = words("form.more", number=len(rarer))
        with gr.Accordion(title, open=is_open, elem_id=f"{id_of(where)}-more", key=f"more-{where}") as fold:
            for entry in rarer:
                form.fields[entry.key] = make_field(entry, words, faults.get(entry.key))
        form.folds.append((fold, [entry.key for entry in rarer]))


def _fill_list(
    form: Form, entry: frontend.Entry, below: Sequence[frontend.Entry], words: Words, faults: dict[str, str]
) -> None:
    """Make the fields of each section of a list, with what adds and removes them."""
    kind = entry.key.replace(".", "_")
    for position in range(entry.num_items or 0):
        key = f"{entry.key}[{position}]" if entry.is_list else entry.key
        with gr.Group(elem_classes="form-item", key=f"item-{key}"):
            with gr.Row(key=f"head-{key}"):
                gr.HTML(f"<h2>{escape(words(f'form.item_{kind}', number=position + 1))}</h2>", key=f"title-{key}")
                if not (entry.is_required and (entry.num_items or 0) == 1):
                    label = words("form.remove", what=words(f"form.item_{kind}", number=position + 1))
                    remove = gr.Button(
                        label, size="sm", elem_id=f"{id_of(key)}-remove", min_width=140, scale=0, key=f"remove-{key}"
                    )
                    form.removes.append((remove, key))
            _fill(form, [child for child in below if _is_below(child.key, key)], words, faults, key)
    label = words(f"form.add_{kind}")
    if entry.choices:
        add = gr.Dropdown(
            [("", ""), *(str(choice) for choice in entry.choices)],
            value="",
            label=label,
            elem_id=f"{id_of(entry.key)}-add",
            key=f"add-{entry.key}",
            preserved_by_key=[],
        )
        form.adds.append((add, entry))
    else:
        form.adds.append(
            (gr.Button(label, size="sm", elem_id=f"{id_of(entry.key)}-add", key=f"add-{entry.key}"), entry)
        )


def make_field(entry: frontend.Entry, words: Words, fault: str | None) -> gr.components.Component:
    """The component of a field."""
    name = name_of(entry.key)
    label = f"{words('form.field_' + name.replace('.', '_'))} · {entry.key}" if name in EVERYDAY else entry.key
    common: dict[str, Any] = {
        "label": label,
        "info": info_of(entry, words, fault),
        "elem_id": id_of(entry.key),
        "elem_classes": classes_of(fault),
        "key": f"field-{entry.key}-{entry.kind}",
        "preserved_by_key": [],
        "min_width": 240,
    }
    there, default = shown(entry), default_text(entry)
    if entry.kind == "bool":
        is_fixed = entry.key.endswith("trust_remote_code")
        return gr.Checkbox(bool(there), interactive=not is_fixed, **common)
    if is_choosing_several(entry):
        return gr.Dropdown(choices(entry), value=there, multiselect=True, interactive=True, **common)
    if entry.kind == "choice":
        empty = words("form.default", default=default) if default else words("form.left_out")
        offered: list[Any] = choices(entry) if entry.is_tag else [(empty, ""), *choices(entry)]
        return gr.Dropdown(offered, value=there, allow_custom_value=entry.is_open, interactive=True, **common)
    placeholder = words("form.required") if entry.is_required else default or words("form.left_out")
    lines, most = {"list": (1, 8), "mapping": (2, 12), "text": (1, 6)}.get(entry.kind, (1, 1))
    return gr.Textbox(there, lines=lines, max_lines=most, placeholder=placeholder, interactive=True, **common)


def classes_of(fault: str | None) -> list[str]:
    """The classes of a field."""
    return ["form-field", "form-faulty"] if fault else ["form-field"]
