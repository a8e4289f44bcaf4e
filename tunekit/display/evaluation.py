"""Evaluations as people see them in a terminal: figures before and after, with their intervals."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from tunekit.data.formats.row_formats import counted
from tunekit.display.drawing import numbers, plain_table
from tunekit.evaluation.bootstrap import NUM_RESAMPLES, SEED
from tunekit.runs.evaluation_result import Estimate, Evaluation, Score, newest_scores

VERDICTS = {
    "better": ("better", "green"),
    "worse": ("worse", "red"),
    "no clear difference": ("unclear", "dim"),
    "no difference": ("same", "dim"),
}
"""Rendering of each verdict on a difference."""

_METHODS = {
    "bootstrap": f"bootstrap over rows ({NUM_RESAMPLES:,} resamples, seed {SEED})",
    "Wilson": "Wilson score for proportions",
    "normal": "normal, from the standard errors of lm-evaluation-harness",
}


def evaluation_view(made: Evaluation) -> RenderableType:
    """An evaluation: what was compared, the figures, and how their intervals were made."""
    step = "" if made.step is None else f", step {made.step}"
    head = Text.assemble((made.model + step, "bold"), f" on {made.what}")
    if made.before is not None:
        head.append(f", compared with {made.before} before training", style="dim")
    notes = [Text(f"note: {note}", style="dim") for note in made.notes]
    where = f"computed in {made.settings['dtype']} on {made.settings['device']}, {made.seconds:.1f} s"
    kept = [] if made.path is None else [Text(f"saved to {made.path}", style="dim")]
    return Group(*notes, head, "", scores_table(made.scores), "", Text(_how(made.scores), style="dim"),
                 Text(where, style="dim"), *kept)  # fmt: skip


def scores_table(scores: Iterable[Score]) -> RenderableType:
    """Figures by what they are of: before, after, and the difference."""
    score_list = list(scores)
    parts: list[RenderableType] = []
    for of in dict.fromkeys(score.of for score in score_list):
        own = [score for score in score_list if score.of == of]
        num_rows = max(score.num_rows for score in own)
        parts += [Text.assemble((Path(of).name, "bold"), (f", {counted(num_rows, 'row')}", "dim")), _table(own), ""]
    return Group(*parts[:-1])


def _table(scores: Sequence[Score]) -> Table:
    compares = any(score.before is not None for score in scores)
    columns = numbers(*(("before", "after", "difference") if compares else ("after",)), no_wrap=True)
    table = plain_table(Column("", min_width=16), *columns, gap=2, shows_header=compares)
    for score in scores:
        cells = [_cell(score.after, score.digits)]
        if compares:
            gap = _cell(score.difference, score.digits, sign=True)
            words, style = VERDICTS.get(score.verdict, ("", ""))
            gap = Text.assemble((f"{words} ", style), gap) if words else gap
            cells = [_cell(score.before, score.digits), *cells, gap]
        table.add_row(Text(score.words), *cells)
    return table


def _cell(estimate: Estimate | None, digits: str, *, sign: bool = False) -> Text:
    """A figure with its interval below it."""
    if estimate is None:
        return Text("")
    value, bracket, ends = estimate.words(digits, sign=sign).partition(" [")
    return Text.assemble(value, (f"\n{bracket[1:]}{ends}", "dim"))


def _how(scores: Iterable[Score]) -> str:
    score_list = list(scores)
    named = "; ".join(dict.fromkeys(score.interval for score in score_list))
    sentence = f"95% intervals: {', '.join(words for name, words in _METHODS.items() if name in named)}"
    if "not paired" in named:
        return f"{sentence}; some differences are unpaired"
    return f"{sentence}; differences are paired by row" if any(score.difference for score in score_list) else sentence


def evaluations_table(evaluations: Iterable[Evaluation]) -> Iterator[RenderableType]:
    """The newest figures of a run and of its checkpoints; nothing where none were computed."""
    evaluation_list = list(evaluations)
    for step in dict.fromkeys(evaluation.step for evaluation in evaluation_list):
        newest = newest_scores(evaluation_list, step)
        yield Text.assemble("\n", ("evaluated" if step is None else f"evaluated at step {step}", "bold"))
        yield scores_table(score for _, score in newest)
