"""Settings of charts, stored by the browser for all runs; the runs compared in them are stored in the address.

What a browser hands over may be anything, so each part of it that is not what it should be is left out.
"""

from typing import Any

import gradio as gr

STORAGE_KEY = "tunekit-charts"

FIRST: dict[str, Any] = {"smoothing": 0.0, "is_log": False, "by": "step", "clip": False}
"""Initial settings of a browser that has stored none yet."""

MAX_SMOOTHING = 0.99


def kept_looks() -> gr.BrowserState:
    """Return the browser's stored settings, made on each page that has charts."""
    # Fixed, so that it outlives a restart of the server; it hides nothing from the browser that holds it.
    return gr.BrowserState(dict(FIRST), storage_key=STORAGE_KEY, secret="tunekit")


def looks_in(kept: Any) -> dict[str, Any]:
    """Return the settings that a browser stored, with defaults for missing or invalid ones."""
    kept = kept if isinstance(kept, dict) else {}
    looks = dict(FIRST)
    smoothing = kept.get("smoothing")
    if isinstance(smoothing, int | float) and 0 <= smoothing <= MAX_SMOOTHING:
        looks["smoothing"] = smoothing
    looks["by"] = "time" if kept.get("by") == "time" else "step"
    return looks | {key: kept.get(key) is True for key in ("is_log", "clip")}


def keep(kept: gr.BrowserState, **fields: Any) -> None:
    """Have a browser keep what fields say, by their names in `FIRST`; what they do not say stays."""
    names = ", ".join(fields)
    js = f"(kept, {names}) => ({{...kept, {names}}})"
    for field in fields.values():
        field.input(None, [kept, *fields.values()], [kept], js=js)
