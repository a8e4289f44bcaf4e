"""Tables without lines and curves over steps, as all views draw them."""

from collections.abc import Iterable, Sequence

from rich.table import Column, Table

Curve = tuple[Sequence[tuple[float, float]], str]
"""Points, each a step and a value, and their marker; `braille` draws a line."""


def plain_table(
    *columns: str | Column, gap: int = 3, shows_header: bool = True, header_style: str | None = None
) -> Table:
    """Return a table without lines, with spaces between its columns."""
    padding = (0, gap, 0, 0)
    return Table(*columns, box=None, padding=padding, show_header=shows_header, header_style=header_style)


def numbers(*names: str, no_wrap: bool = False) -> list[Column]:
    """Return columns whose cells stand to the right."""
    return [Column(name, justify="right", no_wrap=no_wrap) for name in names]


def plotted(title: str, width: int, height: int, curves: Iterable[Curve]) -> str:
    """Draw curves over steps as terminal text."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.title(title)
    for points, marker in curves:
        signal = figure.signal([step for step, _ in points], [value for _, value in points], marker=marker)
        figure.draw(signal.lines() if marker == "braille" else signal)
    figure.label("step", "x")
    return str(plotext.uncolorize(str(figure.build())))
