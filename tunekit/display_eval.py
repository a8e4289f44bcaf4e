"""Evaluations as people see them in a terminal: figures before and after, with their intervals."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tunekit.run.evaluation import Estimate, Evaluation, Score, newest_scores
from tunekit.run.intervals import NUM_RESAMPLES, SEED

VERDICTS = {"better": "green", "worse": "red", "no clear difference": "dim", "no difference": "dim"}

_METHODS = {
    "bootstrap": f"bootstrap over rows ({NUM_RESAMPLES:,} resamples, seed {SEED})",
    "Wilson": "Wilson's of shares",
    "normal": "normal, by lm-evaluation-harness's standard errors",
}


def evaluation_view(made: Evaluation) -> RenderableType:
    """An evaluation: what was compared, the figures, and how their intervals were made."""
    step = "" if made.step is None else f", step {made.step}"
    head = Text.assemble((made.model + step, "bold"), f" on {made.what}")
    if made.before is not None:
        head.append(f", beside {made.before} before training", style="dim")
    notes = [Text(f"note: {note}", style="dim") for note in made.notes]
    where = f"computed in {made.settings['dtype']} on {made.settings['device']}, {made.seconds:.1f} s"
    kept = [] if made.path is None else [Text(f"kept in {made.path}", style="dim")]
    return Group(*notes, head, "", scores_table(made.scores), "", Text(_how(made.scores), style="dim"),
                 Text(where, style="dim"), *kept)  # fmt: skip


def scores_table(scores: Iterable[Score]) -> Table:
    """Figures by what they are of: before, after, and the difference."""
    shown = list(scores)
    compares = any(score.before is not None for score in shown)
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("")
    for column in ("before", "after", "difference") if compares else ("",):
        table.add_column(column, justify="right")
    if compares:
        table.add_column("")
    last = None
    for score in shown:
        if score.of != last:
            rows = f"{score.num_rows:,} row{'s' * (score.num_rows != 1)}"
            table.add_row(Text.assemble((Path(score.of).name, "bold"), (f", {rows}", "dim")))
        last = score.of
        ours = _cell(score.after, score.digits)
        if not compares:
            table.add_row(Text(f"  {score.words}"), ours)
            continue
        table.add_row(
            Text(f"  {score.words}"),
            _cell(score.before, score.digits),
            ours,
            _cell(score.difference, score.digits, sign=True),
            Text(score.verdict, style=VERDICTS.get(score.verdict, "")),
        )
    return table


def _cell(estimate: Estimate | None, digits: str, *, sign: bool = False) -> Text:
    """A figure with its interval below it."""
    if estimate is None:
        return Text("")
    value, bracket, ends = estimate.words(digits, sign=sign).partition(" [")
    return Text.assemble(value, (f"\n{bracket[1:]}{ends}", "dim"))


def _how(scores: Iterable[Score]) -> str:
    named = "; ".join(dict.fromkeys(score.interval for score in scores))
    found = [words for name, words in _METHODS.items() if name in named]
    unpaired = "; not paired where it says so" if "not paired" in named else ""
    return f"intervals of 95%: {', '.join(found)}; differences are paired, row by row{unpaired}"


def evaluations_table(evaluations: Iterable[Evaluation]) -> Iterator[RenderableType]:
    """The newest figures of a run and of its checkpoints; nothing where none were computed."""
    made = list(evaluations)
    for step in dict.fromkeys(one.step for one in made):
        newest = newest_scores(made, step)
        yield Text.assemble("\n", ("evaluated" if step is None else f"evaluated at step {step}", "bold"))
        yield scores_table(score for _, score in newest)
