"""A sweep as one HTML page that needs nothing else: its table, and the curves of its runs over each other.

Pictures of a sweep: what its runs came to by each value, and their curves over each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.errors import DependencyError
from tunekit.estimates.throughput.speed import duration
from tunekit.recipe.entries import UNSET
from tunekit.recipe.reading.parse import to_inline_yaml
from tunekit.recipe.reading.rewrite import edit_text
from tunekit.recipe.sections.section import TAG
from tunekit.reporting.page import Line, draw, page_of
from tunekit.sweeps.folder import FINISHED, RECIPE, Outcome, Sweep, heading, short_words
from tunekit.sweeps.measure import PREFIX, Measure
from tunekit.sweeps.values import LOG_FACTOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_LINES = 8
"""Curves that have a colour and a name, the best; the others are grey."""

MAX_PANELS = 4
"""Keys that have a picture of their own, the first."""

MAX_TICKS = 6
"""Values that are written below the axis themselves."""

PNG = "sweep.png"


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot(sweep: Sweep) -> "Figure":
    """The measure by the values of each key, and the curves of all runs.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    if not can_plot():
        raise DependencyError("plotting needs matplotlib", hint="install it with: pip install 'tunekit[notebook]'")
    from matplotlib import pyplot

    spec, outcomes = sweep.spec, sweep.outcomes()
    keys = list(spec.axes)[:MAX_PANELS]
    figure, panels = pyplot.subplots(1, len(keys) + 1, figsize=(4.2 * (len(keys) + 1), 4.2), layout="constrained")
    best = sweep.best(outcomes)
    for key, axes in zip(keys, panels[:-1], strict=True):
        _by_value(axes, key, [other for other in spec.axes if other != key], outcomes, best)
        axes.set_ylabel(spec.measure.words)
    _curves(panels[-1], spec.measure, outcomes, best)
    figure.suptitle(f"{sweep.name}: {spec.measure.words} of {len(outcomes)} runs")
    # Closed, pyplot does not draw it a second time behind a notebook's cell; it can still be shown and saved.
    pyplot.close(figure)
    return figure


def save_plot(sweep: Sweep) -> Path | None:
    """Write the picture into the sweep's folder; None where matplotlib is missing, or nothing has a measure yet."""
    if not can_plot() or not any(outcome.value is not None for outcome in sweep.outcomes()):
        return None
    plot(sweep).savefig(sweep.path / PNG, dpi=130)
    return sweep.path / PNG


def ranked(outcomes: Sequence[Outcome], measure: Measure) -> list[Outcome]:
    """Those that have a measure, the best that finished first, those that did not behind them."""
    sign = -1 if measure.greater_is_better else 1
    with_values = [outcome for outcome in outcomes if outcome.value is not None]
    return sorted(with_values, key=lambda one: (one.state != FINISHED, sign * (one.value or 0.0)))


def _by_value(axes: "Axes", key: str, others: Sequence[str], outcomes: Sequence[Outcome], best: Outcome | None) -> None:
    """Points of one key; those that are alike in the others are one line, where they are few enough."""
    with_values = [outcome for outcome in outcomes if outcome.value is not None and outcome.state == FINISHED]
    values = [outcome.trial.changes[key] for outcome in with_values]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    is_numeric = len(numbers) == len(values)
    if not with_values:
        axes.text(0.5, 0.5, "no run has finished", transform=axes.transAxes, ha="center")
    written = list(dict.fromkeys(to_inline_yaml(value) for value in values))

    def place(value: Any) -> float:
        return float(value) if is_numeric else float(written.index(to_inline_yaml(value)))

    groups: dict[str, list[Outcome]] = {}
    for outcome in with_values:
        alike = short_words({other: outcome.trial.changes[other] for other in others})
        groups.setdefault(alike, []).append(outcome)
    has_lines = len(groups) < len(with_values) and len(groups) <= MAX_LINES
    for name, group in groups.items():
        pairs = sorted((place(outcome.trial.changes[key]), outcome.value or 0.0) for outcome in group)
        if has_lines:
            axes.plot(*_columns(pairs), "o-", label=name or None)
        else:
            axes.plot(*_columns(pairs), "o", color="tab:blue", alpha=0.8)
    if best is not None and best.value is not None:
        at = place(best.trial.changes[key])
        axes.plot([at], [best.value], "o", markersize=14, markerfacecolor="none", color="tab:red", label="best")
    if is_numeric and numbers and min(numbers) > 0 and max(numbers) >= LOG_FACTOR * min(numbers):
        axes.set_xscale("log")
    if len(written) <= MAX_TICKS:
        places = {to_inline_yaml(value): place(value) for value in values}
        axes.set_xticks(list(places.values()), list(places))
        axes.minorticks_off()
    axes.set_xlabel(key)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _curves(axes: "Axes", measure: Measure, outcomes: Sequence[Outcome], best: Outcome | None) -> None:
    """Plot the measure of the runs over their steps."""
    from matplotlib.ticker import MaxNLocator

    order = ranked(outcomes, measure)
    style = "o-" if measure.is_held_out else "-"
    values: list[float] = []
    for place, outcome in reversed(list(enumerate(order))):
        points = measure.points(outcome.run.events()) if outcome.run is not None else []
        values += [value for _, value in points]
        color, label = "0.8", None
        if place < MAX_LINES:
            color, label = f"C{place}", f"{_label(outcome)}{' (best)' if outcome is best else ''}"
        width = 2.2 if outcome is best else 1.2
        axes.plot(*_columns(points), style, color=color, linewidth=width, markersize=4, label=label)
    if values and min(values) > 0 and max(values) >= 100 * min(values) and math.isfinite(max(values)):
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel=("evaluation " if measure.is_held_out else "") + measure.name.removeprefix(PREFIX))
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles[::-1], labels[::-1], fontsize="x-small")


