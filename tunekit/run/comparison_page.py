"""A comparison of runs as one HTML page, in the look of a run's report."""

from datetime import UTC, datetime

from tunekit.run.comparison import NONE, Comparison
from tunekit.run.curves import draw
from tunekit.run.page import page_of


def comparison_page(comparison: Comparison) -> str:
    """Runs side by side as a page that loads nothing from elsewhere."""
    names, stories = comparison.names, comparison.stories
    rows = [
        ("state", [story.state for story in stories], frozenset[int]()),
        ("steps", [story.step_words for story in stories], frozenset[int]()),
        *((figure.what, list(figure.words), figure.best) for figure in comparison.figures),
    ]
    return page_of(
        "comparison.html.jinja",
        names=names,
        figures=rows,
        curves=[
            (overlay.title, draw(overlay.lines, title=f"{overlay.title} of each run over the steps"))
            for overlay in comparison.overlays
        ],
        tables=[
            ("In what the recipes differ", "They are the same.", comparison.recipe),
            ("In what data, lineage and machine differ", "In nothing that is known.", comparison.surroundings),
        ],
        answers=comparison.answers,
        notes=comparison.notes,
        missing=NONE,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
