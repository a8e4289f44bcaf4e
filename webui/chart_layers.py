"""Layers of a chart as Vega-Lite: its curves, the band below the pointer, and lines at what happened or was planned.

Rows of curves have `x` and `y`, `c` for what their colour stands for, `t` for what the curve is called, `k` for how it
is drawn (`plain`, `held_out`, or `faint` for raw values of a smoothed curve), and `g` for what belongs together.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from webui.words import Words

MOST_POINTS = 40
"""Evaluations in a chart up to which each is marked by a point."""

MAX_BANDS = 200
"""Places of the axis that the pointer tells apart; a chart is about twice as many pixels wide."""

NEAR = 0.01
"""Share of the axis up to which a value counts as one of the place of the pointer."""

TEXT, LINES = "var(--body-text-color)", "var(--border-color-primary)"

ZOOM: dict[str, Any] = {
    "name": "zoom",
    "bind": "scales",
    # With Ctrl, as trackpads pinch: the wheel alone scrolls the page. With Shift, browsers turn it sideways.
    "select": {
        "type": "interval",
        "encodings": ["x"],
        "translate": "[pointerdown[event.shiftKey], window:pointerup] > window:pointermove!",
        "zoom": "wheel![event.ctrlKey]",
        "clear": "dblclick",
    },
}
"""Zoom into a chart along its steps, and back by a double click."""

POINTER: dict[str, Any] = {
    "name": "pointer",
    "select": {"type": "point", "fields": ["x"], "on": "pointerover", "clear": "pointerout"},
}
"""The place of the axis that is nearest to the pointer."""


SHOWN: dict[str, Any] = {
    "name": "shown",
    "select": {"type": "point", "fields": ["c"], "toggle": "true"},
    "bind": "legend",
}
"""Choice of curves by a click in the legend, until the next one there: the others fade. Without, all are shown."""

FAINT = 0.3
"""Opacity of raw values behind a smoothed curve."""

FADED = 0.1
"""Opacity of curves that were not chosen, as a part of their own."""


def layers_of(
    rows: Sequence[dict[str, Any]], x: dict[str, Any], *, clip: bool, has_legend: bool
) -> list[dict[str, Any]]:
    """Return the layers of curves, and what shows their values at the pointer.

    Args:
        rows: The points of all curves.
        x: The encoding of their places.
        clip: Whether points outside the plot are hidden.
        has_legend: Whether there is a legend, which chooses curves.
    """

    def grouped(opacity: float = 1) -> dict[str, Any]:
        by = {"detail": {"field": "g"}}
        chosen = {"condition": {"param": "shown", "value": opacity}, "value": FADED * opacity}
        return by | {"opacity": chosen} if has_legend else by

    held_out = {"filter": "datum.k == 'held_out'"}
    layers: list[dict[str, Any]] = []
    if any(row["k"] == "faint" for row in rows):
        mark = {"type": "line", "strokeWidth": 1, "opacity": FAINT, "clip": clip}
        layers.append({"transform": [{"filter": "datum.k == 'faint'"}], "mark": mark, "encoding": grouped(FAINT)})
    # A single point makes no line.
    mark = {"type": "line", "strokeWidth": 2, "clip": clip, "point": {"size": 12} if len(rows) < 80 else False}
    layers.append({"transform": [{"filter": "datum.k == 'plain'"}], "mark": mark, "encoding": grouped()})
    if num_held_out := sum(row["k"] == "held_out" for row in rows):
        # Points of many evaluations would make a band over the other curves.
        points = {"size": 40} if num_held_out < MOST_POINTS else False
        dashed = {"type": "line", "strokeWidth": 2, "strokeDash": [6, 3], "clip": clip, "point": points}
        layers.append({"transform": [held_out], "mark": dashed, "encoding": grouped()})
    if has_legend:
        layers[-1]["params"] = [SHOWN]
    at_pointer = {"opacity": {"condition": {"param": "pointer", "empty": False, "value": 1}, "value": 0}}
    layers.append(
        {
            "transform": [{"filter": "datum.k != 'faint'"}],
            "mark": {"type": "point", "filled": True, "size": 50, "clip": clip},
            "encoding": at_pointer,
        }
    )
    return [*layers, _bands(rows, x)]


def _bands(rows: Sequence[dict[str, Any]], x: dict[str, Any]) -> dict[str, Any]:
    """Return bands side by side from one end of the plot to the other, whose tooltips have the values of all curves."""
    titles = {row["g"]: row["t"] for row in rows}
    return {
        "data": {"values": bands_of(rows)},
        "mark": {"type": "rect", "fill": TEXT},
        "params": [POINTER, ZOOM],
        "encoding": {
            "x": {**x, "field": "a"},
            "x2": {"field": "b"},
            "y": None,
            "color": None,
            "opacity": {"condition": {"param": "pointer", "empty": False, "value": 0.1}, "value": 0},
            "tooltip": [
                {"field": "x", "type": "quantitative", "title": x["title"], "format": ",.6~r"},
                *({"field": f"v{g}", "type": "nominal", "title": title} for g, title in titles.items()),
            ],
        },
    }


def bands_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return places of the axis with their borders `a` and `b`, and `vG` for the value of each curve G there.

    A curve's value is that of its nearest point, followed by the place of that point where it is another one; curves
    that have ended before or begin after have none.
    """
    curves: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row["k"] != "faint":
            curves.setdefault(row["g"], []).append((row["x"], row["y"]))
    places = sorted({x for points in curves.values() for x, _ in points})
    if not places:
        return []
    span = places[-1] - places[0]
    size = math.ceil(len(places) / MAX_BANDS)
    places = [*places[:-1:size], places[-1]]
    middles = [(left + right) / 2 for left, right in pairwise(places)]
    ends = [places[0] - (0 if span else 0.5), *middles, places[-1] + (0 if span else 0.5)]
    bands: list[dict[str, Any]] = [{"x": x, "a": a, "b": b} for x, (a, b) in zip(places, pairwise(ends), strict=True)]
    for g, points in curves.items():
        for band in bands:
            band[f"v{g}"] = _value_at(points, band["x"], near=NEAR * span)
    return bands