HTML = "sweep.html"


@dataclass(frozen=True)
class Row:
    """A run in the page's table.

    Attributes:
        cells: Its figures in words.
        share: How far its measure is from the worst towards the best, from 0 to 1; None where it has none.
        is_best: Whether it is the best.
        why: Why it failed.
    """

    cells: tuple[str, ...]
    share: float | None
    is_best: bool
    why: str | None


def page(sweep: Sweep) -> str:
    """A sweep as one HTML page that loads nothing from elsewhere."""
    spec, outcomes = sweep.spec, sweep.outcomes()
    best, order = sweep.best(outcomes), ranked(outcomes, spec.measure)
    visible = order[:MAX_LINES]
    lines = [
        Line(_label(outcome), spec.measure.points(outcome.run.events()), dots=spec.measure.is_held_out)
        for outcome in visible
        if outcome.run is not None
    ]
    return page_of(
        "sweep.html.jinja",
        name=sweep.name,
        num_runs=spec.num_runs,
        search=spec.search,
        how=spec.measure.how,
        best=None if best is None else (short_words(best.trial.changes), f"{best.value:.4f}"),
        headings=["run", *map(heading, spec.axes), "steps", spec.measure.words, "tokens/s", "time", "state"],
        rows=[_row(outcome, sweep, outcomes, best) for outcome in outcomes],
        svg=draw(lines, title=f"{spec.measure.words} by step"),
        labels=[line.label for line in lines],
        num_hidden=len(order) - len(visible),
        measure=spec.measure.words,
        commands=[f"tunekit sweep show {sweep.path}", f"tunekit resume {sweep.path}"],
        recipe=_common_text(sweep),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def save_page(sweep: Sweep) -> Path:
    """Write the page into the sweep's folder."""
    (sweep.path / HTML).write_text(page(sweep), encoding="utf-8")
    return sweep.path / HTML


def _common_text(sweep: Sweep) -> str:
    """The recipe of a sweep without what its runs differ in."""
    text = (sweep.path / RECIPE).read_text(encoding="utf-8")
    for key in sweep.spec.axes:
        section, _, last = key.rpartition(".")
        # What else such a section holds may not go with every type.
        text = edit_text(text, section if last == TAG else key, UNSET)
    return text


def _label(one: Outcome) -> str:
    return f"{one.trial.number}: {short_words(one.trial.changes)}"


def _row(one: Outcome, sweep: Sweep, outcomes: list[Outcome], best: Outcome | None) -> Row:
    spec = sweep.spec
    values = [other.value for other in outcomes if other.value is not None]
    least, greatest = min(values, default=0.0), max(values, default=0.0)
    share = None
    if one.value is not None and greatest > least:
        share = (one.value - least) / (greatest - least)
        share = share if spec.measure.greater_is_better else 1 - share
    cells = (
        str(one.trial.number),
        *(to_inline_yaml(one.trial.changes[key]) for key in spec.axes),
        f"{one.step}/{one.num_steps}" if one.num_steps else "",
        "" if one.value is None else f"{one.value:.4f}",
        "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
        "" if one.seconds is None else duration(one.seconds),
        one.state,
    )
    return Row(cells, share, one is best, one.why)
