"""A sweep as one HTML page that needs nothing else: its table, and the curves of its runs over each other."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tunekit.planner.throughput.speed import duration
from tunekit.recipe.entries import UNSET
from tunekit.recipe.reading.rewrite import edit_text
from tunekit.recipe.reading.write import to_inline_yaml
from tunekit.recipe.sections.section import TAG
from tunekit.redact import redacted
from tunekit.reporting.curves import Line, draw
from tunekit.sweeps.folder import RECIPE, Outcome, Sweep, heading, short_words
from tunekit.sweeps.plot import MAX_LINES, ranked

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
    import jinja2

    spec, outcomes = sweep.spec, sweep.outcomes()
    best, order = sweep.best(outcomes), ranked(outcomes, spec.measure)
    visible = order[:MAX_LINES]
    lines = [
        Line(_label(outcome), spec.measure.points(outcome.run.events()), dots=spec.measure.is_held_out)
        for outcome in visible
        if outcome.run is not None
    ]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = Path(__file__).with_name("sweep.html.jinja").read_text(encoding="utf-8")
    html = environment.from_string(template).render(
        name=sweep.name,
        num_runs=spec.num_runs,
        search=spec.search,
        how=spec.measure.how,
        best=None if best is None else (short_words(best.trial.changes), f"{best.value:.4f}"),
        headings=["run", *map(heading, spec.axes), "steps", spec.measure.words, "tokens/s", "time", "state"],
        rows=[_row(outcome, sweep, outcomes, best) for outcome in outcomes],
        svg=draw(lines, title=f"{spec.measure.words} over the steps"),
        labels=[line.label for line in lines],
        num_hidden=len(order) - len(visible),
        measure=spec.measure.words,
        commands=[f"tunekit sweep show {sweep.path}", f"tunekit resume {sweep.path}"],
        recipe=_common_text(sweep),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return redacted(html)


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
