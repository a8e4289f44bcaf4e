"""Curves of a run, and each chart as a Vega-Lite specification, which the browser draws.

A specification is plain data: nothing is drawn here, and no library is needed for it. Colours of text and lines are
names of gradio's style sheet, so that a chart follows the theme.
"""

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from glob import escape
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from tunekit import frontend
from webui.chart_layers import LINES, TEXT, layers_of, planned, resumes
from webui.words import Words

MAX_DRAWN = 600
"""Points of a curve that go to the browser; a chart is about as many pixels wide."""

COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a855f7", "#06b6d4", "#ec4899", "#84cc16")
"""Of curves; all can be told from light and from dark."""

MIN_CLIPPED = 10
"""Points of a curve from which on some may be outliers."""

OUTLIERS = 0.02
"""Share of the values at either end that `clip` leaves out of the axis."""


@dataclass(frozen=True)
class Kind:
    """A kind of chart.

    Attributes:
        key: What its texts are called.
        names: The curves in it, by their names in the log; a star stands for what the recipe names.
        digits: How numbers are written on the axis, as d3-format says it; None leaves that to Vega.
        held_out: Whether evaluations have the same curves.
        is_noisy: Whether values scatter about what they tell, which smoothing shows. A schedule and a peak do not.
        is_default: Whether it is shown where nobody chose; it has a title, others have the name in the log.
    """

    key: str
    names: tuple[str, ...]
    digits: str | None = None
    held_out: bool = True
    is_noisy: bool = True
    is_default: bool = True

    def title(self, words: Words) -> str:
        """Return the title in a language."""
        return words(f"charts.{self.key}") if self.is_default else self.key


KINDS = (
    Kind("reward", ("reward",)),
    Kind("functions", ("rewards/*/mean",)),
    Kind("margins", ("rewards/margins", "margin")),
    Kind("accuracies", ("rewards/accuracies", "accuracy"), "~%"),
    Kind("preferred", ("rewards/chosen", "rewards/rejected")),
    Kind("loss", ("loss",)),
    Kind("kl", ("kl",), held_out=False),
    Kind("length", ("completions/mean_length", "completions/max_length"), held_out=False),
    Kind("signal", ("frac_reward_zero_std", "completions/clipped_ratio"), "~%", held_out=False),
    Kind("learning_rate", ("learning_rate",), "~e", held_out=False, is_noisy=False),
    Kind("grad_norm", ("grad_norm",), held_out=False),
    Kind("speed", ("tokens_per_second",), "~s", held_out=False),
    Kind("memory", ("peak_memory_bytes",), held_out=False, is_noisy=False),
    Kind("entropy", ("entropy",), held_out=False),
)
"""The default kinds, in the order in which they are shown; a run has those of which it logs something."""

MOST_STEPS_NAMED = 8
"""So many steps at most are each named on the axis."""

GIB = 2**30

CURVES = {
    "rewards/chosen": "chosen",
    "rewards/rejected": "rejected",
    "completions/mean_length": "mean_length",
    "completions/max_length": "max_length",
    "frac_reward_zero_std": "no_signal",
    "completions/clipped_ratio": "cut_off",
    "peak_memory_bytes": "measured",
}
"""Curves that have a name of their own beside others of their kind."""

Axis = Literal["step", "time", "tokens", "epochs"]
AXES: tuple[Axis, ...] = get_args(Axis)

LOGGED_AXES = {"tokens": "num_tokens", "epochs": "epoch"}
"""Axes whose places are logged with each step, by their names in the log."""

Point = tuple[float, float]
"""A value at a place of the axis."""


@dataclass(frozen=True)
class View:
    """View of the charts.

    Attributes:
        smoothing: Weight of what was before in a running mean; 0 shows the values themselves.
        is_log: Whether the axis of values is logarithmic.
        by: The other axis: steps, hours since the first event, tokens trained on, or epochs.
        clip: Whether outliers are left out of the axis.
    """

    smoothing: float = 0.0
    is_log: bool = False
    by: Axis = "step"
    clip: bool = False


class Resume(NamedTuple):
    """A resume of a run: the name of the run, the place of the axis, and the step."""

    run: str
    place: float
    step: int


