"""Runs side by side in a terminal. The runs are letters there: names would leave no room."""

from collections.abc import Iterator, Mapping, Sequence
from string import ascii_uppercase

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from tunekit.display.drawing import plain_table, plotted
from tunekit.reporting.comparison import NONE, Comparison, Overlay
from tunekit.reporting.page import thinned

MAX_LETTERS = 60
"""Of a value in a table."""

DRAWN = ("loss", "eval_loss")
"""Curves that are drawn where there is no other; the others are on the page and in the picture."""


def comparison_parts(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    """Runs side by side: which, what came of them, their curves, and in what they differ."""
    letters = ascii_uppercase[: len(comparison.names)]
    named = plain_table("", "run", "state", "step")
    for letter, name, story in zip(letters, comparison.names, comparison.stories, strict=True):
        named.add_row(letter, Text(name), story.state, story.step_words)
    yield named
    yield ""
    figures = _table("", letters)
    for figure in comparison.figures:
        words = [
            Text(f"{word} *" if place in figure.best else word, style="bold green" if place in figure.best else "")
            for place, word in enumerate(figure.words)
        ]
        figures.add_row(figure.what, *words)
    yield figures
    if any(figure.best for figure in comparison.figures):
        yield Text("* best", style="dim")
    for note in comparison.notes:
        yield Text(f"note: {note}", style="yellow")
    for overlay in comparison.overlays:
        if overlay.key in DRAWN or overlay is comparison.overlays[0]:
            yield Text(f"\n{_drawn(overlay, letters, width)}")
    yield ""
    yield _differences("recipe", comparison.recipe, letters) or Text("the recipes are identical")
    yield ""
    yield _differences("other", comparison.surroundings, letters) or Text("no other known differences")


def _table(first: str, letters: str) -> Table:
    return plain_table(first, *(Column(letter, overflow="fold") for letter in letters))


def _differences(title: str, rows: Mapping[str, Sequence[str | None]], letters: str) -> Table | None:
    if not rows:
        return None
    table = _table(title, letters)
    for key, values in rows.items():
        table.add_row(Text(key), *(Text(NONE if value is None else _short(value)) for value in values))
    return table


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_LETTERS else f"{line[: MAX_LETTERS - 4]} ..."


def _drawn(overlay: Overlay, letters: str, width: int) -> str:
    """A curve of each run, whose points are the run's letter."""
    size = min(width, 100)
    lettered = [(line.points, letter) for letter, line in zip(letters, overlay.lines, strict=True) if line.points]
    return plotted(overlay.title, size, 16, [(thinned(points, size // 4), letter) for points, letter in lettered])
