"""Parallel coordinates of runs: an axis for each recipe field that is a column of the table, and for the results."""

from collections.abc import Callable, Sequence
from typing import Any

from tunekit import frontend
from webui.chart_layers import TEXT
from webui.charts import CONFIG, to_text
from webui.listing import Line
from webui.words import Words

MAX_RUNS = 200
"""Runs that are drawn, the newest ones."""


def plot_of(lines: Sequence[Line], keys: Sequence[str], fields: dict[str, dict[str, str]], words: Words) -> str | None:
    """Return the plot as Vega-Lite in JSON; None where there are not two runs with a result, or no field is chosen.

    Args:
        lines: The runs, the newest first. Those that do not have the most frequent metric are left out.
        keys: Recipe fields.
        fields: Their values, by run and key.
        words: The texts.
    """
    names = [line.measure for line in lines if line.value is not None]
    if not keys or not names:
        return None
    measure = max(dict.fromkeys(names), key=names.count)
    chosen = [line for line in lines if line.value is not None and line.measure == measure][:MAX_RUNS]
    if len(chosen) < 2:
        return None
    axes: list[tuple[str, list[str | float | None]]] = [
        (key, [_number(fields.get(line.name, {}).get(key)) for line in chosen]) for key in keys
    ]
    axes.append((words("runs.measure") + f" ({measure})", [line.value for line in chosen]))
    if any(line.held_out is not None for line in chosen):
        axes.append((words("runs.held_out"), [line.held_out for line in chosen]))
    return to_text(_spec(chosen, axes, measure, words))


def _number(text: str | None) -> str | float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _scale(values: Sequence[str | float | None]) -> Callable[[str | float], float]:
    """Return the height of a value on its axis, from 0 to 1: linear for numbers, and evenly spread for words."""
    present = [value for value in values if value is not None]
    numbers = [value for value in present if isinstance(value, float | int)]
    if len(numbers) == len(present) and numbers:
        low, high = min(numbers), max(numbers)
        return lambda value: 0.5 if high == low else (float(value) - low) / (high - low)
    order = sorted({str(value) for value in present})
    return lambda value: 0.5 if len(order) == 1 else order.index(str(value)) / (len(order) - 1)


def _text(value: str | float) -> str:
    text = value if isinstance(value, str) else f"{value:.4g}"
    return text if len(text) <= 24 else f"{text[:23]}…"


def _spec(
    lines: Sequence[Line], axes: Sequence[tuple[str, list[str | float | None]]], measure: str, words: Words
) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for axis, values in axes:
        height = _scale(values)
        present = [value for value in values if value is not None]
        points += [
            {"run": line.name, "axis": axis, "y": height(value), "value": _text(value), "result": line.value}
            for line, value in zip(lines, values, strict=True)
            if value is not None
        ]
        is_number = all(not isinstance(value, str) for value in present)
        ends = {min(present), max(present)} if is_number else {str(value) for value in present}
        labels += [{"axis": axis, "y": height(value), "value": _text(value)} for value in ends]
    order = [axis for axis, _ in axes]
    x = {"field": "axis", "type": "nominal", "sort": order, "scale": {"padding": 0.3}}
    y = {"field": "y", "type": "quantitative", "axis": None, "scale": {"domain": [0, 1]}}
    is_less = frontend.direction_of(measure, ()) == "less"
    # Without its brightest end, which is hard to see on white.
    scheme = {"scheme": {"name": "viridis", "extent": [0, 0.85]}, "reverse": is_less}
    line = {
        "mark": {"type": "line", "opacity": 0.75, "strokeWidth": 1.5},
        "encoding": {
            "x": {**x, "axis": {"title": None, "labelAngle": 0, "labelLimit": 160, "grid": True, "domain": False}},
            "y": y,
            "detail": {"field": "run"},
            "color": {"field": "result", "type": "quantitative", "scale": scheme, "title": measure},
        },
    }
    points_layer = {
        "mark": {"type": "point", "filled": True, "size": 50},
        "encoding": {
            **line["encoding"],
            "tooltip": [{"field": name, "title": title} for name, title in _tooltip(words).items()],
        },
    }
    texts = {
        "data": {"values": labels},
        "mark": {"type": "text", "align": "left", "dx": 8, "fontSize": 11, "color": TEXT},
        "encoding": {"x": x, "y": y, "text": {"field": "value"}},
    }
    title = words("runs.parallel")
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": title, "subtitle": words("runs.parallel_help")},
        "description": f"{title}: {', '.join(order)}",
        "width": "container",
        "height": 240,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": "transparent",
        "data": {"values": points},
        "layer": [line, points_layer, texts],
        "config": CONFIG,
        "usermeta": {"embedOptions": {"renderer": "svg", "actions": False}},
    }


def _tooltip(words: Words) -> dict[str, str]:
    return {"run": words("runs.name"), "axis": words("controls.effects_key"), "value": words("runs.value")}