def _value_at(points: Sequence[tuple[float, float]], x: float, *, near: float) -> str:
    right = bisect_left(points, (x,))
    around = [points[place] for place in (right - 1, right) if 0 <= place < len(points)]
    at, value = min(around, key=lambda point: abs(point[0] - x))
    if abs(at - x) <= near:
        return f"{value:.5g}"
    return f"{value:.5g} ({at:.6g})" if len(around) > 1 else "–"


def resumes(marks: Sequence[tuple[float, str]], x: dict[str, Any]) -> dict[str, Any]:
    """Return thin lines where runs were resumed.

    Args:
        marks: Places of the axis, each with its text.
        x: The encoding of places.
    """
    alone = {"x": x, "y": None, "color": None, "tooltip": {"field": "w", "type": "nominal"}}
    return {
        "data": {"values": [{"x": place, "w": text} for place, text in marks]},
        "layer": [
            {"mark": {"type": "rule", "stroke": TEXT, "opacity": 0.6}, "encoding": alone},
            {"mark": {"type": "text", "text": "↻", "y": 8, "dx": 8, "size": 14, "fill": TEXT}, "encoding": alone},
        ],
    }


def planned(gib: float, words: Words) -> dict[str, Any]:
    """Return a line where the plan expects the memory."""
    alone = {"x": None, "color": None, "tooltip": {"field": "w", "type": "nominal"}}
    return {
        "data": {"values": [{"y": float(f"{gib:.6g}"), "w": words("charts.planned", gib=f"{gib:.2f}")}]},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [4, 4], "stroke": TEXT}, "encoding": alone},
            {
                "mark": {"type": "text", "align": "left", "x": 4, "dy": 10, "fill": TEXT},
                "encoding": {**alone, "text": {"field": "w", "type": "nominal"}},
            },
        ],
    }
