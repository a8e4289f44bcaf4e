"""Pages that need nothing else: no script, nothing loaded from elsewhere, and no secret told.

Curves as SVG: what a run logged over its steps, drawn with nothing but text, in the colors of the page around them.

A line of many points is thinned to the least and the greatest of each column, so that no spike is lost.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tunekit.files import load_template
from tunekit.redact import redacted


def page_of(template: str, **values: Any) -> str:
    """A page as HTML.

    Args:
        template: A file beside this one.
        values: What it names; all of it is text, but for what the template says is safe.
    """
    return redacted(load_template(Path(__file__).with_name(template)).render(**values))


CURVES = (
    ("learning_rate", "Learning rate"),
    ("grad_norm", "Gradient norm"),
    ("tokens_per_second", "Tokens per second"),
)
"""Curves of every run besides losses and metrics."""

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 34
"""Margins that hold the numbers of the axes."""

NUM_TICKS = 5

MAX_COLUMNS = 500
"""Columns that a line is thinned to."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        label: What it is called.
        points: Step and value, the steps rising.
        dots: Whether each point is marked, as few and far between.
    """

    label: str
    points: Sequence[Point]
    dots: bool = False


def draw(lines: Sequence[Line], *, title: str) -> str:
    """Curves over one pair of axes as an `<svg>`, or nothing where there is no point.

    Args:
        lines: The curves; one without points keeps its color for the same place in another picture.
        title: What a reader that sees no picture is told.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    across = _ticks(min(x for x, _ in points), max(x for x, _ in points), whole=True)
    up = _ticks(min(y for _, y in points), max(y for _, y in points))
    right, top = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(point: Point) -> Point:
        share_x = (point[0] - across[0]) / (across[-1] - across[0])
        share_y = (point[1] - up[0]) / (up[-1] - up[0])
        return LEFT + share_x * (right - LEFT), top - share_y * (top - TOP)

    parts = [
        f'<svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        f"<title>{html.escape(title)}</title>",
    ]
    for value in up:
        y = place((across[0], value))[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_said(value, up[1] - up[0])}</text>')
    for value in across:
        x = place((value, up[0]))[0]
        anchor = "end" if value == across[-1] else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="{anchor}">{value:,.0f}</text>')
    for number, line in enumerate(lines):
        if not line.points:
            continue
        placed = [place(point) for point in thinned(line.points, MAX_COLUMNS)]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="line line-{number}" points="{text}"/>')
        if line.dots or len(placed) == 1:
            parts += (f'<circle class="dot line-{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed)
    return "".join([*parts, "</svg>"])


def thinned(points: Sequence[Point], num_columns: int) -> list[Point]:
    """The points of a line, or of each column the least and the greatest where there are many more than columns."""
    if len(points) <= 2 * num_columns:
        return list(points)
    ends: list[Point] = []
    for column in range(num_columns):
        within = points[column * len(points) // num_columns : (column + 1) * len(points) // num_columns]
        ends += sorted({min(within, key=itemgetter(1)), max(within, key=itemgetter(1))})
    return ends


def _ticks(least: float, greatest: float, *, whole: bool = False) -> list[float]:
    """Round numbers from below the least to above the greatest; of steps whole ones, and the least and the greatest."""
    if greatest - least < 1e-12 * max(1.0, abs(greatest)):
        margin = 1.0 if whole else abs(least) / 10 or 1.0
        least, greatest = least - margin * (not whole), greatest + margin
    rough = (greatest - least) / (NUM_TICKS - 1)
    size = 10 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough)
    if whole:
        step = max(1, round(step))
        inner = [value * step for value in range(math.floor(least / step) + 1, math.ceil(greatest / step))]
        near = step / 2
        return [least, *(value for value in inner if least + near < value < greatest - near), greatest]
    return [number * step for number in range(math.floor(least / step), math.ceil(greatest / step) + 1)]


def _said(value: float, step: float) -> str:
    """A number of an axis, with the digits that tell it from the next one."""
    if value and (abs(value) >= 1e5 or abs(step) < 1e-3):
        return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step)) + (step / 10 ** math.floor(math.log10(step)) == 2.5))
    return f"{value:,.{digits}f}"
