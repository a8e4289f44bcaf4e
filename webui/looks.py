"""Settings of charts, stored by the browser for all runs; the runs compared in them are stored in the address.

What a browser hands over may be anything, so each part of it that is not what it should be is left out.
"""

from collections.abc import Sequence
from typing import Any

import gradio as gr

from webui.charts import AXES, Kind

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
    if kept.get("by") in AXES:
        looks["by"] = kept["by"]
    return looks | {key: kept.get(key) is True for key in ("is_log", "clip")}


def shown_charts(kept: Any, kinds: Sequence[Kind]) -> list[str]:
    """Return the keys of the charts to show, in order: those that were chosen, and the defaults that were not hidden.

    Args:
        kept: What the browser stored.
        kinds: The charts of the run.
    """
    charts, hidden = _chosen(kept)
    keys = [kind.key for kind in kinds]
    chosen = [key for key in dict.fromkeys(charts) if key in keys]
    return chosen + [kind.key for kind in kinds if kind.is_default and kind.key not in {*chosen, *hidden}]


def with_charts(kept: Any, shown: Sequence[str], kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return what the browser is to store after a choice of charts; choices for charts of other runs stay."""
    charts, hidden = _chosen(kept)
    keys = {kind.key for kind in kinds}
    return {
        **(kept if isinstance(kept, dict) else {}),
        "charts": [*shown, *(key for key in charts if key not in keys)],
        "hidden": [
            *(kind.key for kind in kinds if kind.is_default and kind.key not in shown),
            *(key for key in hidden if key not in keys),
        ],
    }


def _chosen(kept: Any) -> tuple[list[str], list[str]]:
    """Return the keys of the charts that were chosen, and of those that were hidden, in any run."""
    parts = [kept.get(key) if isinstance(kept, dict) else None for key in ("charts", "hidden")]
    charts, hidden = ([key for key in part if isinstance(key, str)] if isinstance(part, list) else [] for part in parts)
    return charts, hidden


def keep(kept: gr.BrowserState, **fields: Any) -> None:
    """Have a browser keep what fields say, by their names in `FIRST`; what they do not say stays."""
    names = ", ".join(fields)
    js = f"(kept, {names}) => ({{...kept, {names}}})"
    for field in fields.values():
        field.input(None, [kept, *fields.values()], [kept], js=js)