class Curve(NamedTuple):
    """A curve to draw.

    Attributes:
        run: Name of the run.
        name: Its name in the log.
        points: Its points by step or by hours.
        better: Which way is better; None where neither is.
    """

    run: str
    name: str
    points: list[Point]
    better: Literal["more", "less"] | None = None

    @property
    def is_held_out(self) -> bool:
        """True if it is of evaluations."""
        return self.name.startswith("eval_")


def kinds_of(names: Iterable[str]) -> list[Kind]:
    """Return the kinds of charts of a run that logs these names: the default ones, then one for every other name."""
    remaining, kinds = dict.fromkeys(names), []
    for kind in KINDS:
        if drawn := kind_names(kind, remaining):
            kinds.append(kind)
            remaining = {name: None for name in remaining if name not in drawn}
    for name in sorted(remaining):
        if name.removeprefix("eval_") not in remaining or not name.startswith("eval_"):
            kinds.append(Kind(name, (escape(name),), is_default=False))
    return kinds


def kind_names(kind: Kind, logged: Iterable[str]) -> list[str]:
    """Return the names in a log that are curves of a kind."""
    logged = list(logged)
    names = [name for name in logged if any(fnmatch(name, pattern) for pattern in kind.names)]
    if kind.held_out:
        names += [name for name in logged if name.removeprefix("eval_") in names and name not in names]
    return names


def curves_of(run: str, reader: frontend.EventReader, kind: Kind, view: View) -> list[Curve]:
    """Return a run's curves of a kind, ready to be drawn."""
    unit = GIB if kind.key == "memory" else 1
    place = _places(reader, view.by)
    return [
        Curve(
            run,
            name,
            [(place(point.step, point.time), point.value / unit) for point in reader.series[name]],
            frontend.direction_of(name.removeprefix("eval_"), reader.series),
        )
        for name in kind_names(kind, reader.series)
    ]


def _places(reader: frontend.EventReader, by: Axis) -> Callable[[int, float], float]:
    """Return what places a step and its time on the axis."""
    if by == "step":
        return lambda step, _: step
    if by == "time":
        began = reader.began or 0.0
        return lambda _, time: (time - began) / 3600
    logged = list(reader.series.get(LOGGED_AXES[by], ()))
    steps = [0, *(point.step for point in logged)]
    places = [0.0, *(point.value for point in logged)]
    return lambda step, _: places[bisect_right(steps, step) - 1]


def resumes_of(run: str, reader: frontend.EventReader, view: View) -> list[Resume]:
    """Return where a run was resumed, but for steps that a later resume from before took back."""
    place = _places(reader, view.by)
    resumes: dict[int, Resume] = {}
    for event in sorted([*reader.all("restart"), *reader.all("resume")], key=lambda event: float(event["time"])):
        # With nothing but weights, the steps begin again.
        step = 0 if event.get("weights_only") else event["step"]
        resumes = {earlier: mark for earlier, mark in resumes.items() if earlier < step}
        resumes[step] = Resume(run, place(step, event["time"]), event["step"])
    return list(resumes.values())


