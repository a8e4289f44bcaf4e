"""One writer at a time: what keeps an edit of the form from being lost while the form is made anew.

Edits of fields reach the draft through the server, and other fields come from there too. Until both have come to an
end, the fields cannot be typed in and nothing is started, saved or changed otherwise. All this is said by the browser
itself, since an answer of the server would come too late.
"""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

from webui.words import Words

FIELDS = "form-fields"
"""Element that contains the form."""

HELD = (FIELDS, "plan-buttons", "plan-mend", "form-save-row")
"""Elements that are disabled while the form is made."""

_CODE = """
const lock = window.formLock = {
  wanted: null,   // the form that the draft needs, by what asked for it
  made: null,     // the form that is there
  tags: null,     // what stands in its fields that decide which others there are
  acting: true,   // whether the draft is being changed as a whole
  merging: false, // whether an edit is under way that may need another form
  num_edits: 0, num_merged: 0, sent: [],
  waiting: [],
  pressed: false,
  look() {
    const held = this.acting || this.merging || this.wanted !== this.made;
    for (const id of HELD) { const part = document.getElementById(id); if (part) part.inert = held; }
    document.getElementById(HELD[0])?.setAttribute("aria-busy", held);
    element.classList.toggle("form-waits", held);
    if (this.num_merged >= this.num_edits) for (const resolve of this.waiting.splice(0)) resolve();
  },
  // A field has changed; gradio sends it now, or after what it is sending.
  edit() { this.num_edits += 1; },
  send(given, places) {
    this.sent.push(this.num_edits);
    const tags = JSON.stringify(places.map((place) => given[place]));
    if (tags !== this.tags) this.merging = true;
    this.tags = tags;
    this.look();
    return given;
  },
  merged(...form) {
    this.num_merged = this.sent.shift() ?? this.num_edits;
    this.merging = this.merging && this.sent.length > 0;
    this.want(...form);
  },
  // The draft is changed as a whole, once all edits are in it.
  async act() { this.acting = true; await this.settled(); },
  settled() { return new Promise((resolve) => { this.waiting.push(resolve); this.look(); }); },
  // A second press while the first waits leads to nothing; once what follows is under way, gradio skips it itself.
  async press() {
    if (this.pressed) await new Promise(() => {});
    this.pressed = true;
    await this.settled();
    setTimeout(() => { this.pressed = false; }, 500);
  },
  done(...form) { this.acting = false; this.want(...form); },
  want(...form) { this.wanted = JSON.stringify(form); this.look(); },
  make(form, tags) {
    this.made = JSON.stringify(form);
    this.tags = JSON.stringify(tags);
    if (!this.sent.length) this.num_merged = this.num_edits;
    this.look();
  },
};
lock.look();
""".replace("HELD", json.dumps(HELD))

ACT = "async () => { await formLock.act(); }"
"""Waits until all edits are in the draft, and locks the form; `DONE` comes after it."""

SETTLED = "async () => { await formLock.settled(); }"
"""Waits until all edits are in the draft."""

PRESS = "async () => { await formLock.press(); }"
"""The same, once for a double click."""

EDIT = "() => { formLock.edit(); }"
WANT = "(...form) => { formLock.want(...form); }"
DONE = "(...form) => { formLock.done(...form); }"
MERGED = "(...form) => { formLock.merged(...form); }"


def make_lock(words: Words) -> None:
    """Make what says that the form is made anew, above it."""
    message = escape(words("form.waits"))
    gr.HTML(
        f"<p role='status'>{message} <progress></progress></p>", elem_id="form-lock", js_on_load=_CODE, padding=False
    )


def send(places: Sequence[int]) -> str:
    """Return the script that sends edits of a form.

    Args:
        places: Of the inputs, those that decide which fields there are.
    """
    return f"(...given) => formLock.send(given, {json.dumps(places)})"


def make_mark(form: Sequence[str], tags: Sequence[Any]) -> None:
    """Say that a form is there, at its end.

    Args:
        form: What asked for it.
        tags: What stands in the fields that decide which others there are.
    """
    gr.HTML("", js_on_load=f"formLock.make({_plain(form)}, {_plain(tags)})", elem_id="form-made", padding=False)


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)