def smoothed(points: Sequence[Point], weight: float) -> list[Point]:
    """A running mean: each value counts `weight` times as much as the one a step later, and the first ones in full.

    Steps that are far apart count for the distance, so that a curve with points left out is smoothed like the whole.
    """
    if len(points) < 3 or not weight:
        return list(points)
    apart = sorted(b[0] - a[0] for a, b in pairwise(points))
    usual = apart[len(apart) // 2] or 1.0
    mean = total = 0.0
    before = points[0][0]
    smooth = []
    for place, value in points:
        retained = weight ** ((place - before) / usual) if place > before else weight
        mean, total, before = mean * retained + value * (1 - weight), total * retained + (1 - weight), place
        smooth.append((place, mean / total))
    return smooth


def thinned(points: Sequence[Point], limit: int = MAX_DRAWN) -> list[Point]:
    """At most so many points of a curve: the least and the greatest of equal stretches, and the last."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / (limit - 1))
    points_kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        least, most = (choose(stretch, key=lambda point: point[1]) for choose in (min, max))
        points_kept += sorted({least, most})
    return points_kept if points_kept[-1] == points[-1] else [*points_kept, points[-1]]


def spec_of(
    kind: Kind,
    curves: Sequence[Curve],
    view: View,
    words: Words,
    *,
    runs: Sequence[str] = (),
    resumed: Sequence[Resume] = (),
    planned_bytes: float | None = None,
) -> dict[str, Any]:
    """A chart as Vega-Lite.

    Args:
        kind: The kind.
        curves: Its curves, of one run or of several.
        view: How it is looked at.
        words: The language.
        runs: The runs of all charts on the page, each with its name and colour in all; by default those of the curves.
        resumed: Where its runs were resumed.
        planned_bytes: What the plan says of memory, for a line beside what was measured.
    """
    runs = list(dict.fromkeys([*runs, *(curve.run for curve in curves)]))
    unit, x_title = _unit(curves, words) if view.by == "time" else (1.0, words(f"charts.{view.by}"))
    view = view if kind.is_noisy else replace(view, smoothing=0)
    rows = list(_rows(curves, view, words, unit, several=len(runs) > 1))
    planned_gib = planned_bytes / GIB if planned_bytes and kind.key == "memory" else None
    y_scale = {"type": "log"} if view.is_log else {"type": "linear", "zero": False}
    if view.clip:
        y_scale |= _clipped(rows, planned_gib)
    labels = list(dict.fromkeys(row["c"] for row in rows))
    encoding = _encoding(kind, labels, runs, x_title, y_scale, x_axis=_x_axis(rows, view))
    layers = layers_of(rows, encoding["x"], clip=view.clip, has_legend=encoding["color"]["legend"] is not None)
    marks = [
        (
            _rounded(mark.place * unit),
            words("charts.resumed", run=f"{mark.run}: " if len(runs) > 1 else "", step=mark.step),
        )
        for mark in resumed
    ]
    if marks:
        layers.append(resumes(marks, encoding["x"]))
    if planned_gib is not None:
        layers.append(planned(planned_gib, words))
    title, helps = kind.title(words), [_help(kind, curves, words)]
    if len(runs) > 1 and any(curve.is_held_out for curve in curves):
        helps.append(words("charts.dashes"))
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": title, "subtitle": " · ".join(helps)},
        "description": f"{title}: {', '.join([*labels, *(text for _, text in marks)])}",
        "width": "container",
        # Of the plot alone, so that the axes of charts with and without a legend are in one line.
        "height": 200,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": "transparent",
        "data": {"values": rows},
        "encoding": encoding,
        "layer": layers,
        "config": CONFIG,
        "usermeta": {"embedOptions": {"renderer": "svg", "actions": False}},
    }


def _help(kind: Kind, curves: Sequence[Curve], words: Words) -> str:
    """Describe a chart, and which direction is better where there is one."""
    if not kind.is_default:
        return words("charts.as_logged")
    says_nothing = kind.key == "loss" and any(curve.better is None for curve in curves)
    return words("charts.loss_of_rewards" if says_nothing else f"charts.{kind.key}_help")


def to_text(spec: dict[str, Any]) -> str:
    """A specification as it goes to the browser."""
    return json.dumps(spec, ensure_ascii=False, separators=(",", ":"))


CONFIG: dict[str, Any] = {
    "font": "inherit",
    "view": {"stroke": None},
    "title": {"color": TEXT, "subtitleColor": TEXT, "anchor": "start", "fontSize": 14},
    "axis": {"labelColor": TEXT, "titleColor": TEXT, "gridColor": LINES, "tickColor": LINES, "domainColor": LINES},
    "axisX": {"grid": False, "labelFlush": True, "tickCount": 5},
    "axisY": {"tickCount": 5},
    "legend": {"labelColor": TEXT, "symbolType": "stroke", "symbolStrokeWidth": 3},
}
"""Theme of all charts."""


def _unit(curves: Sequence[Curve], words: Words) -> tuple[float, str]:
    """Return how many of a unit of time an hour has, and the unit's name: the largest that fits."""
    hours = max((point[0] for curve in curves for point in curve.points), default=0.0)
    if hours < 1 / 20:
        return 3600.0, words("charts.seconds")
    return (60.0, words("charts.minutes")) if hours < 2 else (1.0, words("charts.hours"))


def _rows(curves: Sequence[Curve], view: View, words: Words, unit: float, *, several: bool) -> Iterator[dict[str, Any]]:
    """Return the points of all curves, as `webui.chart_layers` draws them."""
    for place, curve in enumerate(curves):
        label = label_of(curve, words, several=several)
        # Of several runs each has its colour, and evaluations are told by their dashes.
        colour = label_of(curve._replace(name=curve.name.removeprefix("eval_")), words, several=True, brief=True)
        points = [point for point in curve.points if point[1] > 0 or not view.is_log]
        drawn = [("held_out", points)] if curve.is_held_out else [("plain", points)]
        if view.smoothing and not curve.is_held_out:
            drawn = [("faint", points), ("plain", smoothed(points, view.smoothing))]
        for kind, some in drawn:
            for x, y in thinned(some):
                at = {"x": _rounded(x * unit), "y": _rounded(y)}
                yield {**at, "c": colour if several else label, "t": label, "k": kind, "g": place}


def label_of(curve: Curve, words: Words, *, several: bool, brief: bool = False) -> str:
    """Return the label of a curve: the part that distinguishes it from the others.

    Args:
        curve: The curve.
        words: The language.
        several: Whether there are several runs.
        brief: Whether what it was measured on need not be said.
    """
    plain = curve.name.removeprefix("eval_")
    if plain in CURVES:
        label = words(f"charts.curve_{CURVES[plain]}")
    elif fnmatch(plain, "rewards/*/mean"):
        label = plain.removeprefix("rewards/").removesuffix("/mean")
    else:
        label = ""
    # Where nothing else tells curves apart, what they were measured on does.
    tells = not brief and (curve.is_held_out or not label)
    part = [words("charts.evaluation" if curve.is_held_out else "charts.training")] if tells else []
    return " · ".join([*([curve.run] if several else []), *([label] if label else []), *part])


def _encoding(
    kind: Kind,
    labels: Sequence[str],
    runs: Sequence[str],
    x_title: str,
    y_scale: dict[str, Any],
    *,
    x_axis: dict[str, Any],
) -> dict[str, Any]:
    """Return the encoding of positions and colours."""
    # A run that has no curve in a chart leaves the colours of the others there as they are.
    places = [runs.index(label) if label in runs else place for place, label in enumerate(labels)]
    colours = [COLOURS[place % len(COLOURS)] for place in places]
    legend = (
        {"title": None, "orient": "bottom", "columns": 2, "labelLimit": 240, "symbolOpacity": 1}
        if len(labels) > 1 or len(runs) > 1
        else None
    )
    return {
        "x": {
            "field": "x",
            "type": "quantitative",
            "title": x_title,
            "scale": {"zero": False, "nice": False},
            "axis": x_axis,
        },
        "y": {
            "field": "y",
            "type": "quantitative",
            "title": None,
            "scale": y_scale,
            "axis": {"format": kind.digits} if kind.digits else {},
        },
        "color": {
            "field": "c",
            "type": "nominal",
            "scale": {"domain": list(labels), "range": colours},
            "legend": legend,
        },
    }


def _x_axis(rows: Sequence[dict[str, Any]], view: View) -> dict[str, Any]:
    """Return the axis of steps, of which there is none between two, of times, or of tokens in thousands or millions."""
    if view.by == "tokens":
        return {"format": "~s"}
    steps = [int(row["x"]) for row in rows]
    if view.by != "step" or not steps or max(steps) - min(steps) > MOST_STEPS_NAMED:
        return {}
    return {"values": list(range(min(steps), max(steps) + 1)), "format": "d"}


def _clipped(rows: Sequence[dict[str, Any]], planned: float | None) -> dict[str, Any]:
    """The axis without each curve's outliers: those of what is drawn in full, not of faint values behind a mean."""
    of_curve: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["k"] != "faint":
            of_curve[row["g"]].append(row["y"])
    within = [] if planned is None else [planned]
    for values in of_curve.values():
        values.sort()
        cut = max(1, int(OUTLIERS * len(values))) if len(values) >= MIN_CLIPPED else 0
        within += [values[cut], values[-1 - cut]]
    least, most = min(within, default=0.0), max(within, default=0.0)
    return {"domain": [least, most], "nice": False} if least < most else {}


def _rounded(number: float) -> float:
    return float(f"{number:.6g}")
